// Runs the kernels on random shapes in buffers of exactly their size, on every instruction set, and compares the bits
// with those of plain C++. Built with sanitizers: a byte read or written outside, or an undefined operation, ends it.
//
//     check SEED CASES        prints what it ran and a digest; exit status 1 and the case when results differ
//
// The digest is of all results, and the same on every machine: random numbers are made of integers here, because the
// distributions and std::shuffle of the standard library differ, and so does log between libraries of mathematics.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "flash.h"

namespace {

std::mt19937_64 rng;

int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1)); }

uint64_t digest = 0xcbf29ce484222325u;

uint64_t fnv1a(uint64_t hash, const void* data, int64_t size) {
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
  return hash;
}

template <class T>
struct Exact {  // its own allocation, so that the sanitizer sees the first byte outside
  explicit Exact(int64_t n) : size(n), data(new T[static_cast<size_t>(n > 0 ? n : 1)]()) {}
  int64_t size;
  std::unique_ptr<T[]> data;
  T* get() { return data.get(); }
};

// Nearly normal: sums of four even ones.
Exact<float> floats(int64_t n, float scale = 1.0f) {
  constexpr float kDeviation = 37837.0f;  // 2 * 65536 / sqrt(12)
  Exact<float> out(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t r = rng();
    const auto four = static_cast<int64_t>((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48));
    out.data[static_cast<size_t>(i)] = static_cast<float>(four - 131070) / kDeviation * scale;
  }
  return out;
}

uint16_t half(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u >> 16 & 0x8000) | (((u >> 23 & 255) - 112) << 10) | (u >> 13 & 1023));
}

Exact<uint16_t> halves(int64_t n) {
  Exact<uint16_t> out(n);
  for (int64_t i = 0; i < n; ++i) out.data[static_cast<size_t>(i)] = half(0.01f + 0.001f * static_cast<float>(between(0, 90)));
  return out;
}

std::vector<std::string> sets() {
  std::vector<std::string> out;
  std::string all = flash_isas();
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find(',', at), all.size());
    out.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

std::string what;

// Runs f(output) on every instruction set with 1 and 3 threads; all outputs must have the same bits.
template <class F>
bool same_everywhere(int64_t outputs, F f) {
  std::vector<float> want;
  for (const std::string& isa : sets()) {
    for (int threads : {1, 3}) {
      flash_use_isa(isa.c_str());
      void* pool = flash_pool_create(threads);
      Exact<float> out(outputs);
      const int32_t status = f(pool, threads, out.get());
      flash_pool_destroy(pool);
      if (status) {
        std::printf("%s: refused on %s\n", what.c_str(), isa.c_str());
        return false;
      }
      if (want.empty()) want.assign(out.get(), out.get() + outputs);
      if (outputs && std::memcmp(want.data(), out.get(), static_cast<size_t>(outputs) * 4)) {
        std::printf("%s: %s with %d threads differs\n", what.c_str(), isa.c_str(), threads);
        return false;
      }
    }
  }
  digest = fnv1a(digest, want.data(), outputs * 4);
  return true;
}

