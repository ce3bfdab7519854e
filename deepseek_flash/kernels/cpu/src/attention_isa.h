// Attention over the paged cache by tiles of 64 keys (attention_plan.h says in what order).
//
// For many rows a tile is brought into the first-level cache as floats; few rows read the cache itself. Either way keys
// lie turned, so that sixteen of them are the lanes of a register:
//
//     keys    [dim][64]   scores[row][key] = Σ_d q[row][d] keys[d][key]     lanes are keys
//     values  [64][dim]   y[row][d] = y[row][d] c + Σ_key w[row][key] values[key][d]      lanes are dimensions
//
// with w = e^(score - maximum) and c = e^(old maximum - maximum): the online softmax of Milakov & Gimelshein (2018).
// Both products run in blocks of kRows rows by kCols registers, each sum a chain of fmas in ascending order.
#pragma once
#include "attention_plan.h"
#include "cache_isa.h"
#include "ops.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

// Rows and registers of columns of a block; so few rows read the cache as it lies instead of a tile made of it.
#if defined(__AVX512F__)
constexpr int kRows = 6, kCols = 4, kDirect = 6;
#elif defined(__AVX2__)
constexpr int kRows = 2, kCols = 2, kDirect = 4;
#else
constexpr int kRows = 1, kCols = 2, kDirect = 2;
#endif
constexpr float kNothing = -1e30f;

struct Buffers {
  float *keys, *values;                 // a tile
  float *q, *weights, *y, *rows;        // of every row: query, scores and weights, results of the partition, merged ones
  float *sums, *fresh;                  // weights added up, sixteen lanes a row: of the partition, of the tile
  float *most, *total, *part_most, *fix;
};

FLASH_INLINE Buffers buffers_in(const AttentionPlan& p, void* memory) {
  Buffers b;
  float* at = static_cast<float*>(memory);
  const int64_t dim = p.padded_dim, n = p.item_rows;
  b.keys = at; at += dim * kTile;
  b.values = at; at += dim * kTile;
  b.q = at; at += n * dim;
  b.weights = at; at += n * kTile;
  b.y = at; at += n * dim;
  b.rows = at; at += n * dim;
  b.sums = at; at += n * 16;
  b.fresh = at; at += n * 16;
  b.most = at; at += n;
  b.total = at; at += n;
  b.part_most = at; at += n;
  b.fix = at;
  return b;
}

// ------------------------------------------------------------------------------------- where keys and values lie

// Bytes from the start of the cache, and of its scales, to every key's row (its column, when keys are turned) of a tile.
struct Places { int64_t key[kTile], value[kTile], key_scale[kTile], value_scale[kTile]; };

FLASH_INLINE void place(const flash_strides& s, int64_t block, int64_t slot, int64_t head, int64_t run, int64_t size, int64_t* to) {
  const int64_t from = row_at(s, block, slot, head, size), step = s.slot * size;
  for (int64_t i = 0; i < run; ++i) to[i] = from + i * step;
}

FLASH_INLINE void find(const AttentionJob& job, int64_t sequence, int64_t kv_head, int64_t first, int64_t count, Places& out) {
  const flash_cache& c = job.cache;
  const int64_t* table = job.plan.step->block_table + sequence * job.plan.step->table_stride;
  const int64_t size = item_size(c.dtype);
  int64_t block = first / c.block_size, slot = first % c.block_size;
  for (int64_t j = 0; j < count; slot = 0, ++block) {
    const int64_t run = c.block_size - slot < count - j ? c.block_size - slot : count - j;
    place(c.k_at, table[block], slot, kv_head, run, size, out.key + j);
    place(c.v_at, table[block], slot, kv_head, run, size, out.value + j);
    if (c.dtype == FLASH_I8) {
      place(c.k_scale_at, table[block], slot, kv_head, run, 2, out.key_scale + j);
      place(c.v_scale_at, table[block], slot, kv_head, run, 2, out.value_scale + j);
    }
    j += run;
  }
  for (int64_t j = count; j < kTile; ++j) {  // may be looked at, not used
    out.key[j] = out.key[0];
    out.value[j] = out.value[0];
  }
}

