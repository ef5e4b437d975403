/* Slots and the event queue without libfabric: one thread counts, as the engine's does, while another arms and polls. */
#include "internal.h"

#include "check.h"

#include <string.h>

#define ROUNDS 3000

static kf_events events;
static kf_slots slots;
static _Atomic bool stop;

static void count_one(kf_slots *to, uint32_t immediate, uint64_t now_ns) { kf_slots_count(to, &immediate, 1, now_ns); }

static void counts_to_the_expected_number(void) {
  kf_event got[4];
  CHECK(kf_slots_expect(&slots, 7, 3, 10) == 0);
  CHECK(kf_slots_expect(&slots, 7, 4, 10) == -EBUSY);
  count_one(&slots, kf_immediate_pack(7, 3, 4), 100);
  count_one(&slots, kf_immediate_pack(7, 2, 6), 101); /* another generation */
  count_one(&slots, kf_immediate_pack(8, 3, 6), 102); /* not armed */
  CHECK(kf_slots_arrived(&slots, 7) == 4 && atomic_load(&slots.stale) == 2);
  CHECK(kf_events_take(&events, got, 4) == 0);
  count_one(&slots, kf_immediate_pack(7, 3, 6), 103);
  CHECK(kf_events_take(&events, got, 4) == 1);
  CHECK(got[0].kind == KF_ARRIVED && got[0].slot == 7 && got[0].generation == 3 && got[0].pages == 10);
  CHECK(got[0].first_ns == 100 && got[0].last_ns == 103);
  count_one(&slots, kf_immediate_pack(7, 3, 1), 104);
  count_one(&slots, kf_immediate_pack(7, 3, 1), 105); /* told once */
  CHECK(kf_events_take(&events, got, 4) == 1 && got[0].kind == KF_OVERRUN && got[0].pages == 11);
  CHECK(kf_slots_disarm(&slots, 7, 2) == 0 && kf_slots_disarm(&slots, 7, 3) == 1);
  CHECK(atomic_load(&slots.armed) == 0);
}

static void a_write_that_jumps_over_the_number_is_no_arrival(void) {
  kf_event got[4];
  CHECK(kf_slots_expect(&slots, 1, 1, 5) == 0);
  count_one(&slots, kf_immediate_pack(1, 1, 9), 1);
  CHECK(kf_events_take(&events, got, 4) == 1 && got[0].kind == KF_OVERRUN);
  CHECK(kf_slots_disarm(&slots, 1, 1) == 1);
}

static void refuses_what_does_not_fit(void) {
  CHECK(kf_slots_expect(&slots, KF_MAX_SLOTS, 0, 1) == -EINVAL);
  CHECK(kf_slots_expect(&slots, 0, KF_MAX_GENERATIONS, 1) == -EINVAL);
  CHECK(kf_slots_disarm(&slots, KF_MAX_SLOTS, 0) == -EINVAL);
  CHECK(kf_slots_arrived(&slots, KF_MAX_SLOTS) == 0);
}

static void *count_for_ever(void *unused) {
  for (uint32_t i = 0; !atomic_load(&stop); i++) count_one(&slots, kf_immediate_pack(i & 3, (i >> 2) & 1, 1), i + 1);
  return unused;
}

static void arming_and_counting_at_once(void) {
  pthread_t counter;
  kf_event got[8];
  uint64_t arrived = 0;
  CHECK(pthread_create(&counter, NULL, count_for_ever, NULL) == 0);
  for (uint32_t i = 0; i < ROUNDS; i++) {
    uint32_t slot = i & 3, generation = (i >> 2) & 1;
    CHECK(kf_slots_expect(&slots, slot, generation, i % 5) == 0);
    if (i % 7 == 0)
      while (kf_slots_arrived(&slots, slot) < i % 5) continue;
    int n = kf_events_take(&events, got, 8);
    for (int k = 0; k < n; k++) arrived += got[k].kind == KF_ARRIVED;
    CHECK(kf_slots_disarm(&slots, slot, generation) == 1);
  }
  atomic_store(&stop, true);
  CHECK(pthread_join(counter, NULL) == 0);
  CHECK(arrived >= ROUNDS / 7);
  CHECK(kf_events_take(&events, got, 8) == 0);
}

int main(void) {
  CHECK(kf_events_open(&events) == 0);
  CHECK(kf_slots_open(&slots, &events) == 0);
  counts_to_the_expected_number();
  a_write_that_jumps_over_the_number_is_no_arrival();
  refuses_what_does_not_fit();
  arming_and_counting_at_once();
  CHECK(kf_slots_expect(&slots, 9, 9, 0) == 0); /* left armed: closing frees it */
  kf_slots_close(&slots);
  kf_events_close(&events);
  return 0;
}
