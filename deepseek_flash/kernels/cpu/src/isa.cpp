// The kernels of one instruction set: compiled once for each, with FLASH_ISA naming it.
#include "attention_isa.h"
#include "linear_isa.h"
#include "pointwise_isa.h"
#include "sample_isa.h"

#define FLASH_TEXT_(x) #x
#define FLASH_TEXT(x) FLASH_TEXT_(x)
#define FLASH_TABLE_(isa) table_##isa
#define FLASH_TABLE(isa) FLASH_TABLE_(isa)

namespace flash {

extern const Ops FLASH_TABLE(FLASH_ISA);
const Ops FLASH_TABLE(FLASH_ISA) = {
    FLASH_TEXT(FLASH_ISA),
    FLASH_ISA::quantize,
    FLASH_ISA::linear_quant,
    FLASH_ISA::linear_float,
    FLASH_ISA::linear_rows,
    FLASH_ISA::norm,
    FLASH_ISA::head_norm,
    FLASH_ISA::argmax,
    FLASH_ISA::sample,
    FLASH_ISA::silu_mul,
    FLASH_ISA::rope_write,
    FLASH_ISA::attend,
    FLASH_ISA::combine,
};

}  // namespace flash