// The first tile of an item that takes one partition.
inline bool find_first(const AttentionJob& job, const AttentionItem& item, Places& out) {
  const int64_t first = item.partition * kPartition, left = job.plan.step->context[item.sequence] - first;
  if (item.partition < 0 || left < 1) return false;
  find(job, item.sequence, item.kv_head, first, left < kTile ? left : kTile, out);
  return true;
}

template <int TYPE>
FLASH_INLINE F sixteen(const char* p) {
  if constexpr (TYPE == FLASH_F32) return load(reinterpret_cast<const float*>(p));
  else if constexpr (TYPE == FLASH_F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
  else if constexpr (TYPE == FLASH_BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  else return load_i8(reinterpret_cast<const int8_t*>(p));
}

FLASH_INLINE F scale_at(const char* p, int64_t i) { return set1(half_at(reinterpret_cast<const uint16_t*>(p) + i)); }

template <int TYPE>
constexpr int64_t kSize = TYPE == FLASH_F32 ? 4 : TYPE == FLASH_I8 ? 1 : 2;

// ------------------------------------------------------------------------------------------ a tile made of floats

template <int TYPE>
inline void read_turned_keys(const AttentionJob& job, const Places& at, int64_t count, float* keys) {
  const flash_cache& c = job.cache;
  const int64_t step = c.k_at.item * kSize<TYPE>;
  for (int64_t j = 0; j < count; j += 16) {
    const char* p = static_cast<const char*>(c.k) + at.key[j];
    float* to = keys + j;
    if constexpr (TYPE == FLASH_I8) {
      const char* s = static_cast<const char*>(c.k_scale) + at.key_scale[j];
      for (int64_t i = 0; i < c.dim; i += c.kv_group, s += c.k_scale_at.item * 2) {
        const F scale = load_f16(reinterpret_cast<const uint16_t*>(s));
        for (int64_t g = 0; g < c.kv_group; ++g, p += step, to += kTile) store(to, sixteen<TYPE>(p) * scale);
      }
    } else {
      for (int64_t i = 0; i < c.dim; ++i, p += step, to += kTile) store(to, sixteen<TYPE>(p));
    }
  }
}

// Keys that lie row by row; heads whose width, and groups, are multiples of 16.
template <int TYPE>
inline void read_key_rows(const AttentionJob& job, const Places& at, int64_t count, float* keys) {
  const flash_cache& c = job.cache;
  const char *k = static_cast<const char*>(c.k), *scales = static_cast<const char*>(c.k_scale);
  for (int64_t j = 0; j < count; j += 16) {
    for (int64_t i = 0; i < c.dim; i += 16) {
      F rows[16];
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t key = j + r < count ? j + r : j;
        rows[r] = sixteen<TYPE>(k + at.key[key] + i * kSize<TYPE>);
        if constexpr (TYPE == FLASH_I8) rows[r] = rows[r] * scale_at(scales + at.key_scale[key], i / c.kv_group);
      }
      turn(rows, keys + i * kTile + j, kTile);
    }
  }
}

template <int TYPE>
inline void read_value_rows(const AttentionJob& job, const Places& at, int64_t count, float* values) {
  const flash_cache& c = job.cache;
  const char *v = static_cast<const char*>(c.v), *scales = static_cast<const char*>(c.v_scale);
  for (int64_t j = 0; j < count; ++j)
    for (int64_t i = 0; i < c.dim; i += 16) {
      F x = sixteen<TYPE>(v + at.value[j] + i * kSize<TYPE>);
      if constexpr (TYPE == FLASH_I8) x = x * scale_at(scales + at.value_scale[j], i / c.kv_group);
      store(values + j * c.dim + i, x);
    }
}

// Any width: row by row, keys by way of the values' place.
inline void read_odd_rows(const AttentionJob& job, bool keys, const Places& at, int64_t count, const Buffers& b) {
  const flash_cache& c = job.cache;
  const int64_t dim = job.plan.padded_dim;
  const char* base = static_cast<const char*>(keys ? c.k : c.v);
  const char* scales = static_cast<const char*>(keys ? c.k_scale : c.v_scale);
  const int64_t *places = keys ? at.key : at.value, *scale_places = keys ? at.key_scale : at.value_scale;
  for (int64_t j = 0; j < count; ++j)
    read_row(base + places[j], c.dtype == FLASH_I8 ? reinterpret_cast<const uint16_t*>(scales + scale_places[j]) : nullptr,
             c.dtype, c.kv_group, c.dim, b.values + j * dim);
  if (!keys) return;
  for (int64_t j = 0; j < count; j += 16)
    for (int64_t i = 0; i < dim; i += 16) {
      F rows[16];
      for (int64_t r = 0; r < 16; ++r) rows[r] = load(b.values + (j + r < count ? j + r : j) * dim + i);
      turn(rows, b.keys + i * kTile + j, kTile);
    }
}

FLASH_INLINE bool turned(const flash_cache& c) { return c.k_at.item != 1; }
FLASH_INLINE bool even(const flash_cache& c) { return c.dim % 16 == 0 && (c.dtype != FLASH_I8 || c.kv_group % 16 == 0); }

template <int TYPE>
FLASH_INLINE void read_tile_as(const AttentionJob& job, const Places& at, int64_t count, const Buffers& b) {
  const flash_cache& c = job.cache;
  if (turned(c)) read_turned_keys<TYPE>(job, at, count, b.keys);
  else if (even(c)) read_key_rows<TYPE>(job, at, count, b.keys);
  else read_odd_rows(job, true, at, count, b);
  if (even(c)) read_value_rows<TYPE>(job, at, count, b.values);
  else read_odd_rows(job, false, at, count, b);
}

// What lies behind the last key stays as it was: it is masked among the scores and no value is read there.
inline void read_tile(const AttentionJob& job, const Places& at, int64_t count, const Buffers& b) {
  if (job.cache.dtype == FLASH_F32) read_tile_as<FLASH_F32>(job, at, count, b);
  else if (job.cache.dtype == FLASH_F16) read_tile_as<FLASH_F16>(job, at, count, b);
  else if (job.cache.dtype == FLASH_BF16) read_tile_as<FLASH_BF16>(job, at, count, b);
  else read_tile_as<FLASH_I8>(job, at, count, b);
}

// --------------------------------------------------------------------------------------------- the two products

// Matrices by sixteen columns of a row: floats; the cache's turned keys; the cache's values. The latter two fetch the
// same place of the tile that comes next: rows of the cache lie scattered, and few rows wait for memory more than they
// compute.
struct Floats {
  const float* p;
  int64_t ld;
  FLASH_INLINE F at(int64_t i, int64_t column) const { return load(p + i * ld + column); }
};
template <int TYPE>
struct TurnedKeys {
  const char *first[kTile / 16], *next[kTile / 16];
  int64_t step;
  FLASH_INLINE F at(int64_t i, int64_t column) const {
    __builtin_prefetch(next[column / 16] + i * step);
    return sixteen<TYPE>(first[column / 16] + i * step);
  }
};
template <int TYPE>
struct ValueRows {
  const char* base;
  const int64_t *row, *next;
  FLASH_INLINE F at(int64_t i, int64_t column) const {
    __builtin_prefetch(base + next[i] + column * kSize<TYPE>);
    return sixteen<TYPE>(base + row[i] + column * kSize<TYPE>);
  }
};

// out[r][c] = (start[r] times out[r][c], or nothing) + Σ_i x[r][i] m[i][c] for ROWS rows and COLS registers of columns.
template <int ROWS, int COLS, class M>
FLASH_INLINE void product(const float* x, int64_t ldx, const M& m, int64_t column, int64_t depth, const float* start,
                          float* out, int64_t ldo) {
  F sum[ROWS][COLS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) sum[r][c] = start ? load(out + r * ldo + column + 16 * c) * set1(start[r]) : zero();
  for (int64_t i = 0; i < depth; ++i) {
    F v[COLS];
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) v[c] = m.at(i, column + 16 * c);
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
    for (int c = 0; c < COLS; ++c) store(out + r * ldo + column + 16 * c, sum[r][c]);
}

template <int ROWS, int COLS, class M>
FLASH_INLINE void last_columns(int64_t left, const float* x, int64_t ldx, const M& m, int64_t column, int64_t depth,
                               const float* start, float* out, int64_t ldo) {
  if constexpr (COLS > 0) {
    if (left >= 16 * COLS) product<ROWS, COLS>(x, ldx, m, column, depth, start, out, ldo);
    else last_columns<ROWS, COLS - 1>(left, x, ldx, m, column, depth, start, out, ldo);
  }
}

template <int ROWS, class M>
inline void product_columns(const float* x, int64_t ldx, const M& m, int64_t depth, const float* start, float* out,
                            int64_t ldo, int64_t columns) {
  int64_t c = 0;
  for (; c + 16 * kCols <= columns; c += 16 * kCols) product<ROWS, kCols>(x, ldx, m, c, depth, start, out, ldo);
  last_columns<ROWS, kCols - 1>(columns - c, x, ldx, m, c, depth, start, out, ldo);
}

template <int ROWS, class M>
FLASH_INLINE void last_rows(int64_t left, const float* x, int64_t ldx, const M& m, int64_t depth, const float* start,
                            float* out, int64_t ldo, int64_t columns) {
  if constexpr (ROWS > 0) {
    if (left == ROWS) product_columns<ROWS>(x, ldx, m, depth, start, out, ldo, columns);
    else last_rows<ROWS - 1>(left, x, ldx, m, depth, start, out, ldo, columns);
  }
}

// All rows of an item; columns a multiple of 16.
template <class M>
inline void products(const float* x, int64_t ldx, const M& m, int64_t depth, const float* start, float* out, int64_t ldo,
                     int64_t columns, int64_t rows) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    product_columns<kRows>(x + r * ldx, ldx, m, depth, start ? start + r : nullptr, out + r * ldo, ldo, columns);
  last_rows<kRows - 1>(rows - r, x + r * ldx, ldx, m, depth, start ? start + r : nullptr, out + r * ldo, ldo, columns);
}

