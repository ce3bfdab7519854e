// Products with packed weights. A panel's sixteen outputs are the sixteen lanes; for every group of inputs the integer
// sums of four products at a time start at zero, become floats once, and are added with the group's scale:
//
//   y[o] += float(sum q_w[o] q_x) * (d[o] * scale_x)   then   y[o] += m[o] * moment_x     (m = -d zero, or -d z)
//
// A row's sums depend on nothing but the row: tiles of 1, 2, 4, 8 or 12 rows do the same operations in the same order.
// Few rows read the stream directly and unpack it in registers; many rows share a panel that is unpacked once into
// bytes and floats that stay in the cache.
#pragma once
#include "linear_layout.h"
#include "ops.h"
#include "row_tiles.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kFloatRows = 8;  // twelve sums and twelve results of 32 registers
#elif defined(__AVX2__)
constexpr int kMostRows = 2, kFloatRows = 2;
#elif defined(FLASH_NEON) && defined(__ARM_FEATURE_DOTPROD)
constexpr int kMostRows = 2, kFloatRows = 2;
#else
constexpr int kMostRows = 1, kFloatRows = 1;
#endif
constexpr float kLeastMagnitude = 1e-34f;  // 16256 divided by it is finite
constexpr int kPrefetch = 1344;  // bytes ahead; measured best between 1 and 2 KB

// Quad STEP of a unit whose packed codes start at `codes`; `high` is where the group's upper bits for it start.
template <int BITS, int STEP>
FLASH_INLINE Bytes quad(const uint8_t* codes, const uint8_t* high) {
  if constexpr (BITS == 8) {
    return load_bytes(codes + 64 * STEP);
  } else {
    const Bytes two = load_bytes(codes + 64 * (STEP / 2));
    const Bytes low = masked(STEP % 2 ? down<4>(two) : two, 0x0f);
    if constexpr (BITS == 4) {
      return low;
    } else if constexpr (BITS == 5) {
      const Bytes h = load_bytes(high);
      constexpr int j = STEP % 8;
      if constexpr (j < 4) return low | masked(up<4 - j>(h), 0x10);
      else if constexpr (j == 4) return low | masked(h, 0x10);
      else return low | masked(down<j - 4>(h), 0x10);
    } else {
      const Bytes h = load_bytes(high + 64 * (STEP / 4));
      constexpr int j = STEP % 4;
      if constexpr (j < 2) return low | masked(up<4 - 2 * j>(h), 0x30);
      else if constexpr (j == 2) return low | masked(h, 0x30);
      else return low | masked(down<2>(h), 0x30);
    }
  }
}

FLASH_INLINE int32_t four(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Steps STEP .. STEPS - 1 of a unit for ROWS rows. Packed codes, or bytes when the panel has been unpacked.
template <int BITS, int STEPS, int ROWS, bool UNPACKED, int STEP = 0>
FLASH_INLINE void unit_steps(Partial<BITS, STEPS>* sums, const uint8_t* codes, const uint8_t* high, const int8_t* x) {
  if constexpr (STEP < STEPS) {
    const Bytes w = UNPACKED ? load_bytes(codes + 64 * STEP) : quad<BITS, STEP>(codes, high);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r].template dot<STEP>(w, four(x + 4 * (r * STEPS + STEP)));
    unit_steps<BITS, STEPS, ROWS, UNPACKED, STEP + 1>(sums, codes, high, x);
  }
}

// Scales of one group as floats.
struct Scales { F d, m; };

// Walks the records of a panel.
struct Walk {
  const uint8_t* at;
  F super_d{zero()}, super_m{zero()};
  int64_t left = 0;  // inputs of the super-block still to come

