// Sampling: checks, scratch, rows over threads; the arithmetic is in sample_isa.h.
#include "ops.h"
#include "pool.h"

namespace flash {
namespace {

int64_t runs_of(int64_t n) { return (n + kSampleRun - 1) / kSampleRun; }

// Of one thread: the shaped row, weights, keys (a register more, so that the next thread's are aligned), sums of runs.
int64_t thread_bytes(int64_t n) { return ((n + 15) / 16 * 16) * 12 + (runs_of(n) + 7) / 8 * 64; }

bool inside(const int64_t* ids, int64_t count, int64_t n) {
  if (count < 0 || (count && !ids)) return false;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= n) return false;
  return true;
}

bool sound(const flash_choice& c, int64_t n) {
  return c.temperature >= 0.0f && c.top_k >= 0 && c.top_p > 0.0 && c.min_p >= 0.0 && c.u >= 0.0 && c.u < 1.0 &&
         inside(c.seen, c.seen_count, n) && inside(c.used, c.used_count, n) && (!c.used_count || c.times) &&
         inside(c.bias_ids, c.bias_count, n) && (!c.bias_count || c.bias) && inside(c.forbidden, c.forbidden_count, n);
}

}  // namespace
}  // namespace flash

using namespace flash;

FLASH_API int64_t flash_sample_scratch(int64_t n, int32_t threads) {
  return n < 1 || threads < 1 ? int64_t{FLASH_E_ARGUMENT} : thread_bytes(n) * threads;
}

FLASH_API int32_t flash_sample(void* pool, const float* logits, int64_t ld, int64_t rows, int64_t n,
                               const flash_choice* choices, void* scratch, int64_t* ids) {
  if (rows < 0 || n < 1 || ld < n || (rows && (!logits || !choices || !scratch || !ids))) return FLASH_E_ARGUMENT;
  for (int64_t r = 0; r < rows; ++r)
    if (!sound(choices[r], n)) return FLASH_E_ARGUMENT;
  parallel_for(static_cast<Pool*>(pool), rows, 1, [&](int32_t thread, int64_t begin, int64_t end) {
    char* at = static_cast<char*>(scratch) + thread * thread_bytes(n);
    const int64_t padded = (n + 15) / 16 * 16;
    SampleScratch s;
    s.runs = reinterpret_cast<double*>(at);
    at += (runs_of(n) + 7) / 8 * 64;
    s.x = reinterpret_cast<float*>(at);
    s.weight = s.x + padded;
    s.key = reinterpret_cast<uint32_t*>(s.weight + padded);
    for (int64_t r = begin; r < end; ++r) ids[r] = ops().sample(logits + r * ld, n, choices[r], s);
  });
  return FLASH_OK;
}