// ------------------------------------------------------------------------------------------------ the softmax

// Scores of a tile become weights; limit[r]: keys that row sees. fix[r]: what earlier weights of the row are worth now.
inline void soften(const Buffers& b, int64_t tile, int64_t rows, const int64_t* limit) {
  for (int64_t r = 0; r < rows; ++r) {
    float* w = b.weights + r * kTile;
    const int64_t seen = limit[r] - tile;
    F s[4];
    for (int c = 0; c < 4; ++c) s[c] = load(w + 16 * c);
    if (seen < kTile)  // what lies in the future cannot be the maximum
      for (int c = 0; c < 4; ++c) s[c] = first_or(s[c], seen - 16 * c, set1(kNothing));
    const float before = b.part_most[r];
    const float here = top(max(max(s[0], s[1]), max(s[2], s[3])));
    const float most = here > before ? here : before;
    for (int c = 0; c < 4; ++c) s[c] = exp(s[c] - set1(most));
    if (seen < kTile)
      for (int c = 0; c < 4; ++c) s[c] = first_or(s[c], seen - 16 * c, zero());
    for (int c = 0; c < 4; ++c) store(w + 16 * c, s[c]);
    b.fix[r] = before - most;
    b.part_most[r] = most;
    store(b.fresh + 16 * r, (s[0] + s[1]) + (s[2] + s[3]));
  }
  for (int64_t r = 0; r < rows; r += 16) store(b.fix + r, exp(load(b.fix + r)));
  for (int64_t r = 0; r < rows; ++r)
    store(b.sums + 16 * r, fma(load(b.sums + 16 * r), set1(b.fix[r]), load(b.fresh + 16 * r)));
}

