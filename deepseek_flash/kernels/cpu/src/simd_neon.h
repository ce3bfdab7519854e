// The primitives of simd.h on 64-bit Arm, four registers of NEON each; compiled where FLASH_NEON is defined.
//
// Base Armv8 has everything but dot products of bytes. Where the compiler may use that extension
// (__ARM_FEATURE_DOTPROD) Partial is made of it, elsewhere of multiplications to 16 bits: two entries of the table of
// instruction sets.
#pragma once
#include <arm_neon.h>

namespace flash {
namespace FLASH_ISA {

struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };

FLASH_INLINE F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
FLASH_INLINE F zero() { return set1(0.0f); }
FLASH_INLINE F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
FLASH_INLINE void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
// The first n of sixteen, the rest zero.
FLASH_INLINE F load(const float* p, int n) {
  float t[16] = {};
  std::memcpy(t, p, sizeof(float) * static_cast<size_t>(n));
  return load(t);
}
FLASH_INLINE void store(float* p, F x, int n) {
  float t[16];
  store(t, x);
  std::memcpy(p, t, sizeof(float) * static_cast<size_t>(n));
}
FLASH_INLINE F operator+(F x, F y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
FLASH_INLINE F operator-(F x, F y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
FLASH_INLINE F operator*(F x, F y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
FLASH_INLINE F operator/(F x, F y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
FLASH_INLINE F fma(F x, F y, F z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// x > y ? x : y, as everywhere: vmaxq_f32 would keep NaN and tell zeros apart.
FLASH_INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
FLASH_INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
FLASH_INLINE F max(F x, F y) { return {larger(x.a, y.a), larger(x.b, y.b), larger(x.c, y.c), larger(x.d, y.d)}; }
FLASH_INLINE F min(F x, F y) { return {smaller(x.a, y.a), smaller(x.b, y.b), smaller(x.c, y.c), smaller(x.d, y.d)}; }
FLASH_INLINE F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
FLASH_INLINE F round(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }

FLASH_INLINE F load_f16(const uint16_t* p) {
  const float16x8_t lo = vreinterpretq_f16_u16(vld1q_u16(p)), hi = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return {vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)), vcvt_high_f32_f16(hi)};
}
FLASH_INLINE void store_f16(uint16_t* p, F x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.c), x.d)));
}
FLASH_INLINE F load_bf16(const uint16_t* p) {  // the upper halves of floats whose lower ones are zero
  const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8), none = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(none, lo)), vreinterpretq_f32_u16(vzip2q_u16(none, lo)),
          vreinterpretq_f32_u16(vzip1q_u16(none, hi)), vreinterpretq_f32_u16(vzip2q_u16(none, hi))};
}
FLASH_INLINE F load_i8(const int8_t* p) {
  const int8x16_t w = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(w)), hi = vmovl_high_s8(w);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))};
}
FLASH_INLINE F load_u8(const uint8_t* p) {
  const uint8x16_t w = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(w)), hi = vmovl_high_u8(w);
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
          vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))};
}
FLASH_INLINE I iset1(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
FLASH_INLINE I izero() { return iset1(0); }
FLASH_INLINE I operator+(I x, I y) {
  return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
}
FLASH_INLINE I operator-(I x, I y) {
  return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b), vsubq_s32(x.c, y.c), vsubq_s32(x.d, y.d)};
}
FLASH_INLINE I max(I x, I y) { return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b), vmaxq_s32(x.c, y.c), vmaxq_s32(x.d, y.d)}; }
FLASH_INLINE I load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
FLASH_INLINE void store(int32_t* p, I x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
FLASH_INLINE I to_int(F x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)}; }
FLASH_INLINE void store_i8(int8_t* p, I x) {
  const int16x8_t lo = vmovn_high_s32(vmovn_s32(x.a), x.b), hi = vmovn_high_s32(vmovn_s32(x.c), x.d);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(lo), hi));
}
FLASH_INLINE F as_float(I x) {
  return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b), vreinterpretq_f32_s32(x.c), vreinterpretq_f32_s32(x.d)};
}
FLASH_INLINE I as_int(F x) {
  return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b), vreinterpretq_s32_f32(x.c), vreinterpretq_s32_f32(x.d)};
}
FLASH_INLINE I magnitude(F x) { return as_int(abs(x)); }
template <int N> FLASH_INLINE I shifted_up(I x) {
  return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N> FLASH_INLINE I shifted_down(I x) {
  return {vshrq_n_s32(x.a, N), vshrq_n_s32(x.b, N), vshrq_n_s32(x.c, N), vshrq_n_s32(x.d, N)};
}
FLASH_INLINE F first_or(F x, int64_t n, F other) {
  const int32_t ascending[4] = {0, 1, 2, 3};
  const int32x4_t count = vdupq_n_s32(static_cast<int32_t>(n < 0 ? 0 : n > 16 ? 16 : n)), lane = vld1q_s32(ascending);
  return {vbslq_f32(vcgtq_s32(count, lane), x.a, other.a),
          vbslq_f32(vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(4))), x.b, other.b),
          vbslq_f32(vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(8))), x.c, other.c),
          vbslq_f32(vcgtq_s32(count, vaddq_s32(lane, vdupq_n_s32(12))), x.d, other.d)};
}
FLASH_INLINE F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
FLASH_INLINE F pow2(F n) {  // 2^(n - kWhole), see exp
  const I bits = as_int(n) + iset1(127);
  return as_float({vshlq_n_s32(bits.a, 23), vshlq_n_s32(bits.b, 23), vshlq_n_s32(bits.c, 23), vshlq_n_s32(bits.d, 23)});
}

