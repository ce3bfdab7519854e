// Rows of the paged cache: reading and writing them in every type, rotation of queries and keys, the fused write.
//
// A block holds, for every kv head, its slots' keys and values. Two orders of the keys are understood, by the strides:
//
//     rows     [slot][head][dim]     or any other with the head's values side by side
//     turned   [head][dim][slot]     sixteen slots of one dimension side by side: attention reads them as they lie
#pragma once
#include "attention_plan.h"
#include "ops.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

// ------------------------------------------------------------------------------------------- rows of the cache

FLASH_INLINE int64_t item_size(int32_t dtype) { return dtype == FLASH_F32 ? 4 : dtype == FLASH_I8 ? 1 : 2; }

FLASH_INLINE F widen(const void* p, int32_t dtype, int64_t i) {
  if (dtype == FLASH_F16) return load_f16(static_cast<const uint16_t*>(p) + i);
  if (dtype == FLASH_BF16) return load_bf16(static_cast<const uint16_t*>(p) + i);
  if (dtype == FLASH_I8) return load_i8(static_cast<const int8_t*>(p) + i);
  return load(static_cast<const float*>(p) + i);
}

FLASH_INLINE void narrow(void* p, int32_t dtype, int64_t i, F v) {
  if (dtype == FLASH_F16) store_f16(static_cast<uint16_t*>(p) + i, v);
  else if (dtype == FLASH_BF16) store_bf16(static_cast<uint16_t*>(p) + i, v);
  else if (dtype == FLASH_I8) store_i8(static_cast<int8_t*>(p) + i, v);
  else store(static_cast<float*>(p) + i, v);
}

// The first n of sixteen values, the rest zero; nothing behind them is touched.
FLASH_INLINE F widen_some(const void* p, int32_t dtype, int64_t i, int n) {
  alignas(64) char t[64] = {};
  const int64_t size = item_size(dtype);
  std::memcpy(t, static_cast<const char*>(p) + i * size, static_cast<size_t>(n * size));
  return widen(t, dtype, 0);
}

FLASH_INLINE void narrow_some(void* p, int32_t dtype, int64_t i, F v, int n) {
  alignas(64) char t[64];
  const int64_t size = item_size(dtype);
  narrow(t, dtype, 0, v);
  std::memcpy(static_cast<char*>(p) + i * size, t, static_cast<size_t>(n * size));
}

FLASH_INLINE float half_at(const uint16_t* p) {
  uint16_t t[16] = {*p};
  float f[16];
  store(f, load_f16(t));
  return f[0];
}

// One cached row of `dim` values as floats, zeros up to a multiple of 16.
FLASH_INLINE void read_row(const void* p, const uint16_t* scales, int32_t dtype, int32_t group, int64_t dim, float* out) {
  int64_t i = 0;
  if (dtype == FLASH_I8 && group % 16) {
    for (; i < dim; ++i) out[i] = static_cast<float>(static_cast<const int8_t*>(p)[i]) * half_at(scales + i / group);
    for (; i % 16; ++i) out[i] = 0.0f;
    return;
  }
  for (; i < dim; i += 16) {
    F v = dim - i >= 16 ? widen(p, dtype, i) : widen_some(p, dtype, i, static_cast<int>(dim - i));
    if (dtype == FLASH_I8) v = v * set1(half_at(scales + i / group));
    store(out + i, v);
  }
}

inline void write_row(const float* x, void* p, uint16_t* scales, int32_t dtype, int32_t group, int64_t dim) {
  if (dtype != FLASH_I8) {
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) narrow(p, dtype, i, load(x + i));
    if (i < dim) narrow_some(p, dtype, i, load(x + i, static_cast<int>(dim - i)), static_cast<int>(dim - i));
    return;
  }
  for (int64_t first = 0; first < dim; first += group) {
    F most = zero(), odd = zero();
    for (int64_t i = 0; i < group; i += 16) {
      const int n = static_cast<int>(group - i < 16 ? group - i : 16);
      const F v = n == 16 ? load(x + first + i) : load(x + first + i, n);
      most = max(most, abs(v));
      odd = fma(v, zero(), odd);
    }
    uint16_t half[16];
    store_f16(half, set1(top(most) / 127.0f + sum(odd)));
    scales[first / group] = half[0];
    const float scale = half_at(half);
    for (int64_t i = 0; i < group; i += 16) {
      const int n = static_cast<int>(group - i < 16 ? group - i : 16);
      F q = zero();
      if (scale > 0.0f) q = round((n == 16 ? load(x + first + i) : load(x + first + i, n)) / set1(scale));
      q = max(min(q, set1(127.0f)), set1(-127.0f));
      if (n == 16) store_i8(static_cast<int8_t*>(p) + first + i, q);
      else narrow_some(p, FLASH_I8, first + i, q, n);
    }
  }
}

// ---------------------------------------------------------------------------------------- rotation, cache writes