template <int TYPE>
inline void direct_tile(const AttentionJob& job, const Places& at, const Places& next, int64_t tile, int64_t count,
                        int64_t rows, const int64_t* limit, const Buffers& b) {
  const flash_cache& c = job.cache;
  const int64_t dim = c.dim;
  TurnedKeys<TYPE> keys;
  for (int64_t j = 0; j < kTile; j += 16) {  // sixteens that there are not are computed from others, and masked
    keys.first[j / 16] = static_cast<const char*>(c.k) + at.key[j];
    keys.next[j / 16] = static_cast<const char*>(c.k) + next.key[j];
  }
  keys.step = c.k_at.item * kSize<TYPE>;
  products(b.q, dim, keys, dim, nullptr, b.weights, kTile, kTile, rows);
  soften(b, tile, rows, limit);
  products(b.weights, kTile, ValueRows<TYPE>{static_cast<const char*>(c.v), at.value, next.value}, count, b.fix, b.y, dim, dim, rows);
}

// Keys first .. last of one partition into the partition's results of `rows` rows. then: the item that follows, if any.
inline void do_tiles(const AttentionJob& job, int64_t sequence, int64_t kv_head, int64_t first, int64_t last, int64_t rows,
                     const int64_t* limit, const Buffers& b, const AttentionItem* then) {
  const flash_cache& c = job.cache;
  const int64_t dim = job.plan.padded_dim;
  for (int64_t r = 0; r < rows; ++r) {
    b.part_most[r] = kNothing;
    store(b.sums + 16 * r, zero());
    for (int64_t i = 0; i < dim; i += 16) store(b.y + r * dim + i, zero());
  }
  const bool direct = rows <= kDirect && turned(c) && even(c);
  Places places[2];
  if (first < last) find(job, sequence, kv_head, first, last - first < kTile ? last - first : kTile, places[0]);
  for (int64_t tile = first, turn = 0; tile < last; tile += kTile, turn = 1 - turn) {
    const int64_t count = last - tile < kTile ? last - tile : kTile, left = last - tile - kTile;
    const Places &at = places[turn], *next = &places[1 - turn];
    if (left > 0) find(job, sequence, kv_head, tile + kTile, left < kTile ? left : kTile, places[1 - turn]);
    else if (!direct || !then || !find_first(job, *then, places[1 - turn])) next = &at;
    if (direct && c.dtype == FLASH_F16) {
      direct_tile<FLASH_F16>(job, at, *next, tile, count, rows, limit, b);
    } else if (direct && c.dtype == FLASH_BF16) {
      direct_tile<FLASH_BF16>(job, at, *next, tile, count, rows, limit, b);
    } else if (direct && c.dtype == FLASH_F32) {
      direct_tile<FLASH_F32>(job, at, *next, tile, count, rows, limit, b);
    } else {
      read_tile(job, at, count, b);
      products(b.q, dim, Floats{b.keys, kTile}, c.dim, nullptr, b.weights, kTile, (count + 15) / 16 * 16, rows);
      soften(b, tile, rows, limit);
      products(b.weights, kTile, Floats{b.values, dim}, count, b.fix, b.y, dim, dim, rows);
    }
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
    do_tiles(job, item.sequence, item.kv_head, first, until, rows, limit, b, nullptr);
    for (int64_t r = 0; r < rows; ++r)
      if (limit[r] > first) merge(b.y + r * dim, b.part_most[r], sum(load(b.sums + 16 * r)), dim, b.rows + r * dim, b.most + r, b.total + r);
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

inline void split(const AttentionJob& job, const AttentionItem& item, const AttentionItem* then, const Buffers& b,
                  int64_t* limit) {
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
  do_tiles(job, item.sequence, item.kv_head, first, until, rows, limit, b, then);
  int64_t r = 0;
  for (int64_t m = 0; m < item.count; ++m) {
    const int64_t sequence = p.member[item.first + m], tokens = s.cu_q[sequence + 1] - s.cu_q[sequence];
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t g = 0; g < p.group; ++g, ++r) {
        float* part = part_of(p, sequence, t, item.kv_head * p.group + g, item.partition);
        for (int64_t i = 0; i < dim; i += 16) store(part + i, load(b.y + r * dim + i));
        part[dim] = b.part_most[r];
        part[dim + 1] = sum(load(b.sums + 16 * r));
      }
  }
}

inline void attend(const AttentionJob& job, void* buffer, int64_t begin, int64_t end) {
  const Buffers b = buffers_in(job.plan, buffer);
  int64_t limit[kMostGroup];
  for (int64_t i = begin; i < end; ++i) {
    const AttentionItem& item = job.plan.item[i];
    if (item.partition < 0) sweep(job, item, b, limit);
    else split(job, item, i + 1 < end ? &item + 1 : nullptr, b, limit);
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