// Lane i with i + 8, then + 4, + 2, + 1.
FLASH_INLINE float sum(F x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
FLASH_INLINE float top(F x) {
  const float32x4_t four = larger(larger(x.a, x.c), larger(x.b, x.d));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vdupq_laneq_f32(two, 1)), 0);
}

// -------------------------------------------------------------------------- bytes and dot products of four of them
// A register holds four consecutive inputs of each of four outputs.
struct Bytes { uint8x16_t a, b, c, d; };
FLASH_INLINE Bytes load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
FLASH_INLINE void store_bytes(uint8_t* p, Bytes w) {
  vst1q_u8(p, w.a);
  vst1q_u8(p + 16, w.b);
  vst1q_u8(p + 32, w.c);
  vst1q_u8(p + 48, w.d);
}
FLASH_INLINE Bytes masked(Bytes w, int m) {
  const uint8x16_t k = vdupq_n_u8(static_cast<uint8_t>(m));
  return {vandq_u8(w.a, k), vandq_u8(w.b, k), vandq_u8(w.c, k), vandq_u8(w.d, k)};
}
template <int N> FLASH_INLINE Bytes up(Bytes w) {
  return {vshlq_n_u8(w.a, N), vshlq_n_u8(w.b, N), vshlq_n_u8(w.c, N), vshlq_n_u8(w.d, N)};
}
template <int N> FLASH_INLINE Bytes down(Bytes w) {
  return {vshrq_n_u8(w.a, N), vshrq_n_u8(w.b, N), vshrq_n_u8(w.c, N), vshrq_n_u8(w.d, N)};
}
FLASH_INLINE Bytes operator|(Bytes x, Bytes y) {
  return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b), vorrq_u8(x.c, y.c), vorrq_u8(x.d, y.d)};
}
FLASH_INLINE int8x16_t every(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
// Weights of up to seven bits are the same signed.
FLASH_INLINE int8x16_t as_signed(uint8x16_t w) { return vreinterpretq_s8_u8(w); }
// w - 128; 128 times the sum of the activations makes up for it.
FLASH_INLINE int8x16_t less_128(uint8x16_t w) { return vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(0x80))); }

#if defined(__ARM_FEATURE_DOTPROD)
template <int BITS, int STEPS> struct Partial {
  I total{izero()};
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    const int8x16_t v = every(x);
    total.a = vdotq_s32(total.a, as_signed(w.a), v);
    total.b = vdotq_s32(total.b, as_signed(w.b), v);
    total.c = vdotq_s32(total.c, as_signed(w.c), v);
    total.d = vdotq_s32(total.d, as_signed(w.d), v);
  }
  FLASH_INLINE void next_term() { total = shifted_up<7>(total); }
  FLASH_INLINE I done() const { return total; }
};
template <int STEPS> struct Partial<8, STEPS> {
  I total{izero()};
  int32x4_t rest{vdupq_n_s32(0)};  // 64 times the sum of the activations, in every lane
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    const int8x16_t v = every(x);
    total.a = vdotq_s32(total.a, less_128(w.a), v);
    total.b = vdotq_s32(total.b, less_128(w.b), v);
    total.c = vdotq_s32(total.c, less_128(w.c), v);
    total.d = vdotq_s32(total.d, less_128(w.d), v);
    rest = vdotq_s32(rest, vdupq_n_s8(64), v);
  }
  FLASH_INLINE void next_term() {
    total = shifted_up<7>(total);
    rest = vshlq_n_s32(rest, 7);
  }
  FLASH_INLINE I done() const {
    const int32x4_t twice = vaddq_s32(rest, rest);
    return total + I{twice, twice, twice, twice};
  }
};
#else
// Four outputs: products gather in 16 bits, two of each output in `lo` and `hi` by turns.
template <int FIT> struct Quarter {
  int16x8_t lo, hi;
  template <int STEP> FLASH_INLINE void dot(int8x16_t w, int8x16_t x, int32x4_t& total) {
    if constexpr (STEP % FIT == 0) {
      lo = vmull_s8(vget_low_s8(w), vget_low_s8(x));
      hi = vmull_high_s8(w, x);
    } else {
      lo = vmlal_s8(lo, vget_low_s8(w), vget_low_s8(x));
      hi = vmlal_high_s8(hi, w, x);
    }
    if constexpr (STEP % FIT == FIT - 1) total = vpadalq_s16(total, vpaddq_s16(lo, hi));
  }
};
template <int BITS, int STEPS> struct Partial {
  static constexpr int kFit = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // steps * 2 * largest product < 2^15
  static constexpr int kSteps = kFit < STEPS ? kFit : STEPS;
  I total{izero()};
  int32x4_t rest{vdupq_n_s32(0)};  // the sum of the activations, in every lane; for 8 bits only
  Quarter<kSteps> a, b, c, d;
  static FLASH_INLINE int8x16_t weights_of(uint8x16_t w) { return BITS == 8 ? less_128(w) : as_signed(w); }
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    const int8x16_t v = every(x);
    a.template dot<STEP>(weights_of(w.a), v, total.a);
    b.template dot<STEP>(weights_of(w.b), v, total.b);
    c.template dot<STEP>(weights_of(w.c), v, total.c);
    d.template dot<STEP>(weights_of(w.d), v, total.d);
    if constexpr (BITS == 8) rest = vpadalq_s16(rest, vpaddlq_s8(v));
  }
  FLASH_INLINE void next_term() {
    total = shifted_up<7>(total);
    rest = vshlq_n_s32(rest, 7);
  }
  FLASH_INLINE I done() const {
    const int32x4_t more = vshlq_n_s32(rest, 7);
    return BITS == 8 ? total + I{more, more, more, more} : total;
  }
};
#endif

}  // namespace FLASH_ISA
}  // namespace flash
