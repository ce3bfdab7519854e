// Sixteen lanes, the same on every instruction set.
//
// Kernels are written once against these primitives and compiled once per instruction set (namespace FLASH_ISA).
// A value of sixteen floats is one register of AVX-512, two of AVX2, four of NEON (simd_neon.h); an array otherwise. Every primitive
// does the same arithmetic, rounding included (fma is fused everywhere), so results agree bit for bit between sets.
// Compile with -ffp-contract=off: what is fused is written as fma.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define FLASH_INLINE inline __attribute__((always_inline))

#if defined(FLASH_NEON)
#include "simd_neon.h"
#endif

namespace flash {
namespace FLASH_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
// ---------------------------------------------------------------------------------------------- AVX-512 with VNNI
struct F { __m512 v; };
struct I { __m512i v; };

FLASH_INLINE F zero() { return {_mm512_setzero_ps()}; }
FLASH_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
FLASH_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
FLASH_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
FLASH_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
// The first n of sixteen, the rest zero.
FLASH_INLINE F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
FLASH_INLINE void store(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
FLASH_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
FLASH_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
FLASH_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
FLASH_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
FLASH_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
FLASH_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
FLASH_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
FLASH_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
FLASH_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
FLASH_INLINE F load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
FLASH_INLINE void store_f16(uint16_t* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
FLASH_INLINE F load_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
FLASH_INLINE F load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}; }
FLASH_INLINE F load_u8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}; }
FLASH_INLINE I izero() { return {_mm512_setzero_si512()}; }
FLASH_INLINE I iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
FLASH_INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
FLASH_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
FLASH_INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
FLASH_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
FLASH_INLINE I magnitude(F a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))}; }  // bits of |a|: NaN above all
FLASH_INLINE I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
FLASH_INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
FLASH_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
template <int N> FLASH_INLINE I shifted_up(I a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> FLASH_INLINE I shifted_down(I a) { return {_mm512_srai_epi32(a.v, N)}; }  // towards minus infinity
FLASH_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
FLASH_INLINE void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
FLASH_INLINE I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
FLASH_INLINE F pow2(F n) {  // 2^(n - kWhole), see exp
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(n.v), _mm512_set1_epi32(127)), 23))};
}
FLASH_INLINE F first_or(F a, int64_t n, F other) {  // the first n lanes of a, then those of other
  return {_mm512_mask_mov_ps(other.v, n >= 16 ? 0xffff : n > 0 ? first(static_cast<int>(n)) : 0, a.v)};
}
FLASH_INLINE void halves(F a, __m256& lo, __m256& hi) {
  lo = _mm512_castps512_ps256(a.v);
  hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
// ---------------------------------------------------------------------------------------------------------- AVX2
struct F { __m256 a, b; };
struct I { __m256i a, b; };

FLASH_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FLASH_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FLASH_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FLASH_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
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
FLASH_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
FLASH_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
FLASH_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
FLASH_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
FLASH_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
FLASH_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
FLASH_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
FLASH_INLINE F abs(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
FLASH_INLINE F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
FLASH_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
FLASH_INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
FLASH_INLINE __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
FLASH_INLINE F load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
FLASH_INLINE F load_i8(const int8_t* p) {
  __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(w)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(w, 8)))};
}
FLASH_INLINE F load_u8(const uint8_t* p) {
  __m128i w = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(w)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(w, 8)))};
}
FLASH_INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
FLASH_INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FLASH_INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
FLASH_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
FLASH_INLINE void store_i8(int8_t* p, I x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);  // packs works by 128 bits
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
FLASH_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
FLASH_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
FLASH_INLINE I magnitude(F x) {
  const __m256i m = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), m), _mm256_and_si256(_mm256_castps_si256(x.b), m)};
}
FLASH_INLINE I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
FLASH_INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
FLASH_INLINE I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
template <int N> FLASH_INLINE I shifted_up(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> FLASH_INLINE I shifted_down(I x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
FLASH_INLINE I load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
FLASH_INLINE void store(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
FLASH_INLINE __m256 pow2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(n), _mm256_set1_epi32(127)), 23));
}
FLASH_INLINE F pow2(F n) { return {pow2_half(n.a), pow2_half(n.b)}; }
FLASH_INLINE F first_or(F x, int64_t n, F other) {
  const __m256i count = _mm256_set1_epi32(static_cast<int>(n < 0 ? 0 : n > 16 ? 16 : n));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lanes));
  const __m256 b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lanes, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(other.a, x.a, a), _mm256_blendv_ps(other.b, x.b, b)};
}
FLASH_INLINE void halves(F x, __m256& lo, __m256& hi) { lo = x.a; hi = x.b; }