bool linear() {
  flash_linear w{};
  w.kind = between(0, 3) ? 0 : static_cast<int32_t>(between(1, 3));
  w.n = between(1, 70);
  w.k = between(1, 400);
  if (!w.kind) {
    const int32_t bits[] = {4, 5, 6, 8}, groups[] = {16, 32, 64, 128};
    w.bits = bits[between(0, 3)];
    w.group = groups[between(w.bits == 5 ? 1 : 0, 3)];
    w.super = static_cast<int32_t>(between(0, 1));
    w.offset = static_cast<int32_t>(between(0, w.super ? 1 : 2));
    w.zero = 1 << (w.bits - 1);
    w.fine = static_cast<int32_t>(between(0, 2) == 0);
  }
  const int64_t unit = w.kind ? 1 : w.super ? 256 : w.group, kp = (w.k + unit - 1) / unit * unit;
  const int64_t groups = w.kind ? 1 : kp / w.group, scales = w.kind ? 1 : w.super ? kp / 256 : groups;
  const int64_t item = w.kind == 0 ? 1 : w.kind == 1 ? 4 : 2, rows = between(1, 20);
  what = "linear kind " + std::to_string(w.kind) + " bits " + std::to_string(w.bits) + " group " + std::to_string(w.group) + " offset " +
         std::to_string(w.offset) + " super " + std::to_string(w.super) + " " + std::to_string(w.n) + "x" + std::to_string(w.k);
  Exact<uint8_t> codes(w.n * kp * item);
  if (w.kind == 0) {
    for (int64_t i = 0; i < codes.size; ++i) codes.data[static_cast<size_t>(i)] = static_cast<uint8_t>(between(0, (1 << w.bits) - 1));
  } else if (w.kind == 1) {
    Exact<float> v = floats(w.n * kp, 0.1f);
    std::memcpy(codes.get(), v.get(), static_cast<size_t>(codes.size));
  } else {
    Exact<uint16_t> v = halves(w.n * kp);
    std::memcpy(codes.get(), v.get(), static_cast<size_t>(codes.size));
  }
  Exact<uint16_t> scale = halves(w.n * scales), least = halves(w.n * scales);
  Exact<uint8_t> zeros(w.n * groups);
  Exact<int8_t> sub(w.n * groups), sub_min(w.n * groups);
  for (int64_t i = 0; i < w.n * groups; ++i) {
    zeros.data[static_cast<size_t>(i)] = static_cast<uint8_t>(between(0, 15));
    sub.data[static_cast<size_t>(i)] = static_cast<int8_t>(between(-60, 63));
    sub_min.data[static_cast<size_t>(i)] = static_cast<int8_t>(between(0, 63));
  }
  const int64_t bytes = flash_linear_bytes(&w);
  Exact<uint8_t> data(bytes + 64);  // the interface asks for 64 readable bytes behind
  if (flash_linear_pack(&w, 0, w.n, codes.get(), scale.get(), least.get(), zeros.get(), sub.get(), sub_min.get(), data.get())) {
    std::printf("%s: not packed\n", what.c_str());
    return false;
  }
  w.data = data.get();
  Exact<float> bias = floats(w.n), x = floats(rows * w.k);
  w.bias = between(0, 1) ? bias.get() : nullptr;
  flash_linear second = w;
  if (between(0, 3) == 0) w.next = &second;
  const int64_t n = w.n + (w.next ? w.n : 0);
  if (!same_everywhere(rows * n, [&](void* pool, int threads, float* y) {
        Exact<uint8_t> scratch(flash_linear_scratch(&w, rows, threads));
        return flash_linear_run(pool, &w, x.get(), w.k, rows, y, n, scratch.get());
      }))
    return false;
  what += " rows";
  Exact<int64_t> ids(5);
  for (int i = 0; i < 5; ++i) ids.data[static_cast<size_t>(i)] = between(0, n - 1);
  return same_everywhere(5 * w.k, [&](void*, int, float* y) { return flash_linear_rows(&w, ids.get(), 5, y); });
}