  // The group's scales; `at` then points to its codes.
  FLASH_INLINE Scales head(const flash_linear& w) {
    Scales s;
    const F none = set1(static_cast<float>(-w.zero));
    if (w.super) {
      if (left == 0) {
        super_d = load_f16(reinterpret_cast<const uint16_t*>(at));
        if (w.offset == 1) super_m = load_f16(reinterpret_cast<const uint16_t*>(at + 32));
        at += super_bytes(w);
        left = kSuper;
      }
      left -= w.group;
      s.d = super_d * load_i8(reinterpret_cast<const int8_t*>(at));
      s.m = w.offset == 1 ? zero() - super_m * load_i8(reinterpret_cast<const int8_t*>(at + 16)) : none * s.d;
    } else {
      s.d = load_f16(reinterpret_cast<const uint16_t*>(at));
      if (w.offset == 1) s.m = load_f16(reinterpret_cast<const uint16_t*>(at + 32));
      else if (w.offset == 2) s.m = zero() - load_u8(at + 32) * s.d;
      else s.m = none * s.d;
    }
    at += head_bytes(w);
    return s;
  }
};

// scales: of the tile's rows, then their moments.
template <int BITS, int STEPS, int ROWS>
FLASH_INLINE void add_group(F* y, const Partial<BITS, STEPS>* sums, const Scales& s, const float* scales) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    y[r] = fma(to_float(sums[r].done()), s.d * set1(scales[r]), y[r]);
    y[r] = fma(s.m, set1(scales[ROWS + r]), y[r]);
  }
}

FLASH_INLINE void put(F y, const flash_linear& w, int64_t panel, float* out) {
  const int64_t first = panel * kPanel, left = w.n - first;
  if (left >= kPanel) {
    store(out + first, w.bias ? y + load(w.bias + first) : y);
  } else {
    const int n = static_cast<int>(left);
    store(out + first, w.bias ? y + load(w.bias + first, n) : y, n);
  }
}

// One tile of rows times one panel, straight from the stream. UNITS: of a group, 0 when it is not known.
template <int BITS, int STEPS, int UNITS, int TERMS, int ROWS>
inline void stream_tile(const flash_linear& w, const QuantRows& x, int64_t row, float* y, int64_t ldy, int64_t panel) {
  constexpr int kBytes = STEPS * (BITS == 8 ? 64 : 32);
  Walk walk{static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w)};
  const int64_t groups = padded_k(w) / w.group, units = UNITS ? UNITS : w.group / (4 * STEPS);
  const int64_t nibbles = BITS == 8 ? 0 : w.group * 8;
  const int64_t codes = code_bytes(w);
  const int8_t* q = x.q + row * x.ldq;
  const float* scales = x.scales + row * 2 * x.stride;
  F sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = zero();
  for (int64_t g = 0; g < groups; ++g, scales += 2 * ROWS) {
    const Scales s = walk.head(w);
    Partial<BITS, STEPS> sums[ROWS];
#pragma GCC unroll 2
    for (int term = 0; term < TERMS; ++term) {
      if (term)
        for (int r = 0; r < ROWS; ++r) sums[r].next_term();
      for (int64_t u = 0; u < units; ++u, q += 4 * STEPS * ROWS) {
        const uint8_t* here = walk.at + u * kBytes;
        if (term == 0)
          for (int ahead = 0; ahead < kBytes; ahead += 64) __builtin_prefetch(here + kPrefetch + ahead);
        unit_steps<BITS, STEPS, ROWS, false>(sums, here, walk.at + nibbles + u * (BITS == 5 ? 64 : 16 * STEPS), q);
      }
    }
    walk.at += codes;
    add_group<BITS, STEPS, ROWS>(sum, sums, s, scales);
  }
  for (int r = 0; r < ROWS; ++r) put(sum[r], w, panel, y + (row + r) * ldy);
}

// The panel as bytes and floats: d, m of every group (32 floats), and the quads.
template <int BITS, int STEPS, int STEP = 0>
FLASH_INLINE void unpack_unit(uint8_t* out, const uint8_t* codes, const uint8_t* high) {
  if constexpr (STEP < STEPS) {
    store_bytes(out + 64 * STEP, quad<BITS, STEP>(codes, high));
    unpack_unit<BITS, STEPS, STEP + 1>(out, codes, high);
  }
}

