// Rotation and cache writes; attention over the paged cache by tiles of 64 keys (attention_plan.h says in what order).
//
// A tile is brought into the first-level cache as floats, keys turned so that they lie side by side:
//
//     keys    [dim][64]   scores[row][key] = Σ_d q[row][d] keys[d][key]     lanes are keys
//     values  [64][dim]   y[row][d] = y[row][d] c + Σ_key w[row][key] values[key][d]      lanes are dimensions
//
// with w = e^(score - maximum) and c = e^(old maximum - maximum): the online softmax of Milakov & Gimelshein (2018).
// Both products run in blocks of kRows rows by kCols registers, each sum a chain of fmas in ascending order.
#pragma once
#include "attention_plan.h"
#include "ops.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

#if defined(__AVX512F__)
constexpr int kRows = 6, kCols = 4;
#elif defined(__AVX2__)
constexpr int kRows = 2, kCols = 2;
#else
constexpr int kRows = 1, kCols = 2;
#endif
constexpr float kNothing = -1e30f;

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
  for (int64_t i = 0; i < half; i += 16) {
    const int n = static_cast<int>(half - i < 16 ? half - i : 16);
    const F a = load(x + i, n), b = load(x + half + i, n);
    store(y + i, fma(b, load(sin + i, n), a * load(cos + i, n)), n);
    store(y + half + i, fma(a, load(sin + half + i, n), b * load(cos + half + i, n)), n);
  }
  for (int64_t i = rot; i < dim; ++i) y[i] = x[i];
}

inline void rope_write(const float* qkv, int64_t ldq, int32_t heads, const flash_cache& cache, const flash_step& step,
                       float* q, int64_t begin, int64_t end) {
  const int64_t dim = cache.dim, kv = cache.kv_heads, size = item_size(cache.dtype);
  const int64_t scales = cache.dtype == FLASH_I8 ? dim / cache.kv_group : 0;
  float turned[kMostDim];
  for (int64_t t = begin; t < end; ++t) {
    const float* x = qkv + t * ldq;
    const float *cos = step.cos + t * step.rot, *sin = step.sin + t * step.rot;
    for (int64_t h = 0; h < heads; ++h) rotate(x + h * dim, cos, sin, step.rot, dim, q + (t * heads + h) * dim);
    const int64_t block = step.slots[t] / cache.block_size, slot = step.slots[t] % cache.block_size;
    const int64_t from = block * cache.block_stride;
    for (int64_t h = 0; h < kv; ++h) {
      const int64_t at = from + (slot * kv + h) * dim * size, scale_at = block * cache.scale_stride + (slot * kv + h) * scales * 2;
      char *k = static_cast<char*>(cache.k) + at, *v = static_cast<char*>(cache.v) + at;
      auto* ks = reinterpret_cast<uint16_t*>(static_cast<char*>(cache.k_scale) + (scales ? scale_at : 0));
      auto* vs = reinterpret_cast<uint16_t*>(static_cast<char*>(cache.v_scale) + (scales ? scale_at : 0));
      rotate(x + (heads + h) * dim, cos, sin, step.rot, dim, turned);
      write_row(turned, k, ks, cache.dtype, cache.kv_group, dim);
      write_row(x + (heads + kv + h) * dim, v, vs, cache.dtype, cache.kv_group, dim);
    }
  }
}

// --------------------------------------------------------------------------------------------------- one tile

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

struct Buffers {
  float *keys, *values, *q, *weights, *y, *rows;
  float *most, *total, *part_most, *part_total, *fix;  // of every row
};

FLASH_INLINE Buffers buffers_in(const AttentionPlan& p, void* memory) {
  Buffers b;
  float* at = static_cast<float*>(memory);
  const int64_t dim = p.padded_dim, n = p.item_rows;
  b.keys = at; at += dim * kTile;
  b.values = at; at += dim * kTile;
  b.q = at; at += n * dim;
  b.weights = at; at += n * kTile;
  b.y = at; at += n * dim;       // of the partition
  b.rows = at; at += n * dim;    // merged
  b.most = at; at += n;
  b.total = at; at += n;
  b.part_most = at; at += n;
  b.part_total = at; at += n;
  b.fix = at;
  return b;
}