// y = x cos + swapped halves of x sin on the first `rot` values, the rest as it is.
FLASH_INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t rot, int64_t dim, float* y) {
  const int64_t half = rot / 2;
  int64_t whole = 0;
  for (; whole + 16 <= half; whole += 16) {
    const F a = load(x + whole), b = load(x + half + whole);
    store(y + whole, fma(b, load(sin + whole), a * load(cos + whole)));
    store(y + half + whole, fma(a, load(sin + half + whole), b * load(cos + half + whole)));
  }
  for (int64_t i = whole; i < half; i += 16) {
    const int n = static_cast<int>(half - i);
    const F a = load(x + i, n), b = load(x + half + i, n);
    store(y + i, fma(b, load(sin + i, n), a * load(cos + i, n)), n);
    store(y + half + i, fma(a, load(sin + half + i, n), b * load(cos + half + i, n)), n);
  }
  for (int64_t i = rot; i < dim; ++i) y[i] = x[i];
}

// Bytes from the start of a cache to the row of one token and head.
FLASH_INLINE int64_t row_at(const flash_strides& s, int64_t block, int64_t slot, int64_t head, int64_t size) {
  return (block * s.block + slot * s.slot + head * s.head) * size;
}

// count items of `size` bytes, `step` items apart.
inline void scatter(const void* from, void* to, int64_t count, int64_t step, int64_t size) {
  const char* f = static_cast<const char*>(from);
  char* t = static_cast<char*>(to);
  if (size == 2) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(t + i * step * 2, f + i * 2, 2);
  } else if (size == 4) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(t + i * step * 4, f + i * 4, 4);
  } else {
    for (int64_t i = 0; i < count; ++i) t[i * step] = f[i];
  }
}

// One row of keys or values at its place, whichever way the cache lies.
inline void put_row(const float* x, void* values, const flash_strides& at, void* scales, const flash_strides& scale_at,
                    const flash_cache& c, int64_t block, int64_t slot, int64_t head) {
  const int64_t size = item_size(c.dtype), groups = c.dtype == FLASH_I8 ? c.dim / c.kv_group : 0;
  char* p = static_cast<char*>(values) + row_at(at, block, slot, head, size);
  char* s = groups ? static_cast<char*>(scales) + row_at(scale_at, block, slot, head, 2) : nullptr;
  if (at.item == 1) {
    write_row(x, p, reinterpret_cast<uint16_t*>(s), c.dtype, c.kv_group, c.dim);
    return;
  }
  alignas(64) char row[kMostDim * 4];
  uint16_t row_scales[kMostDim];
  write_row(x, row, row_scales, c.dtype, c.kv_group, c.dim);
  scatter(row, p, c.dim, at.item, size);
  if (groups) scatter(row_scales, s, groups, scale_at.item, 2);
}

inline void rope_write(const float* qkv, int64_t ldq, int32_t heads, const flash_cache& cache, const flash_step& step,
                       float* q, int64_t begin, int64_t end) {
  const int64_t dim = cache.dim, kv = cache.kv_heads;
  float turned[kMostDim];
  for (int64_t t = begin; t < end; ++t) {
    const float* x = qkv + t * ldq;
    const float *cos = step.cos + t * step.rot, *sin = step.sin + t * step.rot;
    for (int64_t h = 0; h < heads; ++h) rotate(x + h * dim, cos, sin, step.rot, dim, q + (t * heads + h) * dim);
    const int64_t block = step.slots[t] / cache.block_size, slot = step.slots[t] % cache.block_size;
    for (int64_t h = 0; h < kv; ++h) {
      rotate(x + (heads + h) * dim, cos, sin, step.rot, dim, turned);
      put_row(turned, cache.k, cache.k_at, cache.k_scale, cache.k_scale_at, cache, block, slot, h);
      put_row(x + (heads + kv + h) * dim, cache.v, cache.v_at, cache.v_scale, cache.v_scale_at, cache, block, slot, h);
    }
  }
}

// Sixteen rows of sixteen, turned: y[c * ldy + r] = rows[r][c].
FLASH_INLINE void turn(const F* rows, float* y, int64_t ldy) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = rows[i].v;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d lo = _mm512_castps_pd(b[4 * i + j]), hi = _mm512_castps_pd(b[4 * i + 2 + j]);
      a[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
      a[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
    }
  }
  // a[4 i + j]: in 128-bit lane l, rows 4 i .. 4 i + 3 of column 4 l + j
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 p = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), q = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    const __m512 r = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd), s = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_ps(y + j * ldy, _mm512_shuffle_f32x4(p, q, 0x88));
    _mm512_storeu_ps(y + (8 + j) * ldy, _mm512_shuffle_f32x4(p, q, 0xdd));
    _mm512_storeu_ps(y + (4 + j) * ldy, _mm512_shuffle_f32x4(r, s, 0x88));
    _mm512_storeu_ps(y + (12 + j) * ldy, _mm512_shuffle_f32x4(r, s, 0xdd));
  }
#else
  for (int r = 0; r < 16; ++r) {
    float t[16];
    store(t, rows[r]);
    for (int c = 0; c < 16; ++c) y[c * ldy + r] = t[c];
  }
#endif
}

}  // namespace FLASH_ISA
}  // namespace flash