template <int BITS, int STEPS>
inline void unpack_panel(const flash_linear& w, int64_t panel, float* scales, uint8_t* bytes) {
  Walk walk{static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w)};
  const int64_t groups = padded_k(w) / w.group, units = w.group / (4 * STEPS);
  const int64_t nibbles = BITS == 8 ? 0 : w.group * 8;
  for (int64_t g = 0; g < groups; ++g, scales += 2 * kPanel) {
    const Scales s = walk.head(w);
    store(scales, s.d);
    store(scales + kPanel, s.m);
    for (int64_t u = 0; u < units; ++u, bytes += 64 * STEPS)
      unpack_unit<BITS, STEPS>(bytes, walk.at + u * STEPS * (BITS == 8 ? 64 : 32),
                               walk.at + nibbles + u * (BITS == 5 ? 64 : 16 * STEPS));
    walk.at += code_bytes(w);
  }
}

// ahead: where the next panel's stream starts, to be fetched meanwhile, or null.
template <int BITS, int STEPS, int UNITS, int TERMS, int ROWS>
inline void unpacked_tile(const flash_linear& w, const float* panel_scales, const uint8_t* bytes, const QuantRows& x,
                          int64_t row, float* y, int64_t ldy, int64_t panel, const uint8_t* ahead) {
  const int64_t record = head_bytes(w) + code_bytes(w);
  const int64_t groups = padded_k(w) / w.group, units = UNITS ? UNITS : w.group / (4 * STEPS);
  const int8_t* q = x.q + row * x.ldq;
  const float* scales = x.scales + row * 2 * x.stride;
  F sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = zero();
  for (int64_t g = 0; g < groups; ++g, panel_scales += 2 * kPanel, scales += 2 * ROWS) {
    if (ahead)
      for (const uint8_t* end = ahead + record; ahead < end; ahead += 64) __builtin_prefetch(ahead);
    Partial<BITS, STEPS> sums[ROWS];
#pragma GCC unroll 2
    for (int term = 0; term < TERMS; ++term) {
      if (term)
        for (int r = 0; r < ROWS; ++r) sums[r].next_term();
      for (int64_t u = 0; u < units; ++u, q += 4 * STEPS * ROWS)
        unit_steps<BITS, STEPS, ROWS, true>(sums, bytes + u * 64 * STEPS, nullptr, q);
    }
    bytes += units * 64 * STEPS;
    add_group<BITS, STEPS, ROWS>(sum, sums, {load(panel_scales), load(panel_scales + kPanel)}, scales);
  }
  for (int r = 0; r < ROWS; ++r) put(sum[r], w, panel, y + (row + r) * ldy);
}

// f<width>() for a width that a tile can have.
template <int ROWS, class Do>
FLASH_INLINE void with_width(int64_t width, Do f) {
  if (width == ROWS) f.template operator()<ROWS>();
  else if constexpr (ROWS > 8) with_width<8>(width, f);
  else if constexpr (ROWS > 1) with_width<ROWS / 2>(width, f);
}

template <int BITS, int STEPS, int UNITS, int TERMS>
struct Streamed {
  const flash_linear& w;
  const QuantRows& x;
  int64_t row;
  float* y;
  int64_t ldy, panel;
  template <int ROWS> FLASH_INLINE void operator()() { stream_tile<BITS, STEPS, UNITS, TERMS, ROWS>(w, x, row, y, ldy, panel); }
};

template <int BITS, int STEPS, int UNITS, int TERMS>
struct Unpacked {
  const flash_linear& w;
  const QuantRows& x;
  int64_t row;
  float* y;
  int64_t ldy, panel;
  const float* scales;
  const uint8_t *bytes, *ahead;
  template <int ROWS> FLASH_INLINE void operator()() {
    unpacked_tile<BITS, STEPS, UNITS, TERMS, ROWS>(w, scales, bytes, x, row, y, ldy, panel, ahead);
  }
};

// Rows whose activations stay in the second-level cache while the panels go by.
constexpr int64_t kRowsAtOnce = 20 * kMostRows;

