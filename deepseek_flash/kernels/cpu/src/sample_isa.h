// One token from one row of logits: penalties, biases, forbidden ids, temperature, top-k, top-p, min-p, draw
// (docs/sampling.md has the formulas). Nothing is sorted. With z = (x - largest) / temperature, every id has
//
//     weight   e^z - e^-87: 1 for the likeliest, 0 where e^z is less
//     key      the bits of |z|: ascending keys are descending likelihood, equal keys equal likelihood
//
// and what top-k and top-p keep is found digit by digit of the keys, as in a radix sort that only follows the digit in
// which the border lies. Three passes at most, the later ones over few ids:
//
//     key   | 30 … 20 | 19 … 9 | 8 … 0 |
#pragma once
#include <initializer_list>

#include "ops.h"
#include "pointwise_isa.h"
#include "simd.h"

namespace flash {
namespace FLASH_ISA {

constexpr float kVanishing = -87.0f;
constexpr uint32_t kOut = 0x7fffffff;  // key of an id that is out
constexpr float kLowestTemperature = 1e-30f;

// The row after penalties, biases and forbidden ids: x, or the logits themselves when nothing changes them.
inline const float* shaped(const float* logits, int64_t n, const flash_choice& c, float* x) {
  if (!c.seen_count && !c.used_count && !c.bias_count && !c.forbidden_count && !c.allowed) return logits;
  std::memcpy(x, logits, static_cast<size_t>(n) * sizeof(float));
  const float repetition = static_cast<float>(c.repetition);
  for (int64_t i = 0; i < c.seen_count; ++i) {
    float& v = x[c.seen[i]];
    v = v < 0.0f ? v * repetition : v / repetition;
  }
  for (int64_t i = 0; i < c.used_count; ++i) x[c.used[i]] -= static_cast<float>(c.times[i] * c.frequency + c.presence);
  for (int64_t i = 0; i < c.bias_count; ++i) x[c.bias_ids[i]] += c.bias[i];
  for (int64_t i = 0; i < c.forbidden_count; ++i) x[c.forbidden[i]] = -__builtin_inff();
  if (c.allowed)
    for (int64_t i = 0; i < n; ++i) x[i] = c.allowed[i / 32] >> (i % 32) & 1 ? x[i] : -__builtin_inff();
  return x;
}

// Buffers have room for whole registers; what lies behind n is not read again.
inline void weigh(const float* x, int64_t n, float most, float temperature, float* weight, uint32_t* key) {
  const F by = set1(temperature < kLowestTemperature ? kLowestTemperature : temperature);
  const F least = exp(set1(kVanishing));
  for (int64_t i = 0; i < n; i += 16) {
    const F z = ((n - i >= 16 ? load(x + i) : load(x + i, static_cast<int>(n - i))) - set1(most)) / by;
    store(weight + i, exp(z) - least);
    store(reinterpret_cast<int32_t*>(key + i), magnitude(z));
  }
}

// Sums of runs of weights; → of all.
inline double add_runs(const float* weight, int64_t n, double* runs) {
  double total = 0.0;
  for (int64_t first = 0, r = 0; first < n; first += kSampleRun, ++r) {
    const int64_t last = first + kSampleRun < n ? first + kSampleRun : n;
    F lanes = zero();
    for (int64_t i = first; i < last; i += 16)
      lanes = lanes + (last - i >= 16 ? load(weight + i) : load(weight + i, static_cast<int>(last - i)));
    runs[r] = sum(lanes);
    total += runs[r];
  }
  return total;
}

struct Border {
  uint32_t key;   // kept: smaller keys, and of those equal to it
  int64_t ties;   // the first so many
};

// The border at which the mass of kept ids, likeliest first, reaches `want`; mass(i): of one id, the same for equal keys.
template <class Mass>
inline Border border(const uint32_t* key, int64_t n, double want, const Mass& mass) {
  constexpr int kBins = 2048;
  double bins[kBins], before = 0.0;
  uint32_t prefix = 0;
  int above = 31;  // bits of the prefix start here
  for (const int width : {11, 11, 9}) {
    const int shift = above - width;
    const uint32_t digits = (1u << width) - 1;
    std::memset(bins, 0, sizeof bins);
    if (above == 31)
      for (int64_t i = 0; i < n; ++i) bins[key[i] >> shift] += mass(i);
    else
      for (int64_t i = 0; i < n; ++i)
        if (key[i] >> above == prefix) bins[key[i] >> shift & digits] += mass(i);
    uint32_t digit = 0;
    while (digit <= digits && before + bins[digit] < want) before += bins[digit++];
    if (digit > digits) return {kOut, n};  // rounding: all of it is not quite enough
    prefix = prefix << width | digit;
    above = shift;
  }
  int64_t ties = 0;
  for (int64_t i = 0; i < n && before < want; ++i)
    if (key[i] == prefix) {
      before += mass(i);
      ++ties;
    }
  return {prefix, ties};
}

// What lies beyond the border goes out; all that equals it stays, or the first ties.
inline void keep(const Border& b, bool all_ties, int64_t n, float* weight, uint32_t* key) {
  for (int64_t i = 0; i < n; ++i) {
    const bool in = key[i] <= b.key;
    weight[i] = in ? weight[i] : 0.0f;
    key[i] = in ? key[i] : kOut;
  }
  if (all_ties) return;
  for (int64_t i = 0, ties = 0; i < n; ++i)
    if (key[i] == b.key && ++ties > b.ties) weight[i] = 0.0f;
}

// The id at which the summed weights, in the order of ids, pass the share u of their total.
inline int64_t draw(const float* weight, int64_t n, double u, double* runs) {
  const double target = u * add_runs(weight, n, runs);
  double before = 0.0;
  int64_t last = -1;
  for (int64_t first = 0, r = 0; first < n; first += kSampleRun, ++r) {
    if (runs[r] == 0.0) continue;
    const int64_t end = first + kSampleRun < n ? first + kSampleRun : n;
    const bool here = before + runs[r] > target;
    double sum = before;
    for (int64_t i = first; i < end; ++i) {
      if (weight[i] == 0.0f) continue;
      last = i;
      if (!here) continue;
      sum += weight[i];
      if (sum > target) return i;
    }
    if (here) return last;  // the run's own sum was rounded up
    before += runs[r];
  }
  return last;
}

inline int64_t sample(const float* logits, int64_t n, const flash_choice& c, const SampleScratch& s) {
  const float* x = shaped(logits, n, c, s.x);
  int64_t best = -1;
  argmax(x, n, n, &best, 0, 1);
  if (best < 0 || c.temperature == 0.0f) return best;
  weigh(x, n, x[best], c.temperature, s.weight, s.key);
  if (c.top_k > 0 && c.top_k < n) {
    const Border b = border(s.key, n, static_cast<double>(c.top_k), [](int64_t) { return 1.0; });
    keep(b, true, n, s.weight, s.key);
  }
  if (c.top_p < 1.0) {
    const double want = c.top_p * add_runs(s.weight, n, s.runs);
    const Border b = border(s.key, n, want, [&](int64_t i) { return static_cast<double>(s.weight[i]); });
    keep(b, false, n, s.weight, s.key);
  }
  if (c.min_p > 0.0) {
    const float least = static_cast<float>(c.min_p);
    for (int64_t i = 0; i < n; ++i) s.weight[i] = s.weight[i] < least ? 0.0f : s.weight[i];
  }
  return draw(s.weight, n, c.u, s.runs);
}

}  // namespace FLASH_ISA
}  // namespace flash
