/* One row of what a layer does between its products. */

static void rms_norm(const uint16_t *x, const uint16_t *w, uint16_t *y, int64_t size, float eps) {
  vec squares = v_zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares = v_fma(v_widen(x + i), v_widen(x + i), squares);
  vec rest = v_widen_part(x + i, size - i);
  squares = v_fma(rest, rest, squares);
  vec scale = v_set(1.0f / __builtin_sqrtf(v_sum(squares) / (float)size + eps));
  for (i = 0; i + LANES <= size; i += LANES)
    v_narrow(y + i, v_mul(v_rounded(v_mul(v_widen(x + i), scale)), v_widen(w + i)));
  if (i < size)
    v_narrow_part(y + i, v_mul(v_rounded(v_mul(rest, scale)), v_widen_part(w + i, size - i)), size - i);
}

static inline vec silu(vec x) { return v_div(x, v_add(v_set(1), v_exp(v_sub(v_zero(), x)))); }

static void silu_times(const uint16_t *gate, const uint16_t *up, uint16_t *y, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) v_narrow(y + i, v_mul(silu(v_widen(gate + i)), v_widen(up + i)));
  if (i < size) {
    vec rest = silu(v_widen_part(gate + i, size - i));
    v_narrow_part(y + i, v_mul(rest, v_widen_part(up + i, size - i)), size - i);
  }
}

/* Turns the n elements at i, whose partners are at `other`. */
static inline void turn(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t i,
                        int64_t other, int64_t n) {
  if (n == LANES)
    v_narrow(y + i, v_fma(v_widen(x + other), v_widen(sin + i), v_mul(v_widen(x + i), v_widen(cos + i))));
  else
    v_narrow_part(y + i,
                  v_fma(v_widen_part(x + other, n), v_widen_part(sin + i, n),
                        v_mul(v_widen_part(x + i, n), v_widen_part(cos + i, n))),
                  n);
}

static void rotate(const uint16_t *x, const uint16_t *cos, const uint16_t *sin, uint16_t *y, int64_t size) {
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    int64_t n = half - i < LANES ? half - i : LANES;
    turn(x, cos, sin, y, i, half + i, n);
    turn(x, cos, sin, y, half + i, i, n);
  }
}

static inline float widened(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

static void widen(const uint16_t *x, float *y, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) v_store(y + i, v_widen(x + i));
  for (; i < size; i++) y[i] = widened(x[i]);
}

static void add(uint16_t *x, const uint16_t *y, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) v_narrow(x + i, v_add(v_widen(x + i), v_widen(y + i)));
  v_narrow_part(x + i, v_add(v_widen_part(x + i, size - i), v_widen_part(y + i, size - i)), size - i);
}
