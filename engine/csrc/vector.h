/* What either width of vectors is put to, once its own header has been read. */

static inline vec v_zero(void) { return v_set(0); }

static inline float v_sum(vec x) {
  __m128 half = v_halves(x);
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* The largest of numbers. */
static inline float v_most(vec x) {
  __m128 half = v_larger_half(x);
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* Four sums at once, each in the order in which v_sum adds. */
static inline __m128 v_sums(vec a, vec b, vec c, vec d) {
  __m128 w = v_halves(a), x = v_halves(b), y = v_halves(c), z = v_halves(d);
  __m128 wx = _mm_add_ps(_mm_unpacklo_ps(w, x), _mm_unpackhi_ps(w, x)); /* w0+w2 x0+x2 w1+w3 x1+x3 */
  __m128 yz = _mm_add_ps(_mm_unpacklo_ps(y, z), _mm_unpackhi_ps(y, z));
  return _mm_add_ps(_mm_movelh_ps(wx, yz), _mm_movehl_ps(yz, wx));
}

/* The first n of a vector, and zeros behind. */
static inline vec v_widen_part(const uint16_t *p, int64_t n) {
  uint16_t part[LANES] = {0};
  for (int64_t i = 0; i < n; i++) part[i] = p[i];
  return v_widen(part);
}

static inline void v_narrow_part(uint16_t *p, vec x, int64_t n) {
  uint16_t part[LANES];
  v_narrow(part, x);
  for (int64_t i = 0; i < n; i++) p[i] = part[i];
}

/* Of what bfloat16 keeps. */
static inline vec v_rounded(vec x) {
  uint16_t narrow[LANES];
  v_narrow(narrow, x);
  return v_widen(narrow);
}

/* e to the x, within 2 units of the last place; 0 where that is no normal number, and what is not a number stays so. */
static inline vec v_exp(vec x) {
  const vec least = v_set(-87.33f);
  vec bounded = v_max(least, v_min(v_set(88.02f), x));
  vec n = v_round(v_mul(bounded, v_set(1.44269504f)));
  vec r = v_fma(n, v_set(-0.693359375f), bounded);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  vec y = v_set(1.9875691500e-4f);
  y = v_fma(y, r, v_set(1.3981999507e-3f));
  y = v_fma(y, r, v_set(8.3334519073e-3f));
  y = v_fma(y, r, v_set(4.1665795894e-2f));
  y = v_fma(y, r, v_set(1.6666665459e-1f));
  y = v_fma(y, r, v_set(5.0000001201e-1f));
  y = v_add(v_fma(y, v_mul(r, r), r), v_set(1));
  return v_zero_below(v_times_power(y, n), x, least);
}