bool attention() {
  flash_cache c{};
  c.dtype = static_cast<int32_t>(between(0, 3));
  c.kv_heads = static_cast<int32_t>(between(1, 3));
  c.dim = 2 * static_cast<int32_t>(between(1, 50));
  const bool turned = between(0, 1);
  c.block_size = turned ? 16 * static_cast<int32_t>(between(1, 3)) : static_cast<int32_t>(between(1, 40));
  c.kv_group = c.dtype == FLASH_I8 ? (c.dim % 16 ? c.dim : 16) : 0;
  const int32_t heads = c.kv_heads * static_cast<int32_t>(between(0, 9) ? between(1, 12) : between(90, 130));
  const int64_t item = c.dtype == FLASH_F32 ? 4 : c.dtype == FLASH_I8 ? 1 : 2;
  const int64_t sequences = between(1, 5), stride = 400 / c.block_size + 1, blocks = sequences * stride;
  what = "attention type " + std::to_string(c.dtype) + " heads " + std::to_string(heads) + "/" + std::to_string(c.kv_heads) + " dim " +
         std::to_string(c.dim) + " block " + std::to_string(c.block_size) + (turned ? " turned" : "");
  const int64_t groups = c.kv_group ? c.dim / c.kv_group : 0, block_values = int64_t{c.block_size} * c.kv_heads;
  const int64_t block_bytes = block_values * c.dim * item, scale_bytes = block_values * groups * 2;
  const auto at = [&](int64_t items, bool keys) {
    const int64_t slots = c.block_size;
    if (!turned) return flash_strides{block_values * items, c.kv_heads * items, items, 1};
    return keys ? flash_strides{block_values * items, 1, items * slots, slots} : flash_strides{block_values * items, items, items * slots, 1};
  };
  c.k_at = at(c.dim, true);
  c.v_at = at(c.dim, false);
  c.k_scale_at = at(groups, true);
  c.v_scale_at = at(groups, false);
  std::vector<int32_t> cu{0}, context;
  std::vector<int64_t> table(static_cast<size_t>(blocks)), slots;
  for (int64_t i = 0; i < blocks; ++i) table[static_cast<size_t>(i)] = i;
  for (int64_t i = blocks - 1; i > 0; --i) std::swap(table[static_cast<size_t>(i)], table[static_cast<size_t>(between(0, i))]);
  const int64_t shared = sequences > 1 && between(0, 1) ? between(0, 300) : 0;  // keys; nobody writes there
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t n = between(0, 2) ? between(1, 3) : between(1, 40), all = n + shared + between(0, 340 - shared);
    if (s) std::copy_n(table.begin(), shared / c.block_size, table.begin() + s * stride);
    cu.push_back(cu.back() + static_cast<int32_t>(n));
    context.push_back(static_cast<int32_t>(all));
    for (int64_t i = all - n; i < all; ++i)
      slots.push_back(table[static_cast<size_t>(s * stride + i / c.block_size)] * c.block_size + i % c.block_size);
  }
  const int64_t tokens = cu.back(), width = (heads + 2 * c.kv_heads) * c.dim;
  Exact<uint8_t> k(blocks * block_bytes), v(blocks * block_bytes), ks(blocks * scale_bytes), vs(blocks * scale_bytes);
  for (auto* part : {&k, &v}) {  // small numbers in every type
    for (int64_t i = 0; i + item <= part->size; i += item) {
      const float f = 0.25f + 0.01f * static_cast<float>(between(0, 70));
      uint32_t u;
      std::memcpy(&u, &f, 4);
      const uint16_t h = c.dtype == FLASH_BF16 ? static_cast<uint16_t>(u >> 16) : half(f);
      const int8_t q = static_cast<int8_t>(between(-127, 127));
      std::memcpy(part->get() + i, c.dtype == FLASH_F32 ? static_cast<const void*>(&f) : c.dtype == FLASH_I8 ? static_cast<const void*>(&q) : &h,
                  static_cast<size_t>(item));
    }
  }
  for (auto* part : {&ks, &vs})
    for (int64_t i = 0; i + 2 <= part->size; i += 2) {
      const uint16_t h = half(0.01f);
      std::memcpy(part->get() + i, &h, 2);
    }
  c.k = k.get();
  c.v = v.get();
  if (c.kv_group) {
    c.k_scale = ks.get();
    c.v_scale = vs.get();
  }
  flash_step step{};
  step.tokens = tokens;
  step.sequences = sequences;
  step.cu_q = cu.data();
  step.context = context.data();
  step.block_table = table.data();
  step.table_stride = stride;
  step.slots = slots.data();
  step.rot = c.dim - 2 * static_cast<int32_t>(between(0, c.dim / 2 - 1));
  Exact<float> cos = floats(tokens * step.rot), sin = floats(tokens * step.rot), qkv = floats(tokens * width);
  step.cos = cos.get();
  step.sin = sin.get();
  const int64_t results = tokens * heads * c.dim;
  if (!same_everywhere(results + 2, [&](void* pool, int, float* out) {
        const int32_t status = flash_rope_and_cache_write(pool, qkv.get(), width, heads, &c, &step, out);
        uint64_t stored = 0;  // what is in the cache is compared too, in the place of two floats
        for (auto* part : {&k, &v, &ks, &vs}) stored = fnv1a(stored, part->get(), part->size);
        std::memcpy(out + results, &stored, 8);
        return status;
      }))
    return false;
  return same_everywhere(results, [&](void* pool, int threads, float* out) {
    Exact<uint8_t> scratch(flash_attention_scratch(&c, &step, heads, threads));
    return flash_attention(pool, qkv.get(), heads, &c, &step, 0.1f, out, scratch.get());
  });
}

