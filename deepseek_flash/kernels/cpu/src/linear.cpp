// Linear layers: checks, packing, the order of work; the products themselves are in linear_isa.h.
#include "linear.h"

#include <cstring>

#include "linear_layout.h"

namespace flash {
namespace {

constexpr int64_t kAlign = 64;

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool sound(const flash_linear& w) {
  if (w.n < 1 || w.k < 1 || w.kind < 0 || w.kind > 3 || w.fine < 0 || w.fine > 1) return false;
  if (w.kind) return true;
  const bool group = w.group == 16 || w.group == 32 || w.group == 64 || w.group == 128;
  if (!group || w.offset < 0 || w.offset > 2 || (w.super && (w.super != 1 || w.offset == 2))) return false;
  return w.bits == 4 || (w.bits == 5 && w.group >= 32) || w.bits == 6 || w.bits == 8;
}

bool all_sound(const flash_linear* w) {
  if (!w) return false;
  const int64_t k = w->k;
  for (; w; w = w->next)
    if (!sound(*w) || w->k != k || !w->data) return false;
  return true;
}

constexpr int kForms = 8;

int form_of(const flash_linear& w) { return (w.group == 16 ? 0 : w.group == 32 ? 1 : w.group == 64 ? 2 : 3) + 4 * w.fine; }
int32_t group_of(int form) { return 16 << form % 4; }
int32_t terms_of(int form) { return form < 4 ? 1 : 2; }

// Groups a row can hold, super-blocks rounded up.
int64_t form_stride(int64_t k, int form) { return rounded(k, kSuper) / group_of(form); }

}  // namespace

uint32_t group_bit(const flash_linear& w) { return w.kind ? 0u : 1u << form_of(w); }

int64_t outputs(const flash_linear& w) {
  int64_t n = 0;
  for (const flash_linear* p = &w; p; p = p->next) n += p->n;
  return n;
}

int64_t linear_buffer(const flash_linear& w) {
  if (w.kind) return 0;
  return padded_k(w) * kPanel + padded_k(w) / w.group * 2 * kPanel * 4;
}

int64_t quant_forms_bytes(uint32_t groups, int64_t widest, int64_t rows) {
  int64_t total = 0;
  for (int f = 0; f < kForms; ++f)
    if (groups >> f & 1)
      total += rounded(rows * rounded(widest, kSuper) * terms_of(f), kAlign) + rounded(rows * form_stride(widest, f) * 8, kAlign);
  return total;
}

QuantForms quant_forms(uint32_t groups, int64_t widest, int64_t rows, void* memory) {
  QuantForms out{};
  char* at = static_cast<char*>(memory);
  for (int f = 0; f < kForms; ++f) {
    if (!(groups >> f & 1)) continue;
    QuantRows& q = out.form[f];
    q.group = group_of(f);
    q.terms = terms_of(f);
    q.rows = rows;
    q.ldq = rounded(widest, kSuper) * q.terms;
    q.stride = form_stride(widest, f);
    if (!at) continue;
    q.q = reinterpret_cast<int8_t*>(at);
    at += rounded(rows * q.ldq, kAlign);
    q.scales = reinterpret_cast<float*>(at);
    at += rounded(rows * q.stride * 8, kAlign);
  }
  return out;
}

void quantize_forms(const QuantForms& forms, const flash_linear& w, const float* x, int64_t ldx, int64_t begin,
                    int64_t end) {
  uint32_t done = 0;
  for (const flash_linear* p = &w; p; p = p->next) {
    const uint32_t bit = group_bit(*p);
    if (!bit || done & bit) continue;
    done |= bit;
    int64_t inputs = padded_k(*p);  // super-blocks are multiplied to their end
    for (const flash_linear* o = p->next; o; o = o->next)
      if (group_bit(*o) == bit && padded_k(*o) > inputs) inputs = padded_k(*o);
    ops().quantize(x, ldx, p->k, inputs / p->group, forms.form[form_of(*p)], begin, end);
  }
}

void linear_prepared(Pool* pool, const flash_linear& w, const QuantForms& forms, const float* x, int64_t ldx,
                     int64_t rows, float* y, int64_t ldy, void* buffers, int64_t buffer_bytes) {
  const Ops& op = ops();
  for (const flash_linear* p = &w; p; y += p->n, p = p->next) {
    // Weights that are read once are cut finely enough to even out the threads, but not below some microseconds.
    const int64_t bytes = panel_bytes(*p) * (rows < 16 ? 1 : rows / 8);
    const int64_t grain = bytes < 32768 ? 32768 / bytes : 1;
    parallel_for(pool, panels(*p), grain, [&](int32_t thread, int64_t begin, int64_t end) {
      void* buffer = static_cast<char*>(buffers) + thread * buffer_bytes;
      if (p->kind) op.linear_float(*p, x, ldx, rows, y, ldy, begin, end, buffer);
      else op.linear_quant(*p, forms.form[form_of(*p)], y, ldy, begin, end, buffer);
    });
  }
}

namespace {

struct Prepared {
  uint32_t groups = 0;
  int64_t forms = 0, buffer = 0;
};

Prepared prepare(const flash_linear& w, int64_t rows) {
  Prepared out;
  for (const flash_linear* p = &w; p; p = p->next) {
    out.groups |= group_bit(*p);
    const int64_t need = linear_buffer(*p);
    if (need > out.buffer) out.buffer = need;
  }
  out.buffer = rounded(out.buffer, kAlign);
  out.forms = quant_forms_bytes(out.groups, w.k, rows);
  return out;
}

}  // namespace
}  // namespace flash

