/* Threads of one parallel region that go through the same phases together. What a phase has to do is in pieces that
 * whoever is free takes, the next ones first in runs: what is read there follows on. Between two phases all meet. */
#ifndef KV_TEAM_H
#define KV_TEAM_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "level.h"

/* Looks for others while awake, some 20 us. Who waits longer has likely lost a core to another process and sleeps, so
 * that it costs that process no more than this. */
#define KV_LOOKS 600

/* What has been taken of a thread's share of a phase, in a line of the cache for itself. */
typedef struct {
  _Alignas(KV_LINE) _Atomic int64_t taken;
} KvShare;

typedef struct {
  _Atomic int threads, arrived, asleep;
  _Atomic uint32_t phase;
  _Atomic int64_t next;
  KvShare *shares; /* of each thread, or NULL where nobody calls kv_take_near */
} KvTeam;

/* The next pieces [first, end) of `count` that are the caller's. 0 where none is left. */
static inline int kv_take(KvTeam *team, int64_t count, int64_t *first, int64_t *end) {
  int64_t at = atomic_load(&team->next), some;
  do {
    if (at >= count) return 0;
    some = (count - at) / (2 * team->threads);
    some = some ? some : 1;
  } while (!atomic_compare_exchange_weak(&team->next, &at, at + some));
  *first = at, *end = at + some;
  return 1;
}

/* The next of `count` pieces, out of the share of thread `me` as long as there is one: a thread has about the same rows in
 * each phase, which are in its core's cache. Then it helps others. 0 where none is left. */
static inline int kv_take_near(KvTeam *team, int me, int64_t count, int64_t *piece) {
  const int threads = team->threads;
  for (int i = 0; i < threads; i++) {
    const int whose = (me + i) % threads;
    const int64_t first = count * whose / threads, end = count * (whose + 1) / threads;
    *piece = first + atomic_fetch_add(&team->shares[whose].taken, 1);
    if (*piece < end) return 1;
  }
  return 0;
}

static inline void kv_sleep(KvTeam *team, uint32_t phase) {
  atomic_fetch_add(&team->asleep, 1);
  /* Whatever it returns, the phase says whether to wait on. */
  while (atomic_load(&team->phase) == phase) syscall(SYS_futex, &team->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
  atomic_fetch_sub(&team->asleep, 1);
}

/* Waits until all threads of the team are here: what they wrote before is then seen by all. */
static inline void kv_meet(KvTeam *team) {
  uint32_t phase = atomic_load(&team->phase);
  if (atomic_fetch_add(&team->arrived, 1) + 1 == team->threads) {
    atomic_store(&team->arrived, 0);
    atomic_store(&team->next, 0);
    for (int t = 0; team->shares && t < team->threads; t++) atomic_store(&team->shares[t].taken, 0);
    atomic_store(&team->phase, phase + 1);
    if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    return;
  }
  for (int looks = 0; looks < KV_LOOKS; looks++) {
    if (atomic_load(&team->phase) != phase) return;
    __builtin_ia32_pause();
  }
  kv_sleep(team, phase);
}

#endif
