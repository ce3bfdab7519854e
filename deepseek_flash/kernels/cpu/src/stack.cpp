// All layers of a dense decoder in one call, so that a step of a small model is not spent between its kernels.
//
//     stream += y ─ norm ─ int8 ─ qkv ─ head norm ─ RoPE, cache write ─ attention ─ int8 ─ out ─► y
//     stream += y ─ norm ─ int8 ─ gate, up ─ silu · mul ─ int8 ─ down ─► y          (and the next layer)
//
// Work on rows (norm, int8, gate) is one loop over tokens, products are loops over panels of 16 outputs; between two
// loops all threads meet. Everything a row's result depends on is computed from that row in a fixed order.
#include <initializer_list>

#include "attention.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"

namespace flash {
namespace {

constexpr int64_t kAlign = 64;

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Hands out pieces of one span; from nullptr it only counts.
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

struct Scratch {
  float *normed, *wide, *q, *attended, *gated, *update;
  QuantForms forms;
  void* buffers;
  int64_t buffer_bytes;
  float* rows;        // one a thread
  int64_t row_floats;
  void* attention;
  int64_t bytes;

  float* row(int32_t thread) const { return rows + thread * row_floats; }
};

bool reads_floats(const flash_linear& first) {
  for (const flash_linear* w = &first; w; w = w->next)
    if (w->kind) return true;
  return false;
}

struct Limits {
  int64_t k = 0;         // widest input
  int64_t buffer = 0;    // of one thread
  uint32_t groups = 0;   // set of group sizes, as GroupSet
};

void widen(Limits& most, const flash_linear& first) {
  for (const flash_linear* w = &first; w; w = w->next) {
    if (w->k > most.k) most.k = w->k;
    const int64_t need = linear_buffer(*w);
    if (need > most.buffer) most.buffer = need;
    most.groups |= group_bit(*w);
  }
}

Scratch lay_out(const flash_stack& s, const flash_step& step, int32_t threads, void* memory) {
  Limits most;
  for (int32_t i = 0; i < s.layers; ++i) {
    const flash_layer& layer = s.layer[i];
    for (const flash_linear* w : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) widen(most, *w);
  }
  const flash_cache& cache = s.layer[0].cache;
  const int64_t tokens = step.tokens, dim = cache.dim;
  const int64_t qkv = (s.heads + 2 * static_cast<int64_t>(cache.kv_heads)) * dim, both = 2 * static_cast<int64_t>(s.inner);
  Arena arena{static_cast<char*>(memory)};
  Scratch out;
  out.normed = arena.take<float>(tokens * s.hidden);
  out.wide = arena.take<float>(tokens * (qkv > both ? qkv : both));
  out.q = arena.take<float>(tokens * s.heads * dim);
  out.attended = arena.take<float>(tokens * s.heads * dim);
  out.gated = arena.take<float>(tokens * s.inner);
  out.update = arena.take<float>(tokens * s.hidden);
  const int64_t forms = quant_forms_bytes(most.groups, most.k, tokens);
  out.forms = quant_forms(most.groups, most.k, tokens, arena.take<char>(forms));
  out.buffer_bytes = rounded(most.buffer, kAlign);
  out.buffers = arena.take<char>(out.buffer_bytes * threads);
  out.row_floats = rounded(s.hidden > s.inner ? s.hidden : s.inner, 16);
  out.rows = arena.take<float>(out.row_floats * threads);
  out.attention = arena.take<char>(attention_scratch(cache, step, s.heads, threads));
  out.bytes = arena.used;
  return out;
}

bool sound(const flash_stack* s, const flash_step* step) {
  if (!s || !step || s->layers < 1 || s->heads < 1 || s->hidden < 1 || s->inner < 1 || !s->layer) return false;
  if (step->tokens < 1 || step->sequences < 1) return false;
  for (int32_t i = 0; i < s->layers; ++i) {
    const flash_layer& l = s->layer[i];
    const int64_t heads = static_cast<int64_t>(s->heads) * l.cache.dim;
    const int64_t qkv = heads + 2 * static_cast<int64_t>(l.cache.kv_heads) * l.cache.dim;
    if (outputs(l.qkv) != qkv || outputs(l.out) != s->hidden || outputs(l.gate_up) != 2 * int64_t{s->inner} ||
        outputs(l.down) != s->hidden)
      return false;
    if (l.qkv.k != s->hidden || l.out.k != heads || l.gate_up.k != s->hidden || l.down.k != s->inner) return false;
  }
  return true;
}

// Rows of about this many floats make one piece of work.
int64_t grain(int64_t width) {
  const int64_t rows = 16384 / width;
  return rows > 1 ? rows : 1;
}

}  // namespace

void stack(Pool* pool, const flash_stack& s, const flash_step& step, float* x, float* out, void* memory) {
  const Ops& op = ops();
  const Scratch w = lay_out(s, step, threads_of(pool), memory);
  const int64_t tokens = step.tokens, hidden = s.hidden, inner = s.inner;
  const flash_cache& cache = s.layer[0].cache;
  const int64_t attended = static_cast<int64_t>(s.heads) * cache.dim;
  const int64_t qkv = attended + 2 * static_cast<int64_t>(cache.kv_heads) * cache.dim;
  void* const plan = plan_attention(cache, step, s.heads, threads_of(pool), w.attention);
  const float* update = nullptr;

  // stream += update; y = norm(stream), and its int8 forms for the layer that reads it. Where nobody reads the floats
  // they pass through a row that stays in the cache.
  auto norm = [&](const float* weight, const flash_linear* reader, float* y) {
    const bool passing = reader && !reads_floats(*reader);
    parallel_for(pool, tokens, grain(hidden), [&](int32_t thread, int64_t a, int64_t b) {
      if (!passing) op.norm(x, hidden, update, weight, s.eps, hidden, y, x, a, b);
      if (reader && !passing) quantize_forms(w.forms, *reader, y, hidden, a, b);
      for (int64_t t = a; passing && t < b; ++t) {
        float* row = w.row(thread);
        op.norm(x + t * hidden, hidden, update ? update + t * hidden : nullptr, weight, s.eps, hidden, row, x + t * hidden, 0, 1);
        quantize_forms(w.forms, *reader, row, 0, t, t + 1);
      }
    });
  };
  auto linear = [&](const flash_linear& layer, const float* input, int64_t ld, float* y, int64_t ldy) {
    linear_prepared(pool, layer, w.forms, input, ld, tokens, y, ldy, w.buffers, w.buffer_bytes);
  };

  for (int32_t i = 0; i < s.layers; ++i) {
    const flash_layer& layer = s.layer[i];
    norm(layer.norm, &layer.qkv, w.normed);
    linear(layer.qkv, w.normed, hidden, w.wide, qkv);
    parallel_for(pool, tokens, grain(qkv), [&](int32_t, int64_t a, int64_t b) {
      if (layer.head_norm)
        op.head_norm(w.wide, qkv, layer.head_norm, s.eps, s.heads + layer.cache.kv_heads, layer.cache.dim, a, b);
      op.rope_write(w.wide, qkv, s.heads, layer.cache, step, w.q, a, b);
    });
    attention_planned(pool, plan, layer.cache, w.q, s.scale, w.attended);
    parallel_for(pool, tokens, grain(attended), [&](int32_t, int64_t a, int64_t b) {
      quantize_forms(w.forms, layer.out, w.attended, attended, a, b);
    });
    linear(layer.out, w.attended, attended, w.update, hidden);
    update = w.update;
    norm(layer.mlp_norm, &layer.gate_up, w.normed);
    linear(layer.gate_up, w.normed, hidden, w.wide, 2 * inner);
    const bool passing = !reads_floats(layer.down);
    parallel_for(pool, tokens, grain(2 * inner), [&](int32_t thread, int64_t a, int64_t b) {
      if (!passing) op.silu_mul(w.wide, inner, w.gated, a, b);
      if (!passing) quantize_forms(w.forms, layer.down, w.gated, inner, a, b);
      for (int64_t t = a; passing && t < b; ++t) {
        op.silu_mul(w.wide + t * 2 * inner, inner, w.row(thread), 0, 1);
        quantize_forms(w.forms, layer.down, w.row(thread), 0, t, t + 1);
      }
    });
    linear(layer.down, w.gated, inner, w.update, hidden);
  }
  norm(s.norm, nullptr, out);
}

}  // namespace flash

FLASH_API int64_t flash_stack_scratch(const flash_stack* s, const flash_step* step, int32_t threads) {
  if (!flash::sound(s, step) || threads < 1) return FLASH_E_ARGUMENT;
  return flash::lay_out(*s, *step, threads, nullptr).bytes;
}

FLASH_API int32_t flash_stack_run(void* pool, const flash_stack* s, const flash_step* step, float* x, float* out,
                                  void* scratch) {
  if (!flash::sound(s, step) || !x || !out || !scratch) return FLASH_E_ARGUMENT;
  flash::stack(static_cast<flash::Pool*>(pool), *s, *step, x, out, scratch);
  return FLASH_OK;
}
