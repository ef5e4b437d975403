/* Random schedules against kf_schedule_check, under a sanitizer: `fuzz_schedule SEED COUNT`.
 *
 * Numbers are drawn small, so that half of the schedules fit and every page can be looked at, or from the edges of 64
 * bits. What is taken must lie inside both regions, the page and the layer, by arithmetic in 128 bits; what is refused
 * must have a page that does not, and a text that says so. */
#include "internal.h"

#include "check.h"

#include <stdlib.h>
#include <string.h>

typedef unsigned __int128 wide;

enum { MOST_RUNS = 4 };

static uint64_t state;

static uint64_t draw(void) { /* xorshift64 */
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

static uint64_t below(uint64_t n) { return draw() % n; }

static uint64_t number(void) {
  static const uint64_t edges[] = {0, 1, 63, 64, 65, 512, 513, UINT32_MAX, INT64_MAX, UINT64_MAX - 1, UINT64_MAX};
  if (below(24) == 0) return draw();
  return below(12) == 0 ? edges[below(sizeof edges / sizeof *edges)] : below(9) * 8;
}

static int32_t page(void) {
  static const int32_t edges[] = {-1, INT32_MIN, INT32_MAX, INT32_MAX - 1};
  return below(24) == 0 ? edges[below(4)] : (int32_t)below(6);
}

typedef struct {
  uint64_t start, layer_stride, page_stride, offset, room;
} view;

static bool page_fits(const view *v, const kf_schedule *plan, int64_t index) {
  wide end_of_page = ((wide)index + 1) * v->page_stride;
  wide in_region = (wide)v->start + (wide)(plan->layers - 1) * v->layer_stride + (wide)index * v->page_stride + v->offset;
  if (in_region + plan->length > v->room) return false;
  return plan->layers == 1 || v->layer_stride < v->page_stride || end_of_page <= v->layer_stride;
}

static bool side_fits(const view *v, const kf_schedule *plan, bool source) {
  if ((wide)v->offset + plan->length > v->page_stride) return false;
  for (uint32_t i = 0; i < plan->run_count; i++) {
    int64_t first = source ? plan->runs[i].source : plan->runs[i].destination, count = plan->runs[i].count;
    if (first < 0 || count < 1) return false;
    int64_t step = count > 64 ? count - 1 : 1; /* of a large run its ends: places grow with the page */
    for (int64_t k = 0; k < count; k += step)
      if (!page_fits(v, plan, first + k)) return false;
  }
  return true;
}

static bool fits(const kf_schedule *p) {
  const view source = {p->source_start, p->source_layer_stride, p->source_page_stride, p->source_offset, p->region->length};
  const view target = {p->destination_start, p->destination_layer_stride, p->destination_page_stride,
                       p->destination_offset, p->remote.length};
  if (p->layers == 0 || p->length == 0 || p->slot >= KF_MAX_SLOTS || p->generation >= KF_MAX_GENERATIONS) return false;
  return p->remote.domains == p->peer->domains && side_fits(&source, p, true) && side_fits(&target, p, false);
}

static bool one(void) {
  uint32_t count = (uint32_t)below(MOST_RUNS + 1);
  kf_run *runs = malloc((count ? count : 1) * sizeof *runs); /* of its exact size, so that a look beyond it is seen */
  CHECK(runs);
  for (uint32_t i = 0; i < count; i++) runs[i] = (kf_run){page(), page(), below(24) ? (int32_t)below(3) + 1 : page()};
  kf_region region = {.length = below(3) ? 512 : number()};
  kf_peer peer = {.domains = 1};
  kf_schedule plan = {
      .layers = below(24) ? (uint32_t)below(3) + 1 : (uint32_t)number(),
      .slot = below(24) ? (uint32_t)below(KF_MAX_SLOTS) : (uint32_t)number(),
      .generation = below(24) ? (uint32_t)below(KF_MAX_GENERATIONS) : (uint32_t)number(),
      .run_count = count, .region = &region, .peer = &peer, .runs = runs,
      .remote = {.length = below(3) ? 512 : number(), .domains = below(24) ? 1 : (uint32_t)number()},
      .source_start = below(2) ? 0 : number(), .destination_start = below(2) ? 0 : number(),
      .source_layer_stride = below(2) ? 128 : number(), .destination_layer_stride = below(2) ? 128 : number(),
      .source_page_stride = below(4) ? 32 : number(), .destination_page_stride = below(4) ? 32 : number(),
      .source_offset = below(2) ? 0 : number(), .destination_offset = below(2) ? 0 : number(),
      .length = below(4) ? below(33) : number()};
  kf_error error = {0};
  bool taken = kf_schedule_check(&plan, &error) == 0;
  CHECK(taken == fits(&plan));
  CHECK(taken == (error.text[0] == 0) && taken == (error.code == 0) && memchr(error.text, 0, sizeof error.text));
  free(runs);
  return taken;
}

int main(int argc, char **argv) {
  uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 100000, taken = 0;
  state = (argc > 1 ? strtoull(argv[1], NULL, 10) : 1) * 0x9E3779B97F4A7C15u + 1;
  for (uint64_t i = 0; i < count; i++) taken += one();
  printf("%llu of %llu schedules taken\n", (unsigned long long)taken, (unsigned long long)count);
  CHECK(count < 1000 || (taken > count / 50 && taken < count - count / 50)); /* or nothing was tried */
  return 0;
}
