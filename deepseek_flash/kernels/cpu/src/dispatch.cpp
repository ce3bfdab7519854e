// Which instruction set is in use: the best one that is compiled in and that this processor has.
#include <atomic>
#include <cstring>

#include "ops.h"

namespace flash {

#if defined(__x86_64__)
extern const Ops table_avx512, table_avx2;
#endif
extern const Ops table_scalar;

namespace {

struct Candidate {
  const Ops* table;
  bool usable;
};

constexpr int kCandidates = 3;

const Candidate* candidates() {
  static const Candidate list[kCandidates] = {
#if defined(__x86_64__)
      {&table_avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni")},
      {&table_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#else
      {nullptr, false},
      {nullptr, false},
#endif
      {&table_scalar, true},
  };
  return list;
}

const Ops* best() {
  const Candidate* list = candidates();
  for (int i = 0; i < kCandidates; ++i)
    if (list[i].usable) return list[i].table;
  return &table_scalar;
}

std::atomic<const Ops*> in_use{nullptr};

}  // namespace

const Ops& ops() {
  const Ops* table = in_use.load(std::memory_order_acquire);
  if (!table) {
    table = best();
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

}  // namespace flash

FLASH_API int32_t flash_abi(void) { return FLASH_ABI; }

FLASH_API const char* flash_isas(void) {
  static const struct Names {
    char text[64] = "";
    Names() {
      for (int i = 0; i < flash::kCandidates; ++i) {
        const flash::Candidate& c = flash::candidates()[i];
        if (!c.usable) continue;
        if (*text) std::strcat(text, ",");
        std::strcat(text, c.table->name);
      }
    }
  } names;
  return names.text;
}

FLASH_API const char* flash_isa(void) { return flash::ops().name; }

FLASH_API int32_t flash_use_isa(const char* name) {
  if (!name) {
    flash::in_use.store(flash::best(), std::memory_order_release);
    return FLASH_OK;
  }
  for (int i = 0; i < flash::kCandidates; ++i) {
    const flash::Candidate& c = flash::candidates()[i];
    if (c.usable && std::strcmp(c.table->name, name) == 0) {
      flash::in_use.store(c.table, std::memory_order_release);
      return FLASH_OK;
    }
  }
  return FLASH_E_ISA;
}
