// Attention for drivers: a plan made once a step, used by every layer.
#pragma once
#include <cstdint>

#include "ops.h"
#include "pool.h"

namespace flash {

int64_t attention_scratch(const flash_cache& cache, const flash_step& step, int32_t heads, int32_t threads);
// The plan lives in `memory` (attention_scratch bytes) and knows shapes only: layers differ in their cache's pointers.
void* plan_attention(const flash_cache& cache, const flash_step& step, int32_t heads, int32_t threads, void* memory);
void attention_planned(Pool* pool, void* plan, const flash_cache& cache, const float* q, float scale, float* out);

}  // namespace flash
