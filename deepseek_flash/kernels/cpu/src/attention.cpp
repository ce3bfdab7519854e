// Attention: cutting a step into work, and the C interface. The arithmetic is in attention_isa.h.
#include "attention.h"

#include "attention_plan.h"

namespace flash {
namespace {

constexpr int64_t kAlign = 64;

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* out = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += rounded(count * static_cast<int64_t>(sizeof(T)), kAlign);
    return out;
  }
};

bool sound(const flash_cache* c, const flash_step* s, int32_t heads) {
  if (!c || !s || c->kv_heads < 1 || c->dim < 1 || c->block_size < 1 || heads < 1 || heads % c->kv_heads) return false;
  if (c->dim > kMostDim || heads / c->kv_heads > kMostGroup) return false;
  if (c->dtype < 0 || c->dtype > FLASH_I8 || s->tokens < 0 || s->sequences < 0) return false;
  const bool turned = c->k_at.item != 1;
  if (turned && (c->k_at.slot != 1 || c->k_at.item != c->block_size || c->block_size % 16)) return false;
  if (c->v_at.item != 1) return false;
  if (c->dtype == FLASH_I8) {
    if (c->kv_group < 1 || c->dim % c->kv_group || c->v_scale_at.item != 1) return false;
    if (turned ? c->k_scale_at.slot != 1 || c->k_scale_at.item != c->block_size : c->k_scale_at.item != 1) return false;
  }
  return !s->tokens || (s->cu_q && s->context);
}

int64_t count_of(const flash_step& s, int64_t i) { return s.cu_q[i + 1] - s.cu_q[i]; }

int64_t rows_of_item(int64_t group) { return group > kItemRows ? group : kItemRows; }

// Few enough new tokens to be split; all rows of a sequence must fit one item (many heads may share a kv head).
bool is_split(int64_t tokens, int64_t group) { return tokens <= kSplitTokens && tokens * group <= rows_of_item(group); }

bool same_blocks(const flash_step& s, int64_t a, int64_t b, int64_t first, int64_t count) {
  const int64_t *x = s.block_table + a * s.table_stride + first, *y = s.block_table + b * s.table_stride + first;
  for (int64_t i = 0; i < count; ++i)
    if (x[i] != y[i]) return false;
  return true;
}

// Sizes of everything in the plan; with memory, places too.
int64_t lay_out(const flash_cache& c, const flash_step& s, int32_t heads, int32_t threads, void* memory, AttentionPlan** out) {
  const int64_t group = heads / c.kv_heads, padded = rounded(c.dim, 16);
  const int64_t rows = rows_of_item(group);
  const int64_t tokens_each = rows / group;
  int64_t pieces = 0, sweeps = 0, parts = 0, splits = 0;
  for (int64_t i = 0; i < s.sequences; ++i) {
    const int64_t n = count_of(s, i);
    if (n < 1) continue;
    if (is_split(n, group)) {
      ++splits;
      pieces += partitions(s.context[i]);
      parts += n * heads * partitions(s.context[i]);
    } else {
      sweeps += (n + tokens_each - 1) / tokens_each;
    }
  }
  Arena arena{static_cast<char*>(memory)};
  auto* plan = arena.take<AttentionPlan>(1);
  AttentionPlan local{};
  AttentionPlan& p = plan ? *plan : local;
  p.heads = heads;
  p.kv_heads = c.kv_heads;
  p.group = static_cast<int32_t>(group);
  p.dim = c.dim;
  p.padded_dim = static_cast<int32_t>(padded);
  p.block_size = c.block_size;
  p.dtype = c.dtype;
  p.kv_group = c.kv_group;
  p.item_rows = rows;
  p.step = &s;
  p.items = p.splits = p.members = 0;
  p.item = arena.take<AttentionItem>((pieces + sweeps) * c.kv_heads);
  p.member = arena.take<int32_t>(pieces);
  p.split = arena.take<int32_t>(splits);
  p.part_row = arena.take<int64_t>(s.sequences);
  p.part = arena.take<float>(parts * (padded + 2));
  // keys and values of a tile, then queries, weights, results, sums, maxima and corrections of the rows
  p.buffer_bytes = rounded((2 * padded * kTile + rows * (3 * padded + kTile + 32 + 4) + 16) * 4, kAlign);
  p.buffers = arena.take<char>(p.buffer_bytes * threads);
  if (out) *out = plan;
  return arena.used;
}

void add_sweeps(AttentionPlan& p, int64_t sequence) {
  const flash_step& s = *p.step;
  const int64_t each = p.item_rows / p.group, begin = s.cu_q[sequence], end = s.cu_q[sequence + 1];
  // The last tokens have the most keys: longest work first.
  for (int64_t first = begin + (end - begin - 1) / each * each; first >= begin; first -= each)
    for (int32_t h = 0; h < p.kv_heads; ++h)
      p.item[p.items++] = {-1, h, static_cast<int32_t>(first),
                           static_cast<int32_t>(end - first < each ? end - first : each), static_cast<int32_t>(sequence)};
}

