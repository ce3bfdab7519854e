// Threads that wait by looking, for as long as the gap between two steps, and then by sleeping.
//
// Waking a sleeping thread costs 65 to 400 µs, more than most loops here take. So a worker that has nothing to do
// watches the job counter for about a millisecond before it sleeps on a condition variable:
//
//     tickets = (job number, how much is not yet taken)   taking a piece is a compare-and-swap that counts down
//     left    = how much is not yet finished              parallel() returns at 0
//
//     ├──────── 1/4 ────────┤├───── 3/16 ─────┤├── 9/64 ──┤├─ … ─┤├ grain ┤├ grain ┤      pieces for two threads
//
// Pieces are taken from the front and become smaller, so that few are taken and yet threads of different speed end
// together. Whoever holds a piece keeps its job from ending, so what the job says may be read after taking one. Nobody
// waits for a worker that took none: one that sleeps, or that the system has suspended, just misses the job.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif

#include "ops.h"

namespace flash {
namespace {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t process_id() {
#if defined(_WIN32)
  return 0;
#else
  return getpid();
#endif
}

int32_t processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}

constexpr auto kSpin = std::chrono::microseconds(1500);
constexpr int32_t kMostThreads = 1024;
constexpr int64_t kMost = 0xffffffff;  // what a ticket can count

}  // namespace

class Pool {
 public:
  explicit Pool(int32_t threads) : threads_(threads), spin_(threads <= processors()), owner_(process_id()) {
    workers_ = new (std::nothrow) std::thread[static_cast<size_t>(threads)];
  }

  bool start() {
    if (!workers_) return false;
    // The one exception here: a limit on processes or memory must not end the program.
    try {
      for (int32_t i = 1; i < threads_; ++i) workers_[i] = std::thread([this, i] { work(i); });
    } catch (const std::system_error&) {
      return false;  // the destructor joins those that started
    }
    return true;
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (int32_t i = 1; workers_ && i < threads_; ++i)
      if (workers_[i].joinable()) workers_[i].join();
    delete[] workers_;
  }

  int32_t threads() const { return threads_; }
  bool mine() const { return owner_ == process_id(); }
  bool spin_on(int32_t processors) {
    spin_.store(threads_ <= processors, std::memory_order_relaxed);
    return spin_.load(std::memory_order_relaxed);
  }

  void run(int64_t count, int64_t grain, Body body, void* context) {
    if (threads_ == 1 || count <= grain || count > kMost || !mine() || busy_.exchange(true, std::memory_order_acquire)) {
      if (count > 0) body(context, 0, 0, count);
      return;
    }
    body_ = body;
    context_ = context;
    count_ = count;
    grain_.store(grain, std::memory_order_relaxed);
    left_.store(count, std::memory_order_relaxed);
    job_ = (job_ + 1) & 0xffffffffu;
    tickets_.store(job_ << 32 | static_cast<uint64_t>(count), std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_pieces(0);
    for (int spins = 0; left_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 4096 && spin_.load(std::memory_order_relaxed)) pause_briefly();
      else std::this_thread::yield();
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  void take_pieces(int32_t thread) {
    uint64_t t = tickets_.load(std::memory_order_acquire);
    while (untaken(t) > 0) {
      // The grain may be another job's already; then the ticket is no longer t, and is not taken.
      const int64_t rest = untaken(t), grain = grain_.load(std::memory_order_relaxed), share = rest / (int64_t{2} * threads_);
      const int64_t size = std::min(rest, std::max(grain, share));
      if (!tickets_.compare_exchange_weak(t, t - static_cast<uint64_t>(size), std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      const int64_t begin = count_ - rest;
      body_(context_, thread, begin, begin + size);
      left_.fetch_sub(size, std::memory_order_release);
      t = tickets_.load(std::memory_order_acquire);
    }
  }

  static int64_t untaken(uint64_t tickets) { return static_cast<int64_t>(tickets & 0xffffffffu); }

  bool work_or_stop() const { return untaken(tickets_.load(std::memory_order_seq_cst)) > 0 || stop_.load(); }

  // Until there is something to do.
  void wait() {
    if (spin_.load(std::memory_order_relaxed)) {
      const auto until = std::chrono::steady_clock::now() + kSpin;
      do {
        for (int i = 0; i < 64; ++i) {
          if (work_or_stop()) return;
          pause_briefly();
        }
      } while (std::chrono::steady_clock::now() < until);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return work_or_stop(); });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  void work(int32_t thread) {
    for (;;) {
      wait();
      if (stop_.load()) return;
      take_pieces(thread);
    }
  }

  const int32_t threads_;
  std::atomic<bool> spin_;  // whether to wait by looking: not when others need the processor to get on
  const int64_t owner_;
  std::thread* workers_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> busy_{false};
  std::atomic<int32_t> sleeping_{0};
  alignas(64) std::atomic<uint64_t> tickets_{0};
  alignas(64) std::atomic<int64_t> left_{0};
  uint64_t job_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> grain_{1};
};

void parallel(Pool* pool, int64_t count, int64_t grain, Body body, void* context) {
  if (count <= 0) return;
  if (pool) pool->run(count, grain < 1 ? 1 : grain, body, context);
  else body(context, 0, 0, count);
}

int32_t threads_of(const Pool* pool) { return pool ? pool->threads() : 1; }

}  // namespace flash

FLASH_API void* flash_pool_create(int32_t threads) {
  if (threads < 1 || threads > flash::kMostThreads) return nullptr;
  auto* pool = new (std::nothrow) flash::Pool(threads);
  if (!pool) return nullptr;
  if (pool->start()) return pool;
  delete pool;
  return nullptr;
}

// A forked child has no such threads: its copy is left as it is, since destroying a condition variable waits for those
// who sleep on it.
FLASH_API void flash_pool_destroy(void* pool) {
  auto* p = static_cast<flash::Pool*>(pool);
  if (p && p->mine()) delete p;
}

FLASH_API int32_t flash_pool_threads(const void* pool) { return flash::threads_of(static_cast<const flash::Pool*>(pool)); }

FLASH_API int32_t flash_pool_processors(void* pool, int32_t processors) {
  return pool && static_cast<flash::Pool*>(pool)->spin_on(processors) ? 1 : 0;
}
