// A small thread pool for loops that last microseconds.
#pragma once
#include <cstdint>

namespace flash {

class Pool;

// Calls body(context, thread, begin, end) for pieces of [0, count), of at least `grain` each, on all threads, and
// returns when all are done. thread is 0 .. threads - 1; a thread takes pieces until none is left, so who does which
// piece is not fixed: results must not depend on it.
using Body = void (*)(void* context, int32_t thread, int64_t begin, int64_t end);
void parallel(Pool* pool, int64_t count, int64_t grain, Body body, void* context);

template <class F>
void parallel_for(Pool* pool, int64_t count, int64_t grain, F&& f) {
  auto body = [](void* c, int32_t thread, int64_t begin, int64_t end) { (*static_cast<F*>(c))(thread, begin, end); };
  parallel(pool, count, grain, body, const_cast<void*>(static_cast<const void*>(&f)));
}

int32_t threads_of(const Pool* pool);  // 1 for nullptr: the work is then done by the caller

}  // namespace flash
