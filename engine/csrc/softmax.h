/* The running softmax of one row: what was summed up to a block of keys, and what the block adds to it. */

/* Makes the scores of a row's first n keys of a block into weights, those behind them to a multiple of LANES into zeros,
 * and `sums` [dim], what was summed before, comparable with them. */
static inline void weigh(float *scores, int64_t n, float *sums, int64_t dim, float *largest, float *total) {
  float kept[LANES];
  for (int64_t j = n; j % LANES; j++) scores[j] = -__builtin_inff();
  vec most = v_set(*largest), added = v_zero();
  for (int64_t j = 0; j < n; j += LANES) most = v_max(v_load(scores + j), most);
  float now = v_most(most);
  for (int64_t j = 0; j < n; j += LANES) {
    vec weights = v_exp(v_sub(v_load(scores + j), v_set(now)));
    v_store(scores + j, weights);
    added = v_add(added, weights);
  }
  vec before = v_exp(v_set(*largest - now));
  for (int64_t d = 0; d < dim; d += LANES) v_store(sums + d, v_mul(v_load(sums + d), before));
  v_store(kept, before);
  *total = *total * kept[0] + v_sum(added);
  *largest = now;
}