using namespace flash;

FLASH_API int64_t flash_linear_bytes(const flash_linear* w) {
  return w && sound(*w) ? panels(*w) * panel_bytes(*w) : int64_t{FLASH_E_ARGUMENT};
}

FLASH_API int64_t flash_linear_scratch(const flash_linear* w, int64_t rows, int32_t threads) {
  if (!all_sound(w) || rows < 0 || threads < 1) return FLASH_E_ARGUMENT;
  const Prepared p = prepare(*w, rows);
  return p.forms + p.buffer * threads;
}

FLASH_API int32_t flash_linear_run(void* pool, const flash_linear* w, const float* x, int64_t ldx, int64_t rows, float* y,
                                   int64_t ldy, void* scratch) {
  if (!all_sound(w) || rows < 0 || ldx < w->k || ldy < outputs(*w)) return FLASH_E_ARGUMENT;
  auto* threads = static_cast<Pool*>(pool);
  const Prepared p = prepare(*w, rows);
  const QuantForms forms = quant_forms(p.groups, w->k, rows, scratch);
  if (p.groups) {
    const int64_t grain = 16384 / w->k;
    parallel_for(threads, rows, grain, [&](int32_t, int64_t a, int64_t b) { quantize_forms(forms, *w, x, ldx, a, b); });
  }
  linear_prepared(threads, *w, forms, x, ldx, rows, y, ldy, static_cast<char*>(scratch) + p.forms, p.buffer);
  return FLASH_OK;
}

FLASH_API int32_t flash_linear_rows(const flash_linear* w, const int64_t* ids, int64_t count, float* out) {
  if (!all_sound(w) || count < 0) return FLASH_E_ARGUMENT;
  const int64_t n = outputs(*w);
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= n) return FLASH_E_ARGUMENT;
  for (int64_t i = 0; i < count; ++i) {
    int64_t id = ids[i];
    const flash_linear* p = w;
    for (; id >= p->n; p = p->next) id -= p->n;
    ops().linear_rows(*p, &id, 0, 1, out + i * w->k);
  }
  return FLASH_OK;
}

