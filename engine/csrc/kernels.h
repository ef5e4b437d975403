/* What a decoder-only model spends its time on in bfloat16 on a CPU, for AVX2, for AVX-512 with its bfloat16 products, AMX.
 * Sums are float32, results rounded to nearest even; what a row gives does not depend on the other rows of a call.
 * Runs on as many threads as OpenMP gives. Tensors are dense unless a stride, in elements, says otherwise. */
#ifndef KV_KERNELS_H
#define KV_KERNELS_H

#include <stdint.h>

/* The text between the two marks is also what cffi reads. */
/* cffi: begin */

/* Instructions that the kernels use: 0 where the processor lacks what they need, 1 AVX2 with FMA, 2 AVX-512 with BF16, 3
 * AMX with BF16 as well. To be called before any of them. */
int kv_level(void);

/* Uses no more than `level`, for tests; returns what is used from now on. */
int kv_limit_level(int level);

/* y = x W^T, W [outputs][inputs], x [rows][inputs], y [rows][outputs]. Returns 0, or -1 without memory. */
int kv_few_rows(const uint16_t *w, const uint16_t *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs);

/* The same, with y in float32, rounded to bfloat16 as well. */
int kv_score(const uint16_t *w, const uint16_t *x, float *y, int64_t rows, int64_t outputs, int64_t inputs);

/* y = x W^T for many rows; kv_few_rows may differ in the last bit, but not at level 3. Not at level 2. */
int kv_many_rows(const uint16_t *w, const uint16_t *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs);

/* y = x / rms(x) * w over vectors of `size`: x [tokens][heads][size] with tokens `stride` apart, y dense.
 * The first `of_first` heads take w[0], the others w[1], w [2][size]. x / rms(x) is rounded before it is multiplied. */
void kv_rms_norm(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t tokens, int64_t heads, int64_t of_first,
                 int64_t stride, int64_t size, float eps);

/* y = silu(gate) * up, gate_up [rows][2 size] one after the other, y [rows][size]. */
void kv_silu_times(const uint16_t *gate_up, uint16_t *y, int64_t rows, int64_t size);

/* y = x turned by its position, dimension i with i + size / 2: x [tokens][heads][size] with tokens `stride` and heads
 * `head_stride` apart, y dense; cosines and signed sines are [tokens][size]. */
void kv_rotate(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t tokens, int64_t heads,
               int64_t stride, int64_t head_stride, int64_t size);

/* One layer of a pool of pages [page][kv head][K/V][token][dim], and how its heads are read. */
typedef struct {
  uint16_t *pages;
  int64_t kv_heads, page_size, head_dim;
  int64_t group; /* query heads of a KV head */
  float scale;   /* of the scores */
} KvLayer;

/* Writes k and v [tokens][kv_heads][head_dim], tokens `k_stride` and `v_stride` apart, to place slots[t], page times
 * page_size plus offset. */
void kv_append(const KvLayer *layer, const uint16_t *k, int64_t k_stride, const uint16_t *v, int64_t v_stride,
               const int64_t *slots, int64_t tokens);

/* out[t] = attention of q[t], [kv_heads * group][head_dim], tokens `stride` apart, to the first lens[t] tokens of the
 * pages tables[t * width ...]; out is dense. head_dim is a multiple of 16, up to 256. */
void kv_attend_rows(const KvLayer *layer, const uint16_t *q, int64_t stride, uint16_t *out, const int64_t *tables,
                    int64_t width, const int64_t *lens, int64_t tokens);

/* Weights of a layer of grouped-query attention and a gated MLP, [outputs][inputs] each; norms are [inputs]. */
typedef struct {
  const uint16_t *attention_norm, *qkv;
  const uint16_t *head_norm; /* of query heads and of key heads, [2][head_dim], or NULL */
  const uint16_t *output, *mlp_norm, *gate_up, *down;
} KvDense;

/* Layers of the same sizes, and what is before and behind them. */
typedef struct {
  const KvDense *layers;
  const uint16_t *embedding, *norm, *head; /* [vocabulary][hidden], but for the last norm */
  const uint16_t *cos, *sin;               /* as in kv_rotate, of every position */
  int64_t vocabulary, hidden, heads, kv_heads, head_dim;
  int64_t between; /* elements between the two halves of the MLP */
  float eps, scale;
} KvStack;

/* Rows [first, first + tokens) of a step: one sequence's from position `start` on, which attend in blocks, to the pages of
 * `table`. */
typedef struct {
  int64_t first, tokens, start;
  const int64_t *table;
} KvChunk;

/* A step's rows, each of which attends by itself or in a chunk. */
typedef struct {
  uint16_t *x; /* [rows][hidden], the residual stream */
  int64_t rows;
  const int64_t *tokens; /* whose embeddings x is first, or NULL where it holds something already */
  float *logits;         /* [rows][vocabulary], of x behind the last norm, or NULL where nobody wants them */
  const int64_t *positions;
  uint16_t *pool; /* pages of layer 0; the next layer's are layer_stride elements on */
  int64_t layer_stride, page_size;
  const int64_t *slots;         /* of each row, as in kv_append */
  const int64_t *tables, *lens; /* of the rows that attend by themselves, as in kv_attend_rows */
  int64_t width;
  const int64_t *opened; /* pages that are filled with zeros first */
  int64_t opened_pages;
  const int64_t *alone; /* which rows attend by themselves: all where there is no chunk */
  int64_t alone_count;
  const KvChunk *chunks; /* at level 3 alone */
  int64_t chunk_count;
} KvStep;

/* Runs halves [first, end) of the layers: 2 l is the attention of layer l, 2 l + 1 its MLP, each on the norm of x and added
 * to x. Feed-forwards alone need no more of a step than x, rows, tokens and logits. Returns 0, or -1 without memory. */
int kv_run_layers(const KvStack *stack, const KvStep *step, int64_t first, int64_t end);

/* Bytes of the work space that kv_attend_chunk needs for `len` tokens. */
int64_t kv_chunk_work(const KvLayer *layer, int64_t len);

/* out[t] = attention of q[t], [kv_heads * group][head_dim], `stride` apart, to the first start + t + 1 tokens of the
 * pages of `table`, for all t below `tokens`. */
void kv_attend_chunk(const KvLayer *layer, const uint16_t *q, int64_t stride, uint16_t *out, const int64_t *table,
                     int64_t start, int64_t tokens, uint8_t *work);

/* cffi: end */
#endif
