// Which instruction set is in use: the best one that is compiled in and that this processor has.
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "ops.h"

namespace flash {

#if defined(__x86_64__)
extern const Ops table_avx512, table_avx2;
#elif defined(__aarch64__)
extern const Ops table_neon_dot, table_neon;
#endif
extern const Ops table_scalar;

namespace {

struct Candidate {
  const Ops* table;
  bool usable;
};

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") is not known to every compiler that is in use.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__ARM_FEATURE_DOTPROD) || defined(__APPLE__)
  return true;  // all of this library may use it; every Mac on Arm has it
#elif defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP, which older headers do not name
  return getauxval(AT_HWCAP) & kAsimdDp;
#else
  return false;  // nobody to ask
#endif
}
#endif

constexpr int kCandidates = 3;

const Candidate* candidates() {
  static const Candidate list[kCandidates] = {
#if defined(__x86_64__)
      {&table_avx512, has_avx512()},
      {&table_avx2, has_avx2()},
#elif defined(__aarch64__)
      {&table_neon_dot, has_dotprod()},
      {&table_neon, true},
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
