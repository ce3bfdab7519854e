// The primitives of simd.h on numbers that kernels meet rarely: NaN, infinities, both zeros, subnormal ones, ties, every
// fp16 and bf16, the largest products of bytes. Compiled for one instruction set; prints a digest for each primitive,
// to be compared with those of others. NaN counts as one value, whatever its sign and payload.
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "simd.h"

namespace {

using namespace flash::FLASH_ISA;
namespace set = flash::FLASH_ISA;

std::mt19937_64 rng(7);

struct Digest {
  explicit Digest(const char* n) : name(n) {}
  ~Digest() { std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash)); }
  void add(uint64_t word) { hash = (hash ^ word) * 0x100000001b3u; }
  void add(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    add(static_cast<uint64_t>(f != f ? 0x7fc00000u : u));
  }
  void add(F x) {
    float t[16];
    store(t, x);
    for (float f : t) add(f);
  }
  void add_halves(F x) {
    uint16_t t[16];
    store_f16(t, x);
    for (uint16_t h : t) add(static_cast<uint64_t>((h & 0x7fff) > 0x7c00 ? 0x7e00 : h));
  }
  const char* name;
  uint64_t hash = 0xcbf29ce484222325u;
};

float from(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Numbers that matter, then random bits, then random ordinary ones; whole vectors.
std::vector<float> numbers() {
  constexpr float inf = std::numeric_limits<float>::infinity(), none = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out;
  for (float f : {0.0f, 0.5f, 1.0f, 1.5f, 2.5f, 0.49999997f, 8388607.5f, 1e10f, 3.4e38f, 1e-40f, 1e-45f, 65504.0f, 65519.9f, 65520.0f,
                  6.1e-5f, 5.9604645e-8f, 2.9802322e-8f, 87.0f, 88.0f, 89.0f, inf, none})
    for (float sign : {1.0f, -1.0f}) out.push_back(sign * f);
  for (int i = 0; i < 1000; ++i) out.push_back(from(static_cast<uint32_t>(rng())));
  for (int i = 0; i < 1000; ++i) out.push_back(static_cast<float>(static_cast<int64_t>(rng() % 2000001) - 1000000) / 10007.0f);
  while (out.size() % 16) out.push_back(0.0f);
  return out;
}

// f(vector, vector) for every number beside every one of the first 48, and beside a random one.
template <class Do>
void pairs(const std::vector<float>& n, Do f) {
  for (size_t i = 0; i < n.size(); i += 16) {
    for (size_t j = 0; j < 48; ++j) f(load(&n[i]), set1(n[j]));
    float other[16];
    for (float& o : other) o = n[rng() % n.size()];
    f(load(&n[i]), load(other));
  }
}

void arithmetic(const std::vector<float>& n) {
  Digest add("add"), subtract("subtract"), multiply("multiply"), divide("divide"), fused("fma"), larger("max"), smaller("min");
  pairs(n, [&](F x, F y) {
    add.add(x + y);
    subtract.add(x - y);
    multiply.add(x * y);
    divide.add(x / y);
    fused.add(set::fma(x, y, x));
    fused.add(set::fma(x, x, zero() - y));
    larger.add(set::max(x, y));
    larger.add(set::max(y, x));
    smaller.add(set::min(x, y));
    smaller.add(set::min(y, x));
  });
}

void one_by_one(const std::vector<float>& n) {
  Digest absolute("abs"), rounded("round"), power("exp"), sums("sum"), tops("top"), halves("store_f16"), brains("store_bf16");
  const auto all = [&](F x) {
    absolute.add(set::abs(x));
    absolute.add(as_float(magnitude(x)));
    absolute.add(as_float(set::max(magnitude(x), as_int(set1(1.5f)))));
    rounded.add(set::round(x));
    power.add(set::exp(x));
    sums.add(sum(x));
    tops.add(top(x));
    halves.add_halves(x);
    uint16_t t[16];
    store_bf16(t, x);
    for (uint16_t b : t) brains.add(static_cast<uint64_t>(b));
  };
  for (size_t i = 0; i < n.size(); i += 16) all(load(&n[i]));
  for (size_t i = 0; i < 48; ++i) all(set1(n[i]));  // in every lane
}

void small_floats() {
  Digest wide("load_f16"), brain("load_bf16"), near("store_f16 near halves");
  for (uint32_t h = 0; h < 65536; h += 16) {
    uint16_t t[16];
    for (uint32_t i = 0; i < 16; ++i) t[i] = static_cast<uint16_t>(h + i);
    const F x = load_f16(t);
    wide.add(x);
    brain.add(load_bf16(t));
    for (float by : {1.0f, 1.0f + 0x1p-11f, 1.0f + 0x1p-12f, 1.0f - 0x1p-12f}) near.add_halves(x * set1(by));
    for (float by : {0x1p-25f, -0x1p-25f, 0x1p-26f}) near.add_halves(x + set1(by));
  }
}

void whole_numbers() {
  Digest bytes("bytes"), powers("pow2"), integers("integers");
  for (int first = -128; first < 128; first += 16) {
    int8_t s[16], back[16];
    uint8_t u[16];
    float f[16];
    for (int i = 0; i < 16; ++i) {
      s[i] = static_cast<int8_t>(first + i);
      u[i] = static_cast<uint8_t>(first + i + 128);
      f[i] = static_cast<float>(first + i < -126 ? -126 : first + i);
    }
    bytes.add(load_i8(s));
    bytes.add(load_u8(u));
    store_i8(back, load_i8(s));
    for (int8_t b : back) bytes.add(static_cast<uint64_t>(static_cast<uint8_t>(b)));
    store_i8(back, to_int(load_i8(s) * set1(0.5f)));
    for (int8_t b : back) bytes.add(static_cast<uint64_t>(static_cast<uint8_t>(b)));
    powers.add(pow2(load(f) + set1(kWhole)));
    integers.add(to_float(to_int(load(f) * set1(0.25f)) - iset1(first)));
    for (int n = -1; n <= 17; ++n) integers.add(first_or(load(f), n, set1(-7.0f)));
    for (int32_t scale : {1, 1000003, -16777217, 7}) integers.add(to_float(iset1(first * scale) + iset1(scale) + izero()));
  }
}

void parts(const std::vector<float>& n) {
  Digest some("parts"), lanes("each lane");
  for (int round = 0; round < 50; ++round) {
    I rows[16];
    for (I& row : rows) {
      int32_t t[16];
      for (int32_t& i : t) i = static_cast<int32_t>(rng() % 2000001) - 1000000;
      row = load(t);
    }
    lanes.add(to_float(tops(rows)));
    lanes.add(to_float(sums(rows)));
  }
  for (int count = 0; count <= 16; ++count) {
    some.add(load(&n[100], count));
    float t[16];
    store(t, set1(-3.0f));
    store(t, load(&n[200]), count);
    some.add(load(t));
  }
}

template <int BITS, int STEPS, int STEP>
void steps(Partial<BITS, STEPS>& p, const uint8_t* w, const int8_t* x) {
  if constexpr (STEP < STEPS) {
    int32_t four;
    std::memcpy(&four, x + 4 * STEP, 4);
    p.template dot<STEP>(load_bytes(w + 64 * STEP), four);
    steps<BITS, STEPS, STEP + 1>(p, w, x);
  }
}

// Up to eight units of products: random ones, the largest weights with the largest activations, alternating signs.
template <int BITS, int STEPS>
void products(Digest& d) {
  constexpr int kLargest = (1 << BITS) - 1;
  for (int round = 0; round < 40; ++round) {
    Partial<BITS, STEPS> p;
    for (int unit = 0; unit <= round % 8; ++unit) {
      uint8_t w[64 * STEPS];
      int8_t x[4 * STEPS];
      for (uint8_t& b : w) b = static_cast<uint8_t>(round < 8 ? kLargest : round < 16 ? (rng() % 2 ? 0 : kLargest) : rng() % (kLargest + 1));
      for (int8_t& b : x) b = static_cast<int8_t>(round % 3 == 0 ? 127 : round % 3 == 1 ? -127 : static_cast<int>(rng() % 255) - 127);
      steps<BITS, STEPS, 0>(p, w, x);
    }
    d.add(to_float(p.done()));
  }
}

void byte_vectors() {
  Digest packed("packed codes"), four("dot of 4 bits"), five("dot of 5 bits"), six("dot of 6 bits"), eight("dot of 8 bits");
  uint8_t in[64], out[64];
  const auto add = [&](Bytes b) {
    store_bytes(out, b);
    for (uint8_t o : out) packed.add(static_cast<uint64_t>(o));
  };
  for (int round = 0; round < 20; ++round) {
    for (uint8_t& b : in) b = static_cast<uint8_t>(rng());
    const Bytes b = load_bytes(in);
    add(b);
    add(masked(b, 0x0f) | masked(up<4>(b), 0x30));
    add(masked(down<4>(b), 0x0f) | masked(up<1>(b), 0x10));
    add(masked(up<2>(b), 0x30) | masked(down<2>(b), 0x0f));
    add(masked(up<3>(b), 0x10) | masked(down<1>(b), 0x20));
    add(masked(down<3>(b), 0x10));
  }
  products<4, 4>(four);
  products<4, 8>(four);
  products<5, 8>(five);
  products<6, 4>(six);
  products<6, 8>(six);
  products<8, 4>(eight);
  products<8, 8>(eight);
}

}  // namespace

int main() {
  const std::vector<float> n = numbers();
  arithmetic(n);
  one_by_one(n);
  small_floats();
  whole_numbers();
  parts(n);
  byte_vectors();
  return 0;
}
