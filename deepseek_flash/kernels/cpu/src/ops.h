// What one thread does, as a table of functions: one table an instruction set, the drivers (pool, order of work, C
// interface) are compiled once. Ranges are [begin, end). Nothing here allocates or waits.
#pragma once
#include "flash.h"

#define FLASH_API extern "C" __attribute__((visibility("default")))

namespace flash {

// Activations of some rows as int8 with a scale and a sum for every group, for GroupQuant products.
//   q      int8 [rows, k rounded up to 32 and to the group]; zero past k
//   scale  fp32 [rows, groups], amax / 127
//   total  int32 [rows, groups], sum of q
struct QuantRows {
  int8_t* q;
  float* scale;
  int32_t* total;
  int64_t ldq;      // bytes from row to row, a multiple of 64
  int64_t groups;   // a row
  int32_t group;
};

struct Ops {
  const char* name;

  // linear.cpp
  void (*quantize)(const float* x, int64_t ldx, int64_t k, const QuantRows& out, int64_t begin, int64_t end);
  // Panels of 16 outputs, all rows; y [rows, n], bias added. buffer: linear_buffer(w) bytes of this thread.
  void (*linear_quant)(const flash_linear& w, const QuantRows& x, int64_t rows, float* y, int64_t ldy, int64_t begin,
                       int64_t end, void* buffer);
  void (*linear_float)(const flash_linear& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
                       int64_t begin, int64_t end, void* buffer);
  void (*linear_rows)(const flash_linear& w, const int64_t* ids, int64_t begin, int64_t end, float* out);

  // pointwise.cpp; sum may be null (no residual) or alias
  void (*norm)(const float* x, int64_t ldx, const float* residual, const float* weight, float eps, int64_t dim,
               float* y, float* sum, int64_t begin, int64_t end);
  // heads of a token side by side, each normalised on its own; in place, row stride ld
  void (*head_norm)(float* x, int64_t ld, const float* weight, float eps, int64_t heads, int64_t dim, int64_t begin,
                    int64_t end);
  void (*silu_mul)(const float* gate_up, int64_t n, float* y, int64_t begin, int64_t end);

  // attention.cpp
  void (*rope_write)(const float* qkv, int64_t ldq, int32_t heads, const flash_cache& cache, const flash_step& step,
                     float* q, int64_t begin, int64_t end);
  // One work item of an attention plan; the item's meaning belongs to attention.cpp and attention_plan.h.
  void (*attend)(const void* plan, int64_t item, void* buffer);
  void (*combine)(const void* plan, int64_t begin, int64_t end);
};

const Ops& ops();  // of the instruction set in use

}  // namespace flash