void add_splits(AttentionPlan& p) {
  const flash_step& s = *p.step;
  int64_t most = 0;
  for (int64_t i = 0; i < p.splits; ++i)
    if (partitions(s.context[p.split[i]]) > most) most = partitions(s.context[p.split[i]]);
  const bool aligned = kPartition % p.block_size == 0;  // else blocks straddle partitions: not shared
  for (int64_t part = 0; part < most; ++part) {
    const int64_t start = part * kPartition, first_block = start / p.block_size, blocks = kPartition / p.block_size;
    int64_t done = p.members;  // members before this partition
    for (int64_t i = 0; i < p.splits; ++i) {
      const int32_t lead = p.split[i];
      if (s.context[lead] <= start) continue;
      bool taken = false;
      for (int64_t m = done; m < p.members && !taken; ++m) taken = p.member[m] == lead;
      if (taken) continue;
      const int64_t first = p.members;
      int64_t rows = 0;
      for (int64_t j = i; j < p.splits; ++j) {
        const int32_t other = p.split[j];
        const bool whole = s.context[other] >= start + kPartition && s.context[lead] >= start + kPartition;
        if (j != i && (!aligned || !whole || !same_blocks(s, lead, other, first_block, blocks))) continue;
        const int64_t more = count_of(s, other) * p.group;
        if (j != i && rows + more > p.item_rows) break;
        if (j != i) {
          bool used = false;
          for (int64_t m = done; m < first && !used; ++m) used = p.member[m] == other;
          if (used) continue;
        }
        p.member[p.members++] = other;
        rows += more;
      }
      for (int32_t h = 0; h < p.kv_heads; ++h)
        p.item[p.items++] = {static_cast<int32_t>(part), h, static_cast<int32_t>(first),
                             static_cast<int32_t>(p.members - first), lead};
    }
  }
}

}  // namespace

int64_t attention_scratch(const flash_cache& cache, const flash_step& step, int32_t heads, int32_t threads) {
  return lay_out(cache, step, heads, threads, nullptr, nullptr);
}

void* plan_attention(const flash_cache& cache, const flash_step& step, int32_t heads, int32_t threads, void* memory) {
  AttentionPlan* plan = nullptr;
  lay_out(cache, step, heads, threads, memory, &plan);
  AttentionPlan& p = *plan;
  int64_t parts = 0;
  for (int64_t i = 0; i < step.sequences; ++i) {
    const int64_t n = count_of(step, i);
    if (n < 1) continue;
    if (!is_split(n, p.group)) {
      add_sweeps(p, i);
      continue;
    }
    p.part_row[i] = parts;
    parts += n * heads * partitions(step.context[i]);
    p.split[p.splits++] = static_cast<int32_t>(i);
  }
  add_splits(p);
  return plan;
}

void attention_planned(Pool* pool, void* plan, const flash_cache& cache, const float* q, float scale, float* out) {
  const AttentionPlan& p = *static_cast<AttentionPlan*>(plan);
  const AttentionJob job{p, cache, q, scale, out};
  const Ops& op = ops();
  parallel_for(pool, p.items, 1, [&](int32_t thread, int64_t a, int64_t b) {
    op.attend(job, p.buffers + thread * p.buffer_bytes, a, b);
  });
  const int64_t rows = p.splits * p.heads;
  parallel_for(pool, p.splits, rows * p.dim < 16384 ? p.splits : 1, [&](int32_t, int64_t a, int64_t b) { op.combine(job, a, b); });
}

}  // namespace flash

FLASH_API int32_t flash_rope_and_cache_write(void* pool, const float* qkv, int64_t ldq, int32_t heads,
                                             const flash_cache* cache, const flash_step* step, float* q) {
  if (!flash::sound(cache, step, heads) || (step->tokens && (!step->slots || !step->cos || !step->sin))) return FLASH_E_ARGUMENT;
  if (step->rot < 2 || step->rot % 2 || step->rot > cache->dim) return FLASH_E_ARGUMENT;
  const int64_t width = (heads + 2 * static_cast<int64_t>(cache->kv_heads)) * cache->dim;
  flash::parallel_for(static_cast<flash::Pool*>(pool), step->tokens, 16384 / width, [&](int32_t, int64_t a, int64_t b) {
    flash::ops().rope_write(qkv, ldq, heads, *cache, *step, q, a, b);
  });
  return FLASH_OK;
}

FLASH_API int64_t flash_attention_scratch(const flash_cache* cache, const flash_step* step, int32_t heads, int32_t threads) {
  if (!flash::sound(cache, step, heads) || threads < 1) return FLASH_E_ARGUMENT;
  return flash::attention_scratch(*cache, *step, heads, threads);
}

FLASH_API int32_t flash_attention(void* pool, const float* q, int32_t heads, const flash_cache* cache,
                                  const flash_step* step, float scale, float* out, void* scratch) {
  if (!flash::sound(cache, step, heads) || (step->tokens && (!scratch || !step->block_table))) return FLASH_E_ARGUMENT;
  if (!step->tokens) return FLASH_OK;
  auto* threads = static_cast<flash::Pool*>(pool);
  void* plan = flash::plan_attention(*cache, *step, heads, flash::threads_of(threads), scratch);
  flash::attention_planned(threads, plan, *cache, q, scale, out);
  return FLASH_OK;
}
