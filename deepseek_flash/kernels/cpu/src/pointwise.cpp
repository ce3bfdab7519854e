// C interface of the norms and the gate.
#include "ops.h"
#include "pool.h"

using flash::ops;
using flash::parallel_for;

namespace {

// Rows a thread takes at a time: enough floats that taking them costs nothing beside computing them.
int64_t grain(int64_t dim) {
  const int64_t rows = 8192 / (dim > 0 ? dim : 1);
  return rows > 1 ? rows : 1;
}

}  // namespace

FLASH_API int32_t flash_rms_norm(void* pool, const float* x, int64_t ldx, const float* weight, float eps, int64_t rows,
                                 int64_t dim, float* y) {
  if (rows < 0 || dim < 1 || ldx < dim) return FLASH_E_ARGUMENT;
  parallel_for(static_cast<flash::Pool*>(pool), rows, grain(dim), [&](int32_t, int64_t a, int64_t b) {
    ops().norm(x, ldx, nullptr, weight, eps, dim, y, nullptr, a, b);
  });
  return FLASH_OK;
}

FLASH_API int32_t flash_add_rms_norm(void* pool, const float* x, const float* residual, const float* weight, float eps,
                                     int64_t rows, int64_t dim, float* y, float* sum) {
  if (rows < 0 || dim < 1) return FLASH_E_ARGUMENT;
  parallel_for(static_cast<flash::Pool*>(pool), rows, grain(dim), [&](int32_t, int64_t a, int64_t b) {
    ops().norm(x, dim, residual, weight, eps, dim, y, sum, a, b);
  });
  return FLASH_OK;
}

FLASH_API int32_t flash_argmax(void* pool, const float* logits, int64_t ld, int64_t rows, int64_t n, int64_t* ids) {
  if (rows < 0 || n < 1 || ld < n) return FLASH_E_ARGUMENT;
  parallel_for(static_cast<flash::Pool*>(pool), rows, 1, [&](int32_t, int64_t a, int64_t b) {
    ops().argmax(logits, ld, n, ids, a, b);
  });
  return FLASH_OK;
}

FLASH_API int32_t flash_silu_mul(void* pool, const float* gate_up, int64_t rows, int64_t n, float* y) {
  if (rows < 0 || n < 1) return FLASH_E_ARGUMENT;
  parallel_for(static_cast<flash::Pool*>(pool), rows, grain(2 * n),
               [&](int32_t, int64_t a, int64_t b) { ops().silu_mul(gate_up, n, y, a, b); });
  return FLASH_OK;
}
