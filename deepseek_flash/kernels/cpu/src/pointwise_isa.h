// Root-mean-square norm with the residual's addition, norm of query and key heads, the gate of SwiGLU.
//
// A row of the stream is read once: while it is added up, the squares gather in sixteen lanes (lane i takes values
// i, i + 16, i + 32, …; a short last piece counts as zeros), and the second pass finds it in the cache:
//
//     x      | 0 … 15 | 16 … 31 | … | tail, zeros |
//     lanes    += x²     += x²         += x²         → sum in a fixed order → 1 / sqrt(mean + eps)
#pragma once
#include "ops.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

FLASH_INLINE float inverse_rms(F squares, float eps, int64_t dim) {
  return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + eps);
}

// y = x * inverse * weight, in this order of rounding.
FLASH_INLINE void scale_row(const float* x, float inverse, const float* weight, int64_t dim, float* y) {
  const F by = set1(inverse);
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) store(y + i, load(x + i) * by * load(weight + i));
  if (i < dim) {
    const int n = static_cast<int>(dim - i);
    store(y + i, load(x + i, n) * by * load(weight + i, n), n);
  }
}

inline void norm(const float* x, int64_t ldx, const float* residual, const float* weight, float eps, int64_t dim,
                 float* y, float* total, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* a = x + row * ldx;
    const float* source = a;
    F squares = zero();
    int64_t i = 0;
    if (residual) {
      const float* r = residual + row * dim;
      float* s = total + row * dim;
      for (; i + 16 <= dim; i += 16) {
        const F v = load(a + i) + load(r + i);
        store(s + i, v);
        squares = fma(v, v, squares);
      }
      if (i < dim) {
        const int n = static_cast<int>(dim - i);
        const F v = load(a + i, n) + load(r + i, n);
        store(s + i, v, n);
        squares = fma(v, v, squares);
      }
      source = s;
    } else {
      for (; i + 16 <= dim; i += 16) {
        const F v = load(a + i);
        squares = fma(v, v, squares);
      }
      if (i < dim) {
        const F v = load(a + i, static_cast<int>(dim - i));
        squares = fma(v, v, squares);
      }
    }
    scale_row(source, inverse_rms(squares, eps, dim), weight, dim, y + row * dim);
  }
}

inline void head_norm(float* x, int64_t ld, const float* weight, float eps, int64_t heads, int64_t dim, int64_t begin,
                      int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      float* head = x + row * ld + h * dim;
      F squares = zero();
      for (int64_t i = 0; i < dim; i += 16) {
        const F v = dim - i >= 16 ? load(head + i) : load(head + i, static_cast<int>(dim - i));
        squares = fma(v, v, squares);
      }
      scale_row(head, inverse_rms(squares, eps, dim), weight + h * dim, dim, head);
    }
  }
}

// Exactly, one value after the other: for rows with infinities or NaN.
inline int64_t careful_argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return -1;
    if (x[i] > x[best]) best = i;
  }
  return x[best] - x[best] == 0.0f ? best : -1;
}

inline void argmax(const float* x, int64_t ld, int64_t n, int64_t* ids, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 1024;  // the run that holds the maximum is searched again
  for (int64_t row = begin; row < end; ++row) {
    const float* v = x + row * ld;
    F odd = zero();
    float best = 0.0f;
    int64_t where = -1;
    for (int64_t first = 0; first < n; first += kRun) {
      const int64_t last = first + kRun < n ? first + kRun : n;
      F most = set1(v[first]);
      int64_t i = first;
      for (; i + 16 <= last; i += 16) {
        const F a = load(v + i);
        most = max(a, most);
        odd = fma(a, zero(), odd);
      }
      float here = top(most), rest = 0.0f;
      for (; i < last; ++i) {
        here = v[i] > here ? v[i] : here;
        rest += v[i] * 0.0f;
      }
      odd = odd + set1(rest);
      if (where < 0 || here > best) {
        best = here;
        where = first;
      }
    }
    const float check = sum(odd);
    if (check != check) {
      ids[row] = careful_argmax(v, n);
      continue;
    }
    while (v[where] != best) ++where;
    ids[row] = where;
  }
}

// 1 / x for positive x that are neither denormal nor larger than 2^126, by Newton's iteration from a first guess made of
// the bits (a line through the logarithm): every step squares the error, 12 %, 1.4 %, 2e-4, 4e-8, and rounding. A division
// takes as long as a dozen multiplications.
FLASH_INLINE F inverse_of(F x) {
  F y = as_float(iset1(0x7ef311c7) - as_int(x));
#pragma GCC unroll 4
  for (int i = 0; i < 3; ++i) y = fma(y, fma(zero() - x, y, set1(1.0f)), y);
  return y;
}

// gate / (1 + e^-gate) * up; below -80, where the first factor is 1e-33 and less, the sigmoid stays as it is there.
FLASH_INLINE F gated(F gate, F up) {
  return gate * inverse_of(set1(1.0f) + exp(min(set1(80.0f), zero() - gate))) * up;
}

inline void silu_mul(const float* gate_up, int64_t n, float* y, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float *gate = gate_up + row * 2 * n, *up = gate + n;
    float* out = y + row * n;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, gated(load(gate + i), load(up + i)));
    if (i < n) {
      const int left = static_cast<int>(n - i);
      store(out + i, gated(load(gate + i, left), load(up + i, left)), left);
    }
  }
}

}  // namespace FLASH_ISA
}  // namespace flash