template <int BITS, int STEPS, int UNITS, int TERMS>
inline void quant_panels(const flash_linear& w, const QuantRows& x, float* y, int64_t ldy, int64_t begin, int64_t end,
                         void* buffer) {
  float* scales = static_cast<float*>(buffer);
  uint8_t* bytes = static_cast<uint8_t*>(buffer) + padded_k(w) / w.group * 2 * kPanel * 4;
  // One or two tiles unpack the stream in registers; more share a panel that is unpacked once.
  const RowTile head = tile_of<kMostRows>(0, x.rows);
  const bool few = head.width == x.rows || tile_of<kMostRows>(head.width, x.rows).width == x.rows - head.width;
  for (int64_t top = 0; top < x.rows;) {
    int64_t bottom = top;
    for (int64_t panel = begin; panel < end; ++panel) {
      if (!few) unpack_panel<BITS, STEPS>(w, panel, scales, bytes);
      bottom = top;
      const uint8_t* ahead = panel + 1 < end ? static_cast<const uint8_t*>(w.data) + (panel + 1) * panel_bytes(w) : nullptr;
      while (bottom < x.rows && bottom - top < kRowsAtOnce) {
        const RowTile tile = tile_of<kMostRows>(bottom, x.rows);
        if (few) with_width<kMostRows>(tile.width, Streamed<BITS, STEPS, UNITS, TERMS>{w, x, bottom, y, ldy, panel});
        else with_width<kMostRows>(tile.width, Unpacked<BITS, STEPS, UNITS, TERMS>{w, x, bottom, y, ldy, panel, scales, bytes, ahead});
        ahead = nullptr;
        bottom += tile.width;
      }
    }
    top = bottom;
  }
}

template <int BITS, int TERMS>
inline void quant_bits(const flash_linear& w, const QuantRows& x, float* y, int64_t ldy, int64_t begin, int64_t end,
                       void* buffer) {
  if (w.group == 16) {
    if constexpr (BITS != 5) quant_panels<BITS, 4, 1, TERMS>(w, x, y, ldy, begin, end, buffer);
  } else if (w.group == 32) {
    quant_panels<BITS, 8, 1, TERMS>(w, x, y, ldy, begin, end, buffer);
  } else {
    quant_panels<BITS, 8, 0, TERMS>(w, x, y, ldy, begin, end, buffer);
  }
}

template <int TERMS>
inline void quant_terms(const flash_linear& w, const QuantRows& x, float* y, int64_t ldy, int64_t begin, int64_t end,
                        void* buffer) {
  if (w.bits == 4) quant_bits<4, TERMS>(w, x, y, ldy, begin, end, buffer);
  else if (w.bits == 5) quant_bits<5, TERMS>(w, x, y, ldy, begin, end, buffer);
  else if (w.bits == 6) quant_bits<6, TERMS>(w, x, y, ldy, begin, end, buffer);
  else if (w.bits == 8) quant_bits<8, TERMS>(w, x, y, ldy, begin, end, buffer);
}

inline void linear_quant(const flash_linear& w, const QuantRows& x, float* y, int64_t ldy, int64_t begin, int64_t end,
                         void* buffer) {
  if (x.terms == 2) quant_terms<2>(w, x, y, ldy, begin, end, buffer);
  else quant_terms<1>(w, x, y, ldy, begin, end, buffer);
}

// --------------------------------------------------------------------------------------------------- activations

