// The C interface of the CPU kernels: pointers and sizes only, so one library serves every Python and torch.
//
// Rows are contiguous fp32 unless said otherwise. No function allocates for the caller or keeps a pointer after it
// returns, except handles made by *_create. A pool is used by one thread at a time. Functions return 0, or a negative
// FLASH_E_* and have then done nothing.
#ifndef DEEPSEEK_FLASH_H
#define DEEPSEEK_FLASH_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASH_ABI 1
enum { FLASH_OK = 0, FLASH_E_ARGUMENT = -1, FLASH_E_MEMORY = -2, FLASH_E_ISA = -3 };
enum { FLASH_F32 = 0, FLASH_F16 = 1, FLASH_BF16 = 2, FLASH_I8 = 3 };

int32_t flash_abi(void);
// Instruction sets compiled in and usable on this processor, best first, comma separated: "avx512,avx2,scalar".
const char* flash_isas(void);
// Which one is in use; flash_use_isa picks another of the usable ones (tests), NULL the best.
const char* flash_isa(void);
int32_t flash_use_isa(const char* name);

// ---- threads: pool.cpp
void* flash_pool_create(int32_t threads);  // the calling thread counts; NULL when threads < 1 or none can be started
void flash_pool_destroy(void* pool);
int32_t flash_pool_threads(const void* pool);
// How many processors the threads have, where a quota leaves fewer than the system shows. Threads wait by looking only
// where each has one of its own: 1 if they do, else 0.
int32_t flash_pool_processors(void* pool, int32_t processors);

// ---- linear layers: linear.cpp; layouts are drawn there
typedef struct flash_linear {
  int32_t kind;        // 0 GroupQuant, 1 fp32, 2 fp16, 3 bf16
  int32_t bits;        // 4, 5, 6, 8 (GroupQuant; 0 otherwise)
  int32_t group;       // 16, 32, 64, 128 values of one output that share a scale
  int32_t offset;      // 0: w = d (q - zero); 1: w = d q + m, m fp16 a group; 2: w = d (q - z), z uint8 a group
  int32_t zero;        // offset 0
  int32_t super;       // 0: d (and m) fp16 a group; 1: d = D sc, m = -M mn with 8-bit sc, mn a group and fp16 D, M
                       // a super-block of 256 values (offset 0 or 1)
  int32_t fine;        // 1: activations as whole numbers of 15 bits, 0: of 8 (GroupQuant)
  int64_t n, k;        // outputs, inputs
  const void* data;    // packed panels of 16 outputs
  const float* bias;   // [n] or NULL
  const struct flash_linear* next;  // more outputs of the same inputs, in another format; y continues after these n
} flash_linear;

// Bytes of the packed form of this part (not of next); negative when the fields make no sense.
int64_t flash_linear_bytes(const flash_linear* w);
// Bytes of scratch that flash_linear_run needs for so many rows.
int64_t flash_linear_scratch(const flash_linear* w, int64_t rows, int32_t threads);
// y [rows, n] = x [rows, k] W^T + bias. ldx, ldy: floats from row to row.
int32_t flash_linear_run(void* pool, const flash_linear* w, const float* x, int64_t ldx, int64_t rows, float* y,
                         int64_t ldy, void* scratch);
// Pack rows [row, row + count) of plain parts (row and count multiples of 16, or to the end of n) into data. GroupQuant:
// codes uint8 [count, k]; scale, min, zeros, sub_scale, sub_min as the fields above say, each [count, k / group] or
// [count, k / 256], NULL where the format has none. Float kinds: codes are the values themselves.
int32_t flash_linear_pack(const flash_linear* w, int64_t row, int64_t count, const void* codes, const uint16_t* scale,
                          const uint16_t* min, const uint8_t* zeros, const int8_t* sub_scale, const int8_t* sub_min,
                          void* data);
// out [count, k] = dequantised rows ids[i] of W.
int32_t flash_linear_rows(const flash_linear* w, const int64_t* ids, int64_t count, float* out);

// ---- small ones: pointwise.cpp
int32_t flash_rms_norm(void* pool, const float* x, int64_t ldx, const float* weight, float eps, int64_t rows,
                       int64_t dim, float* y);
// sum = x + residual (may alias either), y = rms_norm(sum)
int32_t flash_add_rms_norm(void* pool, const float* x, const float* residual, const float* weight, float eps,
                           int64_t rows, int64_t dim, float* y, float* sum);
