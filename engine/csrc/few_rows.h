/* Products of a few rows with a large bfloat16 matrix, bound by reading the matrix once. */
#ifndef KV_FEW_ROWS_H
#define KV_FEW_ROWS_H

#include <stdint.h>

/* The text between the two marks is also what cffi reads. */
/* cffi: begin */

/* Whether this processor has what the product needs (AVX2 and FMA). */
int kv_few_rows_supported(void);

/* y = x W^T, W [outputs][inputs] bfloat16, x [rows][inputs] float32, y [rows][outputs] bfloat16; all dense.
 * Sums in float32, rounds to nearest even. Runs on as many threads as OpenMP gives. */
void kv_few_rows(const uint16_t *w, const float *x, uint16_t *y, int64_t rows, int64_t outputs, int64_t inputs);

/* cffi: end */
#endif