#elif !defined(FLASH_NEON)
// ------------------------------------------------------------------------------------- plain C++
// Sixteen floats in an array; compilers turn the loops into whatever vectors there are.
struct F { float v[16]; };
struct I { int32_t v[16]; };
#define FLASH_EACH for (int i = 0; i < 16; ++i)

FLASH_INLINE F zero() { F r; FLASH_EACH r.v[i] = 0.0f; return r; }
FLASH_INLINE F set1(float x) { F r; FLASH_EACH r.v[i] = x; return r; }
FLASH_INLINE F load(const float* p) { F r; std::memcpy(r.v, p, sizeof r.v); return r; }
FLASH_INLINE void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
FLASH_INLINE F load(const float* p, int n) { F r = zero(); std::memcpy(r.v, p, sizeof(float) * static_cast<size_t>(n)); return r; }
FLASH_INLINE void store(float* p, F a, int n) { std::memcpy(p, a.v, sizeof(float) * static_cast<size_t>(n)); }
FLASH_INLINE F operator+(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
FLASH_INLINE F operator-(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
FLASH_INLINE F operator*(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
FLASH_INLINE F operator/(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
FLASH_INLINE F fma(F a, F b, F c) { F r; FLASH_EACH r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return r; }
FLASH_INLINE F max(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
FLASH_INLINE F min(F a, F b) { F r; FLASH_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
FLASH_INLINE F abs(F a) { F r; FLASH_EACH r.v[i] = std::fabs(a.v[i]); return r; }
FLASH_INLINE F round(F a) { F r; FLASH_EACH r.v[i] = std::nearbyint(a.v[i]); return r; }
FLASH_INLINE float from_bits(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
FLASH_INLINE uint32_t to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
FLASH_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {
    float f = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -f : f;
  }
  return from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}
FLASH_INLINE uint16_t float_to_half(float f) {  // to nearest, ties to even
  uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (u >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (u < 0x38800000) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(from_bits(u) * 0x1p24f)));
  u += 0xfff + ((u >> 13) & 1);
  return static_cast<uint16_t>(sign | ((u - 0x38000000) >> 13));
}
FLASH_INLINE F load_f16(const uint16_t* p) { F r; FLASH_EACH r.v[i] = half_to_float(p[i]); return r; }
FLASH_INLINE void store_f16(uint16_t* p, F a) { FLASH_EACH p[i] = float_to_half(a.v[i]); }
FLASH_INLINE F load_bf16(const uint16_t* p) { F r; FLASH_EACH r.v[i] = from_bits(static_cast<uint32_t>(p[i]) << 16); return r; }
FLASH_INLINE F load_i8(const int8_t* p) { F r; FLASH_EACH r.v[i] = p[i]; return r; }
FLASH_INLINE F load_u8(const uint8_t* p) { F r; FLASH_EACH r.v[i] = p[i]; return r; }
FLASH_INLINE I izero() { I r; FLASH_EACH r.v[i] = 0; return r; }
FLASH_INLINE I iset1(int32_t x) { I r; FLASH_EACH r.v[i] = x; return r; }
FLASH_INLINE I operator+(I a, I b) { I r; FLASH_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
FLASH_INLINE I to_int(F a) {  // what is no int32 becomes its least, as x86 has it
  I r;
  FLASH_EACH r.v[i] = a.v[i] >= -0x1p31f && a.v[i] < 0x1p31f ? static_cast<int32_t>(std::nearbyint(a.v[i])) : INT32_MIN;
  return r;
}
FLASH_INLINE void store_i8(int8_t* p, I a) { FLASH_EACH p[i] = static_cast<int8_t>(a.v[i]); }
FLASH_INLINE F to_float(I a) { F r; FLASH_EACH r.v[i] = static_cast<float>(a.v[i]); return r; }
FLASH_INLINE F as_float(I a) { F r; std::memcpy(r.v, a.v, sizeof r.v); return r; }
FLASH_INLINE I magnitude(F a) { I r; FLASH_EACH r.v[i] = static_cast<int32_t>(to_bits(a.v[i]) & 0x7fffffff); return r; }
FLASH_INLINE I max(I a, I b) { I r; FLASH_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
FLASH_INLINE I operator-(I a, I b) { I r; FLASH_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
FLASH_INLINE I as_int(F a) { I r; std::memcpy(r.v, a.v, sizeof r.v); return r; }
template <int N> FLASH_INLINE I shifted_up(I a) { I r; FLASH_EACH r.v[i] = a.v[i] * (1 << N); return r; }
template <int N> FLASH_INLINE I shifted_down(I a) { I r; FLASH_EACH r.v[i] = a.v[i] >> N; return r; }
FLASH_INLINE I load(const int32_t* p) { I r; std::memcpy(r.v, p, sizeof r.v); return r; }
FLASH_INLINE void store(int32_t* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
FLASH_INLINE F pow2(F n) { F r; FLASH_EACH r.v[i] = from_bits((to_bits(n.v[i]) + 127) << 23); return r; }
FLASH_INLINE F first_or(F a, int64_t n, F other) { F r; FLASH_EACH r.v[i] = i < n ? a.v[i] : other.v[i]; return r; }
#endif

// -------------------------------------------------------------------------- bytes and dot products of four of them
// Bytes: 64 unsigned weights, four consecutive inputs of each of sixteen outputs. dot() multiplies them with four
// signed activations, the same for every output, and adds the four products to the output's sum.
//
// Partial holds such sums over units of 4 STEPS inputs, of one term of the activations or, after next_term, of two: what is
// there counts 128 times as much. AVX-512 adds straight to 32 bits. AVX2 adds pairs to 16
// bits, as many as cannot overflow for weights of so many bits, and widens then.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
struct Bytes { __m512i v; };
FLASH_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
FLASH_INLINE void store_bytes(uint8_t* p, Bytes b) { _mm512_storeu_si512(p, b.v); }
FLASH_INLINE Bytes masked(Bytes b, int m) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(static_cast<char>(m)))}; }
template <int N> FLASH_INLINE Bytes up(Bytes b) { return {_mm512_slli_epi16(b.v, N)}; }
template <int N> FLASH_INLINE Bytes down(Bytes b) { return {_mm512_srli_epi16(b.v, N)}; }
FLASH_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int BITS, int STEPS> struct Partial {
  I total{izero()};
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) { total.v = _mm512_dpbusd_epi32(total.v, w.v, _mm512_set1_epi32(x)); }
  FLASH_INLINE void next_term() { total = shifted_up<7>(total); }
  FLASH_INLINE I done() const { return total; }
};
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
struct Bytes { __m256i a, b; };
FLASH_INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
FLASH_INLINE void store_bytes(uint8_t* p, Bytes w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), w.b);
}
FLASH_INLINE Bytes masked(Bytes w, int m) {
  const __m256i k = _mm256_set1_epi8(static_cast<char>(m));
  return {_mm256_and_si256(w.a, k), _mm256_and_si256(w.b, k)};
}
template <int N> FLASH_INLINE Bytes up(Bytes w) { return {_mm256_slli_epi16(w.a, N), _mm256_slli_epi16(w.b, N)}; }
template <int N> FLASH_INLINE Bytes down(Bytes w) { return {_mm256_srli_epi16(w.a, N), _mm256_srli_epi16(w.b, N)}; }
FLASH_INLINE Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int BITS, int STEPS> struct Partial {
  static constexpr int kFit = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;  // steps * 2 * (2^BITS - 1) * 127 stays below 2^15
  static constexpr int kSteps = kFit < STEPS ? kFit : STEPS;
  I total{izero()};
  __m256i a{_mm256_setzero_si256()}, b{_mm256_setzero_si256()};
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, v));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, v));
    // GCC 12 reassociates this chain and spills; an empty statement keeps the sums where they are.
    asm("" : "+x"(a), "+x"(b));
    if (STEP % kSteps == kSteps - 1) widen();
  }
  FLASH_INLINE void widen() {
    const __m256i ones = _mm256_set1_epi16(1);
    total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(a, ones));
    total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(b, ones));
    a = b = _mm256_setzero_si256();
  }
  FLASH_INLINE void next_term() { total = shifted_up<7>(total); }
  FLASH_INLINE I done() const { return total; }
};
template <int STEPS> struct Partial<8, STEPS> {  // |w| as unsigned, the sign moved to x: products of at most 128 * 127
  I total{izero()};
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i wa = _mm256_xor_si256(w.a, half), wb = _mm256_xor_si256(w.b, half);
    // sum of 128 x, so that the result is that of the unsigned weights
    const __m256i rest = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(64), v), _mm256_set1_epi16(2));
    total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(v, wa)), ones));
    total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(v, wb)), ones));
    total.a = _mm256_add_epi32(total.a, rest);
    total.b = _mm256_add_epi32(total.b, rest);
  }
  FLASH_INLINE void next_term() { total = shifted_up<7>(total); }
  FLASH_INLINE I done() const { return total; }
};
#elif !defined(FLASH_NEON)
struct Bytes { uint8_t v[64]; };
FLASH_INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 64); return r; }
FLASH_INLINE void store_bytes(uint8_t* p, Bytes b) { std::memcpy(p, b.v, 64); }
FLASH_INLINE Bytes masked(Bytes b, int m) { for (auto& x : b.v) x = static_cast<uint8_t>(x & m); return b; }
template <int N> FLASH_INLINE Bytes up(Bytes b) { for (auto& x : b.v) x = static_cast<uint8_t>(x << N); return b; }
template <int N> FLASH_INLINE Bytes down(Bytes b) { for (auto& x : b.v) x = static_cast<uint8_t>(x >> N); return b; }
FLASH_INLINE Bytes operator|(Bytes a, Bytes b) { for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] | b.v[i]); return a; }
template <int BITS, int STEPS> struct Partial {
  I total{izero()};
  template <int STEP> FLASH_INLINE void dot(Bytes w, int32_t x) {
    int8_t s[4];
    std::memcpy(s, &x, 4);
    FLASH_EACH total.v[i] += w.v[4 * i] * s[0] + w.v[4 * i + 1] * s[1] + w.v[4 * i + 2] * s[2] + w.v[4 * i + 3] * s[3];
  }
  FLASH_INLINE void next_term() { total = shifted_up<7>(total); }
  FLASH_INLINE I done() const { return total; }
};
#endif