bool small() {
  const int64_t rows = between(1, 9), dim = between(1, 300);
  what = "small ones " + std::to_string(rows) + "x" + std::to_string(dim);
  Exact<float> x = floats(rows * dim), r = floats(rows * dim), w = floats(dim), wide = floats(rows * 2 * dim, 5.0f);
  return same_everywhere(rows * dim, [&](void* pool, int, float* y) { return flash_rms_norm(pool, x.get(), dim, w.get(), 1e-5f, rows, dim, y); }) &&
         same_everywhere(2 * rows * dim, [&](void* pool, int, float* y) {
           return flash_add_rms_norm(pool, x.get(), r.get(), w.get(), 1e-5f, rows, dim, y, y + rows * dim);
         }) &&
         same_everywhere(rows * dim, [&](void* pool, int, float* y) { return flash_silu_mul(pool, wide.get(), rows, dim, y); }) &&
         same_everywhere(rows, [&](void* pool, int, float* y) {
           Exact<int64_t> ids(rows);
           const int32_t status = flash_argmax(pool, x.get(), dim, rows, dim, ids.get());
           for (int64_t i = 0; i < rows; ++i) y[i] = static_cast<float>(ids.data[static_cast<size_t>(i)]);
           return status;
         });
}

bool sampling() {
  const int64_t rows = between(1, 4), n = between(1, 2500);
  what = "sampling " + std::to_string(rows) + "x" + std::to_string(n);
  Exact<float> logits = floats(rows * n, 6.0f);
  const int64_t words = (n + 31) / 32;
  Exact<uint32_t> mask(words);
  for (int64_t i = 0; i < words; ++i) mask.get()[i] = static_cast<uint32_t>(between(0, 0xffffffff));
  Exact<int64_t> ids((n + 2) / 3);
  Exact<float> bias(ids.size);
  Exact<double> times(ids.size);
  for (int64_t i = 0; i < ids.size; ++i) {
    ids.get()[i] = 3 * i;
    bias.get()[i] = 0.1f * static_cast<float>(between(-20, 20));
    times.get()[i] = static_cast<double>(between(1, 5));
  }
  std::vector<flash_choice> choices(static_cast<size_t>(rows));
  for (flash_choice& c : choices) {
    c = flash_choice{};
    c.temperature = 0.25f * static_cast<float>(between(0, 6));
    c.top_k = static_cast<int32_t>(between(0, 1) ? 0 : between(0, n + 3));
    c.top_p = between(0, 1) ? 1.0 : 0.01 * static_cast<double>(between(1, 100));
    c.min_p = between(0, 2) ? 0.0 : 0.05;
    c.repetition = 1.25;
    c.frequency = 0.5;
    c.u = static_cast<double>(between(0, 999)) / 1000.0;
    if (between(0, 1)) c.seen = ids.get(), c.seen_count = ids.size;
    if (between(0, 1)) c.used = ids.get(), c.times = times.get(), c.used_count = ids.size;
    if (between(0, 1)) c.bias_ids = ids.get(), c.bias = bias.get(), c.bias_count = ids.size;
    if (!between(0, 3)) c.forbidden = ids.get(), c.forbidden_count = ids.size;
    if (!between(0, 3)) c.allowed = mask.get();
  }
  return same_everywhere(rows, [&](void* pool, int threads, float* y) {
    Exact<uint8_t> scratch(flash_sample_scratch(n, threads));
    Exact<int64_t> chosen(rows);
    const int32_t status = flash_sample(pool, logits.get(), n, rows, n, choices.data(), scratch.get(), chosen.get());
    for (int64_t i = 0; i < rows; ++i) y[i] = static_cast<float>(chosen.get()[i]);
    return status;
  });
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
  const int64_t cases = std::strtoll(arguments[2], nullptr, 10);
  for (int64_t i = 0; i < cases; ++i) {
    rng.seed(seed + static_cast<uint64_t>(i));
    const int64_t kind = i % 5;
    const bool good = kind < 2 ? linear() : kind == 2 ? attention() : kind == 3 ? small() : sampling();
    if (!good) {
      std::printf("case %lld of seed %llu\n", static_cast<long long>(i), static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("%lld cases on %s\ndigest %016llx\n", static_cast<long long>(cases), flash_isas(), static_cast<unsigned long long>(digest));
  return 0;
}
