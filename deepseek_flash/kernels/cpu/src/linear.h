// Linear layers for drivers: quantise the activations once, then run every layer that reads them.
#pragma once
#include <cstdint>

#include "ops.h"
#include "pool.h"

namespace flash {

// A set of forms as bits: groups of 16, 32, 64, 128 are bits 0 to 3, with two terms 4 to 7; float kinds need none.
uint32_t group_bit(const flash_linear& w);

// Forms of the same rows, one for each group size and precision that some reader uses.
struct QuantForms {
  QuantRows form[8];  // by group size, then again with two terms; unused ones have q == nullptr
};

int64_t outputs(const flash_linear& w);        // of all parts
int64_t linear_buffer(const flash_linear& w);  // bytes a thread needs, of this part
int64_t quant_forms_bytes(uint32_t groups, int64_t widest_k, int64_t rows);
QuantForms quant_forms(uint32_t groups, int64_t widest_k, int64_t rows, void* memory);  // fields only; memory may be null

// Rows [begin, end) of x into the forms that the parts of w read. One thread.
void quantize_forms(const QuantForms& forms, const flash_linear& w, const float* x, int64_t ldx, int64_t begin,
                    int64_t end);
// y [rows, outputs(w)] from activations prepared with quantize_forms (and x itself for float kinds), bias included.
// buffers: threads_of(pool) times buffer_bytes.
void linear_prepared(Pool* pool, const flash_linear& w, const QuantForms& forms, const float* x, int64_t ldx,
                     int64_t rows, float* y, int64_t ldy, void* buffers, int64_t buffer_bytes);

}  // namespace flash