// ----------------------------------------------------------------------------------------------- for all of them
FLASH_INLINE void store_i8(int8_t* p, F a) { store_i8(p, to_int(a)); }
// Sum and maximum of sixteen lanes in one fixed order: lane i with i + 8, then + 4, + 2, + 1.
#if defined(__AVX2__)
FLASH_INLINE float sum(F x) {
  __m256 lo, hi;
  halves(x, lo, hi);
  lo = _mm256_add_ps(lo, hi);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(lo), _mm256_extractf128_ps(lo, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
FLASH_INLINE float top(F x) {
  __m256 lo, hi;
  halves(x, lo, hi);
  lo = _mm256_max_ps(lo, hi);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(lo), _mm256_extractf128_ps(lo, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#elif !defined(FLASH_NEON)
FLASH_INLINE float sum(F x) {
  float t[16];
  store(t, x);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
  return t[0];
}
FLASH_INLINE float top(F x) {
  float t[16];
  store(t, x);
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}
#endif
// Lane i: maximum, or sum, of the sixteen lanes of rows[i]; whole numbers, so that the order does not matter.
#if defined(__AVX512F__)
template <class Op>
FLASH_INLINE I each_lane(const I* rows, Op op) {
  __m512i a[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)  // halves: [ of 2i | of 2i + 1 ]
    a[i] = op(_mm512_shuffle_i32x4(rows[2 * i].v, rows[2 * i + 1].v, 0x44), _mm512_shuffle_i32x4(rows[2 * i].v, rows[2 * i + 1].v, 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // quarters of four rows
    a[i] = op(_mm512_shuffle_i32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_i32x4(a[2 * i], a[2 * i + 1], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)  // in quarter q: pairs of rows 8 i + q, 8 i + 4 + q
    a[i] = op(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  const __m512 x = _mm512_castsi512_ps(a[0]), y = _mm512_castsi512_ps(a[1]);
  const __m512i all = op(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  // lane 4 q + j holds row 4 j + q
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_epi32(order, all)};
}
FLASH_INLINE I tops(const I* rows) { return each_lane(rows, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }); }
FLASH_INLINE I sums(const I* rows) { return each_lane(rows, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }); }
#else
template <class Op>
FLASH_INLINE I each_lane(const I* rows, Op op) {
  int32_t out[16];
  for (int i = 0; i < 16; ++i) {
    int32_t t[16];
    store(t, rows[i]);
    for (int w = 8; w; w /= 2)
      for (int j = 0; j < w; ++j) t[j] = op(t[j], t[j + w]);
    out[i] = t[0];
  }
  return load(out);
}
FLASH_INLINE I tops(const I* rows) { return each_lane(rows, [](int32_t a, int32_t b) { return a > b ? a : b; }); }
FLASH_INLINE I sums(const I* rows) { return each_lane(rows, [](int32_t a, int32_t b) { return a + b; }); }
#endif
// bfloat16, to nearest, ties to even.
FLASH_INLINE void store_bf16(uint16_t* p, F x) {
  float t[16];
  store(t, x);
  for (int i = 0; i < 16; ++i) {
    uint32_t u;
    std::memcpy(&u, t + i, 4);
    p[i] = static_cast<uint16_t>(t[i] != t[i] ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
}
// e^x for x <= 88; below -87 it stays at e^-87 (weights that small vanish in every sum), NaN stays NaN. Error below 2 units
// in the last place: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2] (Cody & Waite 1980 for the reduction). Adding
// kWhole rounds to a whole number and leaves it in the low bits.
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23
FLASH_INLINE F exp(F x) {
  x = max(set1(-87.0f), x);
  const F whole = fma(x, set1(1.44269504088896341f), set1(kWhole));
  const F n = whole - set1(kWhole);
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.3981999507e-3f);
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p * r, r, r) + set1(1.0f);
  return p * pow2(whole);
}
}  // namespace FLASH_ISA
}  // namespace flash