int32_t flash_silu_mul(void* pool, const float* gate_up, int64_t rows, int64_t n, float* y);

// ids[r] = index of the largest of logits [rows, n] (the first of equals), -1 when it is not finite or a value is NaN
int32_t flash_argmax(void* pool, const float* logits, int64_t ld, int64_t rows, int64_t n, int64_t* ids);

// ---- sampling: sample.cpp
// How one row's token is chosen (docs/sampling.md). Ids are below n and no list holds one twice.
typedef struct {
  float temperature;           // 0: the largest
  int32_t top_k;               // 0: off
  double top_p, min_p;         // 1 and 0: off
  double repetition, frequency, presence;
  const int64_t* seen;         // [seen_count] ids of prompt and output: repetition
  const int64_t* used;         // [used_count] ids of the output, and how often: frequency and presence
  const double* times;
  const int64_t* bias_ids;     // [bias_count]
  const float* bias;
  const int64_t* forbidden;    // [forbidden_count]
  int64_t seen_count, used_count, bias_count, forbidden_count;
  const uint32_t* allowed;     // bit i % 32 of word i / 32: id i may be chosen; NULL: all may
  double u;                    // in [0, 1): the draw
} flash_choice;

int64_t flash_sample_scratch(int64_t n, int32_t threads);
// ids[r] = the token chosen from logits [rows, n] (row stride ld), -1 when the largest is not finite or a value is NaN
int32_t flash_sample(void* pool, const float* logits, int64_t ld, int64_t rows, int64_t n, const flash_choice* choices,
                     void* scratch, int64_t* ids);

// ---- the paged cache and attention: attention.cpp
typedef struct {
  int64_t block, slot, head, item;  // elements from one to the next
} flash_strides;

// Value d of (block b, slot s, head h) is element b * block + s * slot + h * head + d * item. Values lie side by side
// (item 1) in keys, values and scales, or keys (and their scales) are turned: slot 1, item block_size, which must be a
// multiple of 16.
typedef struct {
  void *k, *v;
  void *k_scale, *v_scale;    // FLASH_I8: fp16, one for kv_group values; else NULL
  flash_strides k_at, v_at, k_scale_at, v_scale_at;
  int32_t dtype, block_size, kv_heads, dim;
  int32_t kv_group;           // FLASH_I8: values along the head dimension that share a scale, else 0
} flash_cache;

typedef struct {
  int64_t tokens, sequences;
  const int32_t* cu_q;        // [sequences + 1]
  const int32_t* context;     // [sequences] tokens of each after this step
  const int64_t* block_table; // [sequences, table_stride]
  int64_t table_stride;
  const int64_t* slots;       // [tokens] block * block_size + slot
  const float *cos, *sin;     // [tokens, rot], as the rope op takes them
  int32_t rot;
} flash_step;

// Rotate the heads + kv_heads heads at qkv [tokens, heads + 2 kv_heads, dim] (row stride ldq), store keys and values
// (quantised to the cache's type), write the rotated queries to q [tokens, heads, dim].
int32_t flash_rope_and_cache_write(void* pool, const float* qkv, int64_t ldq, int32_t heads, const flash_cache* cache,
                                   const flash_step* step, float* q);
int64_t flash_attention_scratch(const flash_cache* cache, const flash_step* step, int32_t heads, int32_t threads);
// out [tokens, heads, dim] = causal softmax(q k^T scale) v
int32_t flash_attention(void* pool, const float* q, int32_t heads, const flash_cache* cache, const flash_step* step,
                        float scale, float* out, void* scratch);

// ---- the whole stack: stack.cpp
typedef struct {
  const float* norm;          // [hidden] before attention
  const float* mlp_norm;      // [hidden]
  const float* head_norm;     // [heads + kv_heads, dim] of queries and keys, or NULL
  flash_linear qkv, out, gate_up, down;
  flash_cache cache;
} flash_layer;

typedef struct {
  int32_t layers, heads, hidden, inner;
  float eps, scale;
  const flash_layer* layer;
  const float* norm;          // [hidden] the last one
} flash_stack;

int64_t flash_stack_scratch(const flash_stack* stack, const flash_step* step, int32_t threads);
// x [tokens, hidden] embeddings, overwritten; out [tokens, hidden] the normalised last hidden states.
int32_t flash_stack_run(void* pool, const flash_stack* stack, const flash_step* step, float* x, float* out,
                        void* scratch);

#ifdef __cplusplus
}
#endif
#endif