// out[r][c] = (start[r] times out[r][c], or nothing) + Σ_i x[r][i] m[i][c] for ROWS rows and COLS registers of columns.
template <int ROWS, int COLS>
FLASH_INLINE void product(const float* x, int64_t ldx, const float* m, int64_t ldm, int64_t depth, const float* start,
                          float* out, int64_t ldo) {
  F sum[ROWS][COLS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) sum[r][c] = start ? load(out + r * ldo + 16 * c) * set1(start[r]) : zero();
  for (int64_t i = 0; i < depth; ++i) {
    F v[COLS];
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) v[c] = load(m + i * ldm + 16 * c);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const F a = set1(x[r * ldx + i]);
#pragma GCC unroll 8
      for (int c = 0; c < COLS; ++c) sum[r][c] = fma(a, v[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) store(out + r * ldo + 16 * c, sum[r][c]);
}

template <int ROWS>
FLASH_INLINE void product_columns(const float* x, int64_t ldx, const float* m, int64_t ldm, int64_t depth,
                                  const float* start, float* out, int64_t ldo, int64_t columns) {
  int64_t c = 0;
  for (; c + 16 * kCols <= columns; c += 16 * kCols) product<ROWS, kCols>(x, ldx, m + c, ldm, depth, start, out + c, ldo);
  for (; c < columns; c += 16) product<ROWS, 1>(x, ldx, m + c, ldm, depth, start, out + c, ldo);
}

// All rows of an item; columns a multiple of 16.
inline void products(const float* x, int64_t ldx, const float* m, int64_t ldm, int64_t depth, const float* start,
                     float* out, int64_t ldo, int64_t columns, int64_t rows) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    product_columns<kRows>(x + r * ldx, ldx, m, ldm, depth, start ? start + r : nullptr, out + r * ldo, ldo, columns);
  if (kRows > 3 && rows - r >= 3) {
    product_columns<3>(x + r * ldx, ldx, m, ldm, depth, start ? start + r : nullptr, out + r * ldo, ldo, columns);
    r += 3;
  }
  for (; r < rows; ++r)
    product_columns<1>(x + r * ldx, ldx, m, ldm, depth, start ? start + r : nullptr, out + r * ldo, ldo, columns);
}

// Where keys first .. first + count - 1 of a sequence and one kv head lie: bytes from the start of the cache, and of its
// scales.
struct Places { int64_t value[kTile], scale[kTile]; };

FLASH_INLINE void find(const AttentionJob& job, int64_t sequence, int64_t kv_head, int64_t first, int64_t count, Places& out) {
  const flash_cache& c = job.cache;
  const int64_t row = c.dim * item_size(c.dtype), scales = c.dtype == FLASH_I8 ? c.dim / c.kv_group * 2 : 0;
  const int64_t* table = job.plan.step->block_table + sequence * job.plan.step->table_stride;
  int64_t block = first / c.block_size, slot = first % c.block_size;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t place = slot * c.kv_heads + kv_head;
    out.value[j] = table[block] * c.block_stride + place * row;
    out.scale[j] = table[block] * c.scale_stride + place * scales;
    if (++slot == c.block_size) {
      slot = 0;
      ++block;
    }
  }
}

// Sixteen values of a row of one type; int8 times the scale of their group.
template <int TYPE>
FLASH_INLINE F sixteen(const char* base, const char* scales, const Places& at, int64_t j, int64_t i, int32_t group) {
  const char* p = base + at.value[j];
  if constexpr (TYPE == FLASH_F32) return load(reinterpret_cast<const float*>(p) + i);
  else if constexpr (TYPE == FLASH_F16) return load_f16(reinterpret_cast<const uint16_t*>(p) + i);
  else if constexpr (TYPE == FLASH_BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p) + i);
  else return load_i8(reinterpret_cast<const int8_t*>(p) + i) * set1(half_at(reinterpret_cast<const uint16_t*>(scales + at.scale[j]) + i / group));
}

