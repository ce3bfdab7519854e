// Where things lie in a packed GroupQuant weight. Everything is cut into panels of 16 outputs; a panel is a stream of
// records, so that a product reads it from front to back once:
//
//   one record a group                                      super-blocks (K-quants): one record for 256 inputs
//   ┌──────────────┬───────────────────────┬──────────┐     ┌─────────┬──────────┬ … every group: ─────────────┐
//   │ d  16 x fp16 │ m 16 x fp16 (offset 1)│  codes   │     │ D fp16s │ M fp16s  │ sc int8s │ mn int8s │ codes │
//   │              │ z 16 x u8   (offset 2)│          │     └─────────┴──────────┴──────────┴──────────┴───────┘
//   └──────────────┴───────────────────────┴──────────┘
//
//   codes of a group; "quad" = 4 inputs x 16 outputs = 64 values, byte 4 o + b is input b of output o
//     4 bits   64 bytes for two quads: low nibbles the first, high nibbles the second
//     5 bits   the low four bits as above, then 64 bytes for eight quads: bit j is the fifth bit of quad j
//     6 bits   the low four bits, then 64 bytes for four quads: bits 2j and 2j + 1 are the upper two of quad j
//     8 bits   64 bytes a quad
//
// Panels of float weights: for every input the 16 outputs' values.
#pragma once
#include <cstdint>

#include "flash.h"

namespace flash {

constexpr int64_t kPanel = 16;
constexpr int64_t kSuper = 256;

static inline int64_t code_bytes(const flash_linear& w) { return w.group * kPanel * w.bits / 8; }
static inline int64_t head_bytes(const flash_linear& w) {  // before the codes of a group
  if (w.super) return w.offset == 1 ? 32 : 16;
  return w.offset == 1 ? 64 : w.offset == 2 ? 48 : 32;
}
static inline int64_t super_bytes(const flash_linear& w) { return w.offset == 1 ? 64 : 32; }  // before a super-block's groups
static inline int64_t padded_k(const flash_linear& w) {
  const int64_t unit = w.kind ? 1 : w.super ? kSuper : w.group;
  return (w.k + unit - 1) / unit * unit;
}
static inline int64_t item_bytes(const flash_linear& w) { return w.kind == 1 ? 4 : 2; }
static inline int64_t panel_bytes(const flash_linear& w) {
  const int64_t k = padded_k(w);
  if (w.kind) return k * kPanel * item_bytes(w);
  const int64_t groups = k / w.group;
  return groups * (head_bytes(w) + code_bytes(w)) + (w.super ? k / kSuper * super_bytes(w) : 0);
}
static inline int64_t panels(const flash_linear& w) { return (w.n + kPanel - 1) / kPanel; }

}  // namespace flash