// One row of a tile, sixteen groups of PARTS registers at a time, so that what belongs to a group is one lane of what is
// computed for all of them. x has whole groups.
template <int PARTS, int TERMS>
FLASH_INLINE void quantize_row(const float* x, int64_t groups, int8_t* to, int64_t width, float* scales) {
  constexpr int kUnits = PARTS > 2 ? PARTS / 2 : 1, kUnit = 16 * PARTS / kUnits;  // bytes that stay together
  constexpr float kLevels = TERMS == 2 ? 127.0f * 128.0f : 127.0f;
  constexpr int kAtOnce = 16;
  for (int64_t first = 0; first < groups; first += kAtOnce) {
    const int64_t count = groups - first < kAtOnce ? groups - first : kAtOnce;
    I lanes[kAtOnce];
    for (int64_t g = 0; g < count; ++g) {
      lanes[g] = magnitude(load(x + g * 16 * PARTS));
#pragma GCC unroll 8
      for (int p = 1; p < PARTS; ++p) lanes[g] = max(lanes[g], magnitude(load(x + (g * PARTS + p) * 16)));
    }
    for (int64_t g = count; g < kAtOnce; ++g) lanes[g] = izero();
    // Not a number when some value is not finite; never so small that its inverse is not.
    const F most = max(set1(kLeastMagnitude), as_float(tops(lanes)));
    float scale[kAtOnce], inverse[kAtOnce], total[kAtOnce];
    store(scale, fma(most, zero(), most / set1(kLevels)));
    store(inverse, set1(kLevels) / most);
    for (int64_t g = 0; g < count; ++g, x += 16 * PARTS) {
      I sum = izero();
#pragma GCC unroll 8
      for (int p = 0; p < PARTS; ++p) {
        const I q = to_int(load(x + 16 * p) * set1(inverse[g]));
        sum = sum + q;
        int8_t* at = to + 16 * p / kUnit * kUnit * width + 16 * p % kUnit;
        if constexpr (TERMS == 2) {
          const I high = shifted_down<7>(q + iset1(64));
          store_i8(at, high);
          store_i8(at + 16 * PARTS * width, q - shifted_up<7>(high));
        } else {
          store_i8(at, q);
        }
      }
      to += 16 * PARTS * TERMS * width;
      lanes[g] = sum;
    }
    store(total, to_float(sums(lanes)));
    for (int64_t g = 0; g < count; ++g, scales += 2 * width) {
      scales[0] = scale[g];
      scales[width] = scale[g] * total[g];
    }
  }
}

template <int PARTS, int TERMS>
inline void quantize_rows(const float* x, int64_t ldx, int64_t k, int64_t groups, const QuantRows& out, int64_t begin,
                          int64_t end) {
  constexpr int64_t kGroup = 16 * PARTS, kUnit = PARTS > 1 ? 32 : 16;
  const int64_t whole = k / kGroup;
  for (int64_t row = begin; row < end; ++row) {
    const float* from = x + row * ldx;
    const RowTile tile = tile_of<kMostRows>(row, out.rows);
    int8_t* to = out.q + tile.first * out.ldq + kUnit * (row - tile.first);
    float* scales = out.scales + tile.first * 2 * out.stride + (row - tile.first);
    quantize_row<PARTS, TERMS>(from, whole, to, tile.width, scales);
    for (int64_t g = whole; g < groups; ++g) {  // the end of the row, and of its super-block
      float rest[kGroup] = {};
      const int64_t left = k - g * kGroup;
      if (left > 0) std::memcpy(rest, from + g * kGroup, static_cast<size_t>(left) * sizeof(float));
      quantize_row<PARTS, TERMS>(rest, 1, to + g * kGroup * TERMS * tile.width, tile.width, scales + g * 2 * tile.width);
    }
  }
}

template <int PARTS>
FLASH_INLINE void quantize_terms(const float* x, int64_t ldx, int64_t k, int64_t groups, const QuantRows& out,
                                 int64_t begin, int64_t end) {
  if (out.terms == 2) quantize_rows<PARTS, 2>(x, ldx, k, groups, out, begin, end);
  else quantize_rows<PARTS, 1>(x, ldx, k, groups, out, begin, end);
}

inline void quantize(const float* x, int64_t ldx, int64_t k, int64_t groups, const QuantRows& out, int64_t begin,
                     int64_t end) {
  if (out.group == 16) quantize_terms<1>(x, ldx, k, groups, out, begin, end);
  else if (out.group == 32) quantize_terms<2>(x, ldx, k, groups, out, begin, end);
  else if (out.group == 64) quantize_terms<4>(x, ldx, k, groups, out, begin, end);
  else quantize_terms<8>(x, ldx, k, groups, out, begin, end);
}

// ------------------------------------------------------------------------------------------------ float weights