// A tile of heads whose width, and groups, are multiples of 16.
template <int TYPE>
inline void read_even_tile(const AttentionJob& job, const Places& at, int64_t count, const Buffers& b) {
  const flash_cache& c = job.cache;
  const char *k = static_cast<const char*>(c.k), *v = static_cast<const char*>(c.v);
  const char *ks = static_cast<const char*>(c.k_scale), *vs = static_cast<const char*>(c.v_scale);
  const int64_t dim = job.plan.padded_dim;
  for (int64_t j = 0; j < kTile; j += 16) {
    for (int64_t i = 0; i < dim; i += 16) {
      F rows[16];
      if (j + 16 <= count) {
#pragma GCC unroll 16
        for (int64_t r = 0; r < 16; ++r) rows[r] = sixteen<TYPE>(k, ks, at, j + r, i, c.kv_group);
      } else {
        for (int64_t r = 0; r < 16; ++r) rows[r] = j + r < count ? sixteen<TYPE>(k, ks, at, j + r, i, c.kv_group) : zero();
      }
      turn(rows, b.keys + i * kTile + j, kTile);
    }
  }
  for (int64_t j = 0; j < kTile; ++j)
    for (int64_t i = 0; i < dim; i += 16)
      store(b.values + j * dim + i, j < count ? sixteen<TYPE>(v, vs, at, j, i, c.kv_group) : zero());
}

inline void read_odd_tile(const AttentionJob& job, const Places& at, int64_t count, const Buffers& b) {
  const flash_cache& c = job.cache;
  const int64_t dim = job.plan.padded_dim;
  for (int which = 0; which < 2; ++which) {  // keys pass through the values' place
    const char* base = static_cast<const char*>(which ? c.v : c.k);
    const char* scales = static_cast<const char*>(which ? c.v_scale : c.k_scale);
    for (int64_t j = 0; j < kTile; ++j) {
      float* row = b.values + j * dim;
      if (j < count) {
        read_row(base + at.value[j], reinterpret_cast<const uint16_t*>(scales + at.scale[j]), c.dtype, c.kv_group, c.dim, row);
      } else {
        for (int64_t i = 0; i < dim; i += 16) store(row + i, zero());
      }
    }
    if (which) break;
    for (int64_t j = 0; j < kTile; j += 16)
      for (int64_t i = 0; i < dim; i += 16) {
        F rows[16];
        for (int64_t r = 0; r < 16; ++r) rows[r] = load(b.values + (j + r) * dim + i);
        turn(rows, b.keys + i * kTile + j, kTile);
      }
  }
}

// Keys and values first .. first + 63 of a sequence; zeros where it has none (unused rows may hold NaN).
inline void read_tile(const AttentionJob& job, int64_t sequence, int64_t kv_head, int64_t first, const Buffers& b) {
  const flash_cache& c = job.cache;
  const int64_t left = job.plan.step->context[sequence] - first, count = left < kTile ? left : kTile;
  Places at;
  find(job, sequence, kv_head, first, count, at);
  if (c.dim % 16 || (c.dtype == FLASH_I8 && c.kv_group % 16)) read_odd_tile(job, at, count, b);
  else if (c.dtype == FLASH_F32) read_even_tile<FLASH_F32>(job, at, count, b);
  else if (c.dtype == FLASH_F16) read_even_tile<FLASH_F16>(job, at, count, b);
  else if (c.dtype == FLASH_BF16) read_even_tile<FLASH_BF16>(job, at, count, b);
  else read_even_tile<FLASH_I8>(job, at, count, b);
}

