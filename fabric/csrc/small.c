/* A small write is posted by the thread that asks for it. To wake the engine's thread for it, and to wait for its turn on
 * a core, would take longer than the write itself. */
#include "internal.h"

#define SMALL_BYTES (128u << 10) /* the caller copies it into a socket in some 20 us */

static bool is_small(const kf_transfer *t) {
  uint64_t pages = 0;
  if (t->plan.counter || t->plan.layers != 1) return false;
  for (uint32_t i = 0; i < t->plan.run_count && pages * t->plan.length <= SMALL_BYTES; i++)
    pages += (uint32_t)t->runs[i].count;
  return pages && pages * t->plan.length <= SMALL_BYTES;
}

/* Commands that were sent earlier go first, and faults are the thread's to time. */
static bool free_to_act(kf_engine *engine) {
  return !kf_command_waiting(engine) && !atomic_load(&engine->stopping) && !atomic_load(&engine->faults.on);
}

/* Begins a transfer and posts its first turn, if it is small and nobody else is at the helm. False: nothing was done.
 * The transfer may be gone on return. */
bool kf_small_begin(kf_engine *engine, kf_transfer *transfer) {
  if (!is_small(transfer) || pthread_mutex_trylock(&engine->helm)) return false;
  bool acted = free_to_act(engine);
  if (acted) {
    atomic_fetch_add(&engine->active_transfers, 1);
    kf_transfer_begin(engine, transfer);
    (void)kf_schedule_follow(transfer);
    kf_post_at_once(engine, transfer);
  }
  pthread_mutex_unlock(&engine->helm);
  if (acted) kf_wake(engine); /* asleep, it has not asked to be woken for what is now in flight */
  return acted;
}
