/* The state machine's table, ids, and the bounds checks, without an endpoint. */
#include "internal.h"

#include "check.h"

#include <string.h>

static void only_draining_leads_to_an_end(void) {
  for (kf_state from = KF_WAITING; from < KF_STATES; from++)
    for (kf_state to = KF_WAITING; to < KF_STATES; to++) {
      bool is_end = to >= KF_END_DONE;
      if (is_end) CHECK(kf_state_allows(from, to) == (from == KF_DRAINING));
      if (from >= KF_DRAINING && !is_end) CHECK(!kf_state_allows(from, to));
    }
  CHECK(kf_state_allows(KF_WAITING, KF_POSTING) && kf_state_allows(KF_POSTING, KF_WAITING));
  CHECK(kf_state_allows(KF_WAITING, KF_DRAINING) && kf_state_allows(KF_POSTING, KF_DRAINING));
}

static void what_is_out_is_tried_before_it_is_healthy(void) {
  CHECK(kf_health_allows(KF_HEALTHY, KF_OUT) && kf_health_allows(KF_TRIED, KF_OUT));
  CHECK(kf_health_allows(KF_OUT, KF_TRIED) && kf_health_allows(KF_TRIED, KF_HEALTHY));
  CHECK(!kf_health_allows(KF_OUT, KF_HEALTHY) && !kf_health_allows(KF_HEALTHY, KF_TRIED));
}

static char memory[4096];
static kf_region region = {.start = memory, .length = sizeof memory};
static kf_peer peer = {.domains = 1};

static kf_schedule plan_of(const kf_run *runs, uint32_t count) {
  return (kf_schedule){.layers = 2, .run_count = count, .runs = runs, .region = &region, .peer = &peer,
                       .remote = {.length = sizeof memory, .domains = 1}, .source_layer_stride = 2048,
                       .destination_layer_stride = 2048, .source_page_stride = 256, .destination_page_stride = 256,
                       .length = 256};
}

static void ids_are_never_used_twice(void) {
  enum { N = 200 };
  static kf_transfer *transfers[N];
  uint64_t first_ids[N];
  kf_registry registry = {0};
  kf_run run = {0, 0, 1};
  kf_schedule plan = plan_of(&run, 1);
  CHECK(kf_registry_open(&registry) == 0);
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < N; i++) {
      transfers[i] = kf_transfer_new(&plan, round == 1);
      CHECK(transfers[i] && kf_registry_add(&registry, transfers[i]) == 0);
      CHECK(kf_registry_get(&registry, transfers[i]->id) == transfers[i]);
      if (round == 0) first_ids[i] = transfers[i]->id;
    }
    for (int i = 0; i < N; i++) CHECK(round == 0 || kf_registry_get(&registry, first_ids[i]) == NULL);
    for (int i = 0; i < N - 3 * round; i++) { /* the last three are left to the registry */
      kf_registry_remove(&registry, transfers[i]);
      kf_transfer_free(transfers[i]);
    }
  }
  CHECK(kf_registry_get(&registry, 0) == NULL && kf_registry_get(&registry, UINT64_MAX) == NULL);
  kf_registry_close(&registry);
}

static void schedules_are_checked(void) {
  kf_error error = {0};
  kf_run good[] = {{0, 7, 1}, {4, 0, 4}}, past[] = {{0, 0, 1}, {5, 0, 4}}, negative[] = {{0, -1, 1}};
  kf_schedule plan = plan_of(good, 2);
  CHECK(kf_schedule_check(&plan, &error) == 0);
  plan = plan_of(past, 2);
  CHECK(kf_schedule_check(&plan, &error) == -ERANGE && strstr(error.text, "run 1 (source pages 5..8"));
  plan = plan_of(negative, 1);
  CHECK(kf_schedule_check(&plan, &error) == -ERANGE && strstr(error.text, "destination page -1"));
  plan = plan_of(good, 2);
  plan.remote.length--;
  CHECK(kf_schedule_check(&plan, &error) == -ERANGE);
  plan = plan_of(good, 2);
  plan.layers = UINT32_MAX;
  plan.source_layer_stride = plan.destination_layer_stride = UINT64_MAX / 2; /* products beyond 64 bits */
  CHECK(kf_schedule_check(&plan, &error) == -ERANGE);
  plan = plan_of(good, 2);
  plan.remote.domains = 2;
  CHECK(kf_schedule_check(&plan, &error) == -EINVAL && strstr(error.text, "2 domains"));
  plan = plan_of(good, 2);
  plan.length = UINT64_MAX;
  CHECK(kf_schedule_check(&plan, NULL) == -ERANGE);
}

int main(void) {
  only_draining_leads_to_an_end();
  what_is_out_is_tried_before_it_is_healthy();
  ids_are_never_used_twice();
  schedules_are_checked();
  return 0;
}