// Keys first .. last of one partition into the partition's results of `rows` rows; limit[r]: keys that row sees.
inline void do_tiles(const AttentionJob& job, int64_t sequence, int64_t kv_head, int64_t first, int64_t last, int64_t rows,
                     const int64_t* limit, const Buffers& b) {
  const int64_t dim = job.plan.padded_dim;
  for (int64_t r = 0; r < rows; ++r) {
    b.part_most[r] = kNothing;
    b.part_total[r] = 0.0f;
    for (int64_t i = 0; i < dim; i += 16) store(b.y + r * dim + i, zero());
  }
  for (int64_t tile = first; tile < last; tile += kTile) {
    read_tile(job, sequence, kv_head, tile, b);
    products(b.q, dim, b.keys, kTile, dim, nullptr, b.weights, kTile, kTile, rows);
    for (int64_t r = 0; r < rows; ++r) {
      float* w = b.weights + r * kTile;
      const int64_t seen = limit[r] - tile;
      F s[4];
      for (int c = 0; c < 4; ++c) s[c] = load(w + 16 * c);
      if (seen < kTile) {  // what lies in the future cannot be the maximum
        for (int64_t j = seen > 0 ? seen : 0; j < kTile; ++j) w[j] = kNothing;
        for (int c = 0; c < 4; ++c) s[c] = load(w + 16 * c);
      }
      const float before = b.part_most[r];
      const float here = top(max(max(s[0], s[1]), max(s[2], s[3])));
      const float most = here > before ? here : before;
      for (int c = 0; c < 4; ++c) {
        s[c] = exp(s[c] - set1(most));
        store(w + 16 * c, s[c]);
      }
      if (seen < kTile) {
        for (int64_t j = seen > 0 ? seen : 0; j < kTile; ++j) w[j] = 0.0f;
        for (int c = 0; c < 4; ++c) s[c] = load(w + 16 * c);
      }
      float fix[16];
      store(fix, exp(set1(before - most)));
      b.fix[r] = fix[0];
      b.part_most[r] = most;
      b.part_total[r] = __builtin_fmaf(b.part_total[r], fix[0], sum((s[0] + s[1]) + (s[2] + s[3])));
    }
    products(b.weights, kTile, b.values, dim, kTile, b.fix, b.y, dim, dim, rows);
  }
}

// The partition's result joins a row's.
FLASH_INLINE void merge(const float* part, float part_most, float part_total, int64_t dim, float* y, float* most, float* total) {
  const float both = part_most > *most ? part_most : *most;
  float a[16], b[16];
  store(a, exp(set1(*most - both)));
  store(b, exp(set1(part_most - both)));
  const F old = set1(a[0]), fresh = set1(b[0]);
  for (int64_t i = 0; i < dim; i += 16) store(y + i, fma(load(part + i), fresh, load(y + i) * old));
  *total = __builtin_fmaf(part_total, b[0], *total * a[0]);
  *most = both;
}

FLASH_INLINE void divide(const float* y, float total, int64_t dim, float* out) {
  const F by = set1(total);
  for (int64_t i = 0; i < dim; i += 16) {
    const int n = static_cast<int>(dim - i < 16 ? dim - i : 16);
    if (n == 16) store(out + i, load(y + i) / by);
    else store(out + i, load(y + i) / by, n);
  }
}

// The queries of a token's group of heads, scaled, zeros up to the padded width.
FLASH_INLINE void read_queries(const AttentionJob& job, int64_t token, int64_t kv_head, float* to) {
  const AttentionPlan& p = job.plan;
  const F scale = set1(job.scale);
  for (int64_t g = 0; g < p.group; ++g) {
    const float* from = job.q + (token * p.heads + kv_head * p.group + g) * p.dim;
    float* row = to + g * p.padded_dim;
    for (int64_t i = 0; i < p.padded_dim; i += 16) {
      const int64_t left = p.dim - i;
      store(row + i, (left >= 16 ? load(from + i) : load(from + i, static_cast<int>(left))) * scale);
    }
  }
}

