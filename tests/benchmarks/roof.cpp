// What this processor can do at most, for tests/benchmarks/kernels.py: reading memory, and the instruction mix of the
// int4 product in registers. Compiled for the machine it runs on.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

// Runs f(thread) on so many threads and returns the seconds of the slowest.
template <class F>
double timed(int threads, F f) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(f, t);
  f(0);
  for (auto& o : others) o.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

// Seconds to read `bytes` (a multiple of 4096 a thread) once, sums kept so that nothing is left out.
API double roof_read(const uint8_t* data, int64_t bytes, int threads, int64_t* sum) {
  const int64_t each = bytes / threads / 4096 * 4096;
  std::vector<int64_t> sums(static_cast<size_t>(threads) * 8);
  const double seconds = timed(threads, [&](int t) {
    const auto* p = reinterpret_cast<const uint64_t*>(data + t * each);
    uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
    for (int64_t i = 0; i < each / 8; i += 64) {
      __builtin_prefetch(p + i + 256);
      for (int64_t j = i; j < i + 64; j += 8) {
        a += p[j], b += p[j + 1], c += p[j + 2], d += p[j + 3];
        e += p[j + 4], f += p[j + 5], g += p[j + 6], h += p[j + 7];
      }
    }
    sums[static_cast<size_t>(t) * 8] = static_cast<int64_t>(a + b + c + d + e + f + g + h);
  });
  for (int64_t s : sums) *sum += s;
  return seconds;
}

// Seconds for `rounds` groups of the product's inner loop, all in registers and the first-level cache; every round is
// 12 rows by 16 outputs by 32 inputs: eight byte products a row, conversion to float, two scales and a moment.
API double roof_mix(int64_t rounds, int threads, float* out) {
#if defined(__AVX512VNNI__)
  return timed(threads, [&](int t) {
    alignas(64) static thread_local int32_t x[96], scales[24];
    for (int i = 0; i < 96; ++i) x[i] = 0x01020304 * (i % 7);
    for (int i = 0; i < 24; ++i) scales[i] = 0x3f800000;
    const float* f = reinterpret_cast<const float*>(scales);
    __m512 y[12];
    for (auto& v : y) v = _mm512_setzero_ps();
    const __m512i w = _mm512_set1_epi8(t + 3);
    const __m512 d = _mm512_set1_ps(1e-3f), m = _mm512_set1_ps(-1e-3f);
    for (int64_t n = 0; n < rounds; ++n) {
      __m512i s[12];
#pragma GCC unroll 12
      for (int r = 0; r < 12; ++r) s[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q)
#pragma GCC unroll 12
        for (int r = 0; r < 12; ++r) s[r] = _mm512_dpbusd_epi32(s[r], w, _mm512_set1_epi32(x[8 * r + q]));
#pragma GCC unroll 12
      for (int r = 0; r < 12; ++r) {
        y[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), _mm512_mul_ps(d, _mm512_set1_ps(f[r])), y[r]);
        y[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(f[12 + r]), y[r]);
      }
      asm volatile("" ::: "memory");
    }
    __m512 all = y[0];
    for (int r = 1; r < 12; ++r) all = _mm512_add_ps(all, y[r]);
    out[t] = _mm512_reduce_add_ps(all);
  });
#elif defined(__AVX2__)
  return timed(threads, [&](int t) {
    alignas(32) static thread_local int32_t x[96], scales[24];
    for (int i = 0; i < 96; ++i) x[i] = 0x01020304 * (i % 7);
    for (int i = 0; i < 24; ++i) scales[i] = 0x3f800000;
    const float* f = reinterpret_cast<const float*>(scales);
    const __m256i w = _mm256_set1_epi8(static_cast<char>(t + 3)), ones = _mm256_set1_epi16(1);
    const __m256 d = _mm256_set1_ps(1e-3f), m = _mm256_set1_ps(-1e-3f);
    __m256 y[4];
    for (auto& v : y) v = _mm256_setzero_ps();
    for (int64_t n = 0; n < 6 * rounds; ++n) {  // two rows of two registers at a time
      __m256i s[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) s[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          s[r] = _mm256_add_epi16(s[r], _mm256_maddubs_epi16(w, _mm256_set1_epi32(x[8 * (r / 2) + q])));
          asm("" : "+x"(s[r]));
        }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(s[r], ones));
        y[r] = _mm256_fmadd_ps(sum, _mm256_mul_ps(d, _mm256_set1_ps(f[r / 2])), y[r]);
        y[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(f[12 + r / 2]), y[r]);
      }
      asm volatile("" ::: "memory");
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(y[0], y[1]), _mm256_add_ps(y[2], y[3])));
    out[t] = lanes[0];
  });
#else
  (void)rounds, (void)threads, (void)out;
  return -1.0;
#endif
}
