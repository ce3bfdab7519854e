// What this processor can do at most, for tests/benchmarks: reading memory, and the instruction mix of the int4 product
// in registers. Compiled for the machine it runs on.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

// Threads that meet before and after every pass by looking, so that starting and waking them is in no figure.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int looks = 0; round_.load(std::memory_order_acquire) == round; ++looks)
      if (looks > 100000) std::this_thread::yield();  // fewer processors than threads
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0}, round_{0};
};

// Runs f(thread, pass) on so many threads at once; seconds[pass] is how long the slowest took.
template <class F>
void timed(int threads, int passes, double* seconds, F f) {
  Meeting meeting(threads);
  auto work = [&](int t) {
    for (int p = 0; p < passes; ++p) {
      meeting.wait();
      const auto begin = std::chrono::steady_clock::now();
      f(t, p);
      meeting.wait();
      if (t == 0) seconds[p] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& o : others) o.join();
}

// A cache line as one value: the compiler makes the widest loads there are of it.
typedef uint64_t Line __attribute__((vector_size(64)));

// One pass over `lines` cache lines, a multiple of 8; eight sums, since each waits for itself only.
template <int AHEAD>
uint64_t read_lines(const Line* p, int64_t lines) {
  Line sum[8] = {};
  for (int64_t i = 0; i < lines; i += 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      if (AHEAD) __builtin_prefetch(p + i + j + AHEAD);
      sum[j] ^= p[i + j];
    }
  }
  Line all = sum[0];
  for (int j = 1; j < 8; ++j) all ^= sum[j];
  return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

}  // namespace

// Seconds of each pass of reading `bytes` from `data` (64-byte aligned) once, each thread its own part. Pass p begins
// at data + p % copies * bytes. ahead: prefetch 1.3 KB ahead, or leave that to the processor. Returns the bytes read.
API int64_t roof_read(const uint8_t* data, int64_t bytes, int copies, int threads, int ahead, int passes, double* seconds,
                      uint64_t* sum) {
  const int64_t lines = bytes / threads / 512 * 8;
  std::atomic<uint64_t> all{0};
  timed(threads, passes, seconds, [&](int t, int p) {
    const auto* from = reinterpret_cast<const Line*>(data + p % copies * bytes / 64 * 64) + t * lines;
    all ^= ahead ? read_lines<21>(from, lines) : read_lines<0>(from, lines);
  });
  *sum = all;
  return lines * 64 * threads;
}

// Seconds of each pass of `rounds` groups of the product's inner loop, all in registers and the first-level cache. A
// round is 12 rows by 16 outputs by 32 inputs: eight byte products a row, conversion to float, two scales and a moment.
// False where the mix is not written down.
API bool roof_mix(int64_t rounds, int threads, int passes, double* seconds, float* out) {
#if defined(__AVX512VNNI__)
  timed(threads, passes, seconds, [&](int t, int) {
    alignas(64) int32_t x[96];
    alignas(64) float f[24];
    for (int i = 0; i < 96; ++i) x[i] = 0x01020304 * (i % 7);
    for (float& v : f) v = 1.0f;
    __m512 y[12];
    for (auto& v : y) v = _mm512_setzero_ps();
    const __m512i w = _mm512_set1_epi8(static_cast<char>(t + 3));
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
      asm volatile("" : : "r"(x), "r"(f) : "memory");  // activations are loaded again every round
    }
    __m512 all = y[0];
    for (int r = 1; r < 12; ++r) all = _mm512_add_ps(all, y[r]);
    out[t] = _mm512_reduce_add_ps(all);
  });
  return true;
#elif defined(__AVX2__)
  timed(threads, passes, seconds, [&](int t, int) {
    alignas(32) int32_t x[16];
    alignas(32) float f[4];
    for (int i = 0; i < 16; ++i) x[i] = 0x01020304 * (i % 7);
    for (float& v : f) v = 1.0f;
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
        y[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(f[2 + r / 2]), y[r]);
      }
      asm volatile("" : : "r"(x), "r"(f) : "memory");
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(y[0], y[1]), _mm256_add_ps(y[2], y[3])));
    out[t] = lanes[0];
  });
  return true;
#else
  (void)rounds, (void)threads, (void)passes, (void)seconds, (void)out;
  return false;
#endif
}