inline void sweep(const AttentionJob& job, const AttentionItem& item, const Buffers& b, int64_t* limit) {
  const AttentionPlan& p = job.plan;
  const flash_step& s = *p.step;
  const int64_t dim = p.padded_dim, rows = static_cast<int64_t>(item.count) * p.group;
  const int64_t context = s.context[item.sequence], end = s.cu_q[item.sequence + 1];
  for (int64_t t = 0; t < item.count; ++t) {
    read_queries(job, item.first + t, item.kv_head, b.q + t * p.group * dim);
    for (int64_t g = 0; g < p.group; ++g) limit[t * p.group + g] = context - (end - (item.first + t)) + 1;
  }
  for (int64_t r = 0; r < rows; ++r) {
    b.most[r] = kNothing;
    b.total[r] = 0.0f;
    for (int64_t i = 0; i < dim; i += 16) store(b.rows + r * dim + i, zero());
  }
  const int64_t last = limit[rows - 1];
  for (int64_t first = 0; first < last; first += kPartition) {
    const int64_t until = first + kPartition < last ? first + kPartition : last;
    do_tiles(job, item.sequence, item.kv_head, first, until, rows, limit, b);
    for (int64_t r = 0; r < rows; ++r)
      if (limit[r] > first) merge(b.y + r * dim, b.part_most[r], b.part_total[r], dim, b.rows + r * dim, b.most + r, b.total + r);
  }
  for (int64_t t = 0; t < item.count; ++t)
    for (int64_t g = 0; g < p.group; ++g) {
      const int64_t r = t * p.group + g;
      divide(b.rows + r * dim, b.total[r], p.dim, job.out + ((item.first + t) * p.heads + item.kv_head * p.group + g) * p.dim);
    }
}

FLASH_INLINE float* part_of(const AttentionPlan& p, int64_t sequence, int64_t token, int64_t head, int64_t partition) {
  const int64_t count = partitions(p.step->context[sequence]);
  return p.part + (p.part_row[sequence] + (token * p.heads + head) * count + partition) * (p.padded_dim + 2);
}

inline void split(const AttentionJob& job, const AttentionItem& item, const Buffers& b, int64_t* limit) {
  const AttentionPlan& p = job.plan;
  const flash_step& s = *p.step;
  const int64_t dim = p.padded_dim, first = item.partition * kPartition;
  int64_t rows = 0, last = 0;
  for (int64_t m = 0; m < item.count; ++m) {
    const int64_t sequence = p.member[item.first + m], end = s.cu_q[sequence + 1];
    for (int64_t t = s.cu_q[sequence]; t < end; ++t) {
      read_queries(job, t, item.kv_head, b.q + rows * dim);
      for (int64_t g = 0; g < p.group; ++g) limit[rows++] = s.context[sequence] - (end - t) + 1;
    }
    if (s.context[sequence] > last) last = s.context[sequence];
  }
  const int64_t until = first + kPartition < last ? first + kPartition : last;
  do_tiles(job, item.sequence, item.kv_head, first, until, rows, limit, b);
  int64_t r = 0;
  for (int64_t m = 0; m < item.count; ++m) {
    const int64_t sequence = p.member[item.first + m], tokens = s.cu_q[sequence + 1] - s.cu_q[sequence];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t g = 0; g < p.group; ++g, ++r) {
        float* part = part_of(p, sequence, t, item.kv_head * p.group + g, item.partition);
        for (int64_t i = 0; i < dim; i += 16) store(part + i, load(b.y + r * dim + i));
        part[dim] = b.part_most[r];
        part[dim + 1] = b.part_total[r];
      }
  }
}

inline void attend(const AttentionJob& job, void* buffer, int64_t begin, int64_t end) {
  const Buffers b = buffers_in(job.plan, buffer);
  int64_t limit[kMostGroup];
  for (int64_t i = begin; i < end; ++i) {
    const AttentionItem& item = job.plan.item[i];
    if (item.partition < 0) sweep(job, item, b, limit);
    else split(job, item, b, limit);
  }
}

inline void combine(const AttentionJob& job, int64_t begin, int64_t end) {
  const AttentionPlan& p = job.plan;
  const int64_t dim = p.padded_dim;
  float y[kMostDim];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sequence = p.split[i], first = p.step->cu_q[sequence], tokens = p.step->cu_q[sequence + 1] - first;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t seen = p.step->context[sequence] - (tokens - t) + 1;
      for (int64_t h = 0; h < p.heads; ++h) {
        float most = kNothing, total = 0.0f;
        for (int64_t d = 0; d < dim; d += 16) store(y + d, zero());
        for (int64_t part = 0; part * kPartition < seen; ++part) {
          const float* from = part_of(p, sequence, t, h, part);
          merge(from, from[dim], from[dim + 1], dim, y, &most, &total);
        }
        divide(y, total, p.dim, job.out + ((first + t) * p.heads + h) * p.dim);
      }
    }
  }
}

}  // namespace FLASH_ISA
}  // namespace flash
