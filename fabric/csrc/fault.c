/* Faults that tests ask for. Off, they cost the hot path one branch on `on`. */
#include "internal.h"

int kf_faults_set(kf_faults *faults, int kind, uint64_t value) {
  switch (kind) {
    case KF_FAULT_CORRUPT: atomic_store(&faults->corrupt, value); break;
    case KF_FAULT_FAIL: atomic_store(&faults->fail, value); break;
    case KF_FAULT_DELAY: atomic_store(&faults->delay_ns, value); break;
    default: return -EINVAL;
  }
  atomic_store(&faults->on, atomic_load(&faults->corrupt) || atomic_load(&faults->fail) || atomic_load(&faults->delay_ns));
  return 0;
}

static bool is_on(const kf_faults *faults) {
  return __builtin_expect(atomic_load_explicit(&faults->on, memory_order_relaxed), false);
}

uint64_t kf_faults_hold_until(const kf_faults *faults, uint64_t seen_ns) {
  uint64_t delay = is_on(faults) ? atomic_load(&faults->delay_ns) : 0;
  return delay ? seen_ns + delay : 0;
}

/* Counts down to the n-th write from when the fault was set: true for that write alone. */
static bool due(const kf_faults *faults, _Atomic uint64_t *countdown) {
  if (!is_on(faults) || atomic_load(countdown) == 0) return false;
  return atomic_fetch_sub(countdown, 1) == 1;
}

static void give_back(_Atomic uint64_t *countdown) {
  if (atomic_load(countdown)) atomic_fetch_add(countdown, 1);
}

/* The provider had no room: what was counted was no write. */
void kf_faults_uncount(kf_faults *faults) {
  if (!is_on(faults)) return;
  give_back(&faults->fail);
  give_back(&faults->corrupt);
}

bool kf_faults_fail(kf_faults *faults) { return due(faults, &faults->fail); }

bool kf_faults_corrupt(kf_faults *faults) { return due(faults, &faults->corrupt); }