template <int KIND>
FLASH_INLINE F weights(const void* p, int64_t i) {
  if constexpr (KIND == 1) return load(static_cast<const float*>(p) + i);
  else if constexpr (KIND == 2) return load_f16(static_cast<const uint16_t*>(p) + i);
  else return load_bf16(static_cast<const uint16_t*>(p) + i);
}

// All rows in blocks of ROWS, half of it, … 1; each block by f<block>(row).
template <int ROWS, class Do>
FLASH_INLINE int64_t in_blocks(int64_t row, int64_t rows, Do& f) {
  for (; rows - row >= ROWS; row += ROWS) f.template operator()<ROWS>(row);
  if constexpr (ROWS > 1) return in_blocks<ROWS / 2>(row, rows, f);
  return row;
}

template <int KIND>
struct FloatRows {
  const flash_linear& w;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy, panel;
  template <int ROWS> FLASH_INLINE void operator()(int64_t row) {
    const char* data = static_cast<const char*>(w.data) + panel * panel_bytes(w);
    F sum[ROWS];
    for (int r = 0; r < ROWS; ++r) sum[r] = zero();
    for (int64_t i = 0; i < w.k; ++i) {
      const F v = weights<KIND>(data, kPanel * i);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) sum[r] = fma(v, set1(x[(row + r) * ldx + i]), sum[r]);
    }
    for (int r = 0; r < ROWS; ++r) put(sum[r], w, panel, y + (row + r) * ldy);
  }
};

inline void linear_float(const flash_linear& w, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy,
                         int64_t begin, int64_t end, void*) {
  for (int64_t panel = begin; panel < end; ++panel) {
    if (w.kind == 1) {
      FloatRows<1> f{w, x, ldx, y, ldy, panel};
      in_blocks<kFloatRows>(0, rows, f);
    } else if (w.kind == 2) {
      FloatRows<2> f{w, x, ldx, y, ldy, panel};
      in_blocks<kFloatRows>(0, rows, f);
    } else {
      FloatRows<3> f{w, x, ldx, y, ldy, panel};
      in_blocks<kFloatRows>(0, rows, f);
    }
  }
}

// ------------------------------------------------------------------------------------------------- rows of a table

FLASH_INLINE int code_at(const flash_linear& w, const uint8_t* codes, int64_t i, int64_t lane) {
  const int64_t q = i / 4, at = 4 * lane + i % 4;
  if (w.bits == 8) return codes[64 * q + at];
  const int low = codes[64 * (q / 2) + at] >> (q % 2 ? 4 : 0) & 15;
  const uint8_t* high = codes + w.group * 8;
  if (w.bits == 5) return low | (high[64 * (q / 8) + at] >> (q % 8) & 1) << 4;
  if (w.bits == 6) return low | (high[64 * (q / 4) + at] >> (2 * (q % 4)) & 3) << 4;
  return low;
}

inline void linear_rows(const flash_linear& w, const int64_t* ids, int64_t begin, int64_t end, float* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t panel = ids[i] / kPanel, lane = ids[i] % kPanel;
    float* y = out + i * w.k;
    if (w.kind) {
      const char* data = static_cast<const char*>(w.data) + panel * panel_bytes(w);
      for (int64_t k = 0; k < w.k; ++k) {
        float t[16];
        store(t, w.kind == 1 ? weights<1>(data, kPanel * k) : w.kind == 2 ? weights<2>(data, kPanel * k) : weights<3>(data, kPanel * k));
        y[k] = t[lane];
      }
      continue;
    }
    Walk walk{static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w)};
    for (int64_t first = 0; first < w.k; first += w.group) {
      const Scales s = walk.head(w);
      float d[16], m[16];
      store(d, s.d);
      store(m, s.m);
      const int64_t count = w.k - first < w.group ? w.k - first : w.group;
      for (int64_t k = 0; k < count; ++k)
        y[first + k] = __builtin_fmaf(static_cast<float>(code_at(w, walk.at, k, lane)), d[lane], m[lane]);
      walk.at += code_bytes(w);
    }
  }
}

}  // namespace FLASH_ISA
}  // namespace flash
