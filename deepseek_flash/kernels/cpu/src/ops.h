// What one thread does, as a table of functions: one table an instruction set, the drivers (pool, order of work, C
// interface) are compiled once. Ranges are [begin, end). Nothing here allocates or waits.
#pragma once
#include "flash.h"

#define FLASH_API extern "C" __attribute__((visibility("default")))

namespace flash {

// Activations of some rows as whole numbers with a scale for every group, for GroupQuant products. Rows are cut into
// tiles (first row, width; see row_tiles.h), the rows of a tile lie side by side, so that a product walks a tile with one
// pointer:
//   q        tile at first * ldq bytes: for every group, [unit of 32 inputs, 16 for groups of 16][row of the tile][unit]
//            int8; with two terms the same again: the number is 128 times the first term and the second, which is from
//            -64 to 63. Zero from k to the end of its group
//   scales   tile at first * 2 stride:    [group][ scale of every row, moment of every row ] fp32
// scale is the group's largest magnitude / 127, or / 16256 with two terms (NaN when a value is not finite), moment is scale
// times the sum of the numbers.
struct QuantRows {
  int8_t* q;
  float* scales;
  int64_t rows;    // of the whole step: tiles depend on it
  int64_t ldq;     // bytes a row
  int64_t stride;  // groups a row
  int32_t group;
  int32_t terms;   // 1 or 2
};

constexpr int64_t kSampleRun = 1024;  // ids whose weights are added up together

struct SampleScratch {
  double* runs;   // [n / kSampleRun, rounded up]
  float *x, *weight;  // [n]
  uint32_t* key;      // [n]
};

struct AttentionJob;  // attention_plan.h

struct Ops {
  const char* name;

  // linear.cpp
  // `groups`: to be written, zeros past k
  void (*quantize)(const float* x, int64_t ldx, int64_t k, int64_t groups, const QuantRows& out, int64_t begin,
                   int64_t end);
  // Panels of 16 outputs, all rows; y [rows, n], bias added. buffer: linear_buffer(w) bytes of this thread.
  void (*linear_quant)(const flash_linear& w, const QuantRows& x, float* y, int64_t ldy, int64_t begin, int64_t end,
                       void* buffer);
  void (*linear_float)(const flash_linear& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
                       int64_t begin, int64_t end, void* buffer);
  void (*linear_rows)(const flash_linear& w, const int64_t* ids, int64_t begin, int64_t end, float* out);

  // pointwise.cpp; sum may be null (no residual) or alias
  void (*norm)(const float* x, int64_t ldx, const float* residual, const float* weight, float eps, int64_t dim,
               float* y, float* sum, int64_t begin, int64_t end);
  // heads of a token side by side, each normalised on its own; in place, row stride ld
  void (*head_norm)(float* x, int64_t ld, const float* weight, float eps, int64_t heads, int64_t dim, int64_t begin,
                    int64_t end);
  void (*argmax)(const float* x, int64_t ld, int64_t n, int64_t* ids, int64_t begin, int64_t end);
  int64_t (*sample)(const float* logits, int64_t n, const flash_choice& choice, const SampleScratch& scratch);
  void (*silu_mul)(const float* gate_up, int64_t n, float* y, int64_t begin, int64_t end);

  // attention.cpp
  void (*rope_write)(const float* qkv, int64_t ldq, int32_t heads, const flash_cache& cache, const flash_step& step,
                     float* q, int64_t begin, int64_t end);
  // Work items of an attention plan (attention_plan.h), and sequences of it whose parts are to be put together.
  void (*attend)(const AttentionJob& job, void* buffer, int64_t begin, int64_t end);
  void (*combine)(const AttentionJob& job, int64_t begin, int64_t end);
};

const Ops& ops();  // of the instruction set in use

}  // namespace flash