namespace {

// Values of one output, or zeros for the outputs that pad the last panel.
template <class T>
const T* row_or_null(const T* base, int64_t row, int64_t count, int64_t width) {
  return base && row < count ? base + row * width : nullptr;
}

void pack_codes(const flash_linear& w, const uint8_t* const* rows, int64_t first, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(code_bytes(w)));
  uint8_t* high = out + w.group * 8;
  for (int64_t o = 0; o < kPanel; ++o) {
    if (!rows[o]) continue;
    const uint8_t* from = rows[o] + first;
    for (int64_t i = 0; i < w.group; ++i) {
      const int64_t q = i / 4, at = 4 * o + i % 4;
      const unsigned v = from[i];
      if (w.bits == 8) {
        out[64 * q + at] = static_cast<uint8_t>(v);
        continue;
      }
      uint8_t& two = out[64 * (q / 2) + at];
      two = static_cast<uint8_t>(two | (v & 15) << (q % 2 ? 4 : 0));
      if (w.bits == 5) high[64 * (q / 8) + at] = static_cast<uint8_t>(high[64 * (q / 8) + at] | (v >> 4 & 1) << (q % 8));
      if (w.bits == 6) high[64 * (q / 4) + at] = static_cast<uint8_t>(high[64 * (q / 4) + at] | (v >> 4 & 3) << (2 * (q % 4)));
    }
  }
}

template <class T>
uint8_t* put_column(uint8_t* out, const T* base, int64_t width, int64_t column, int64_t row, int64_t count) {
  for (int64_t o = 0; o < kPanel; ++o, out += sizeof(T)) {
    const T* from = row_or_null(base, row + o, count, width);
    const T v = from ? from[column] : T{0};
    std::memcpy(out, &v, sizeof v);
  }
  return out;
}

}  // namespace

FLASH_API int32_t flash_linear_pack(const flash_linear* w, int64_t row, int64_t count, const void* codes,
                                    const uint16_t* scale, const uint16_t* min, const uint8_t* zeros,
                                    const int8_t* sub_scale, const int8_t* sub_min, void* data) {
  if (!w || !sound(*w) || row < 0 || count < 1 || row + count > w->n || row % kPanel || !codes || !data) return FLASH_E_ARGUMENT;
  if (count % kPanel && row + count != w->n) return FLASH_E_ARGUMENT;
  const int64_t kp = padded_k(*w), groups = w->kind ? 0 : kp / w->group, supers = kp / kSuper;
  if (!w->kind && (!scale || (w->offset == 1 && !min) || (w->offset == 2 && !zeros) || (w->super && !sub_scale) ||
                   (w->super && w->offset == 1 && !sub_min)))
    return FLASH_E_ARGUMENT;
  for (int64_t r = 0; r < count; r += kPanel) {
    uint8_t* out = static_cast<uint8_t*>(data) + (row + r) / kPanel * panel_bytes(*w);
    if (w->kind) {
      for (int64_t i = 0; i < w->k; ++i)
        out = w->kind == 1 ? put_column(out, static_cast<const uint32_t*>(codes), w->k, i, r, count)
                           : put_column(out, static_cast<const uint16_t*>(codes), w->k, i, r, count);
      continue;
    }
    const uint8_t* rows[kPanel];
    for (int64_t o = 0; o < kPanel; ++o) rows[o] = row_or_null(static_cast<const uint8_t*>(codes), r + o, count, kp);
    for (int64_t g = 0; g < groups; ++g) {
      if (w->super) {
        const int64_t at = g * w->group;
        if (at % kSuper == 0) {
          out = put_column(out, scale, supers, at / kSuper, r, count);
          if (w->offset == 1) out = put_column(out, min, supers, at / kSuper, r, count);
        }
        out = put_column(out, sub_scale, groups, g, r, count);
        if (w->offset == 1) out = put_column(out, sub_min, groups, g, r, count);
      } else {
        out = put_column(out, scale, groups, g, r, count);
        if (w->offset == 1) out = put_column(out, min, groups, g, r, count);
        if (w->offset == 2) out = put_column(out, zeros, groups, g, r, count);
      }
      pack_codes(*w, rows, g * w->group, out);
      out += code_bytes(*w);
    }
  }
  return FLASH_OK;
}
