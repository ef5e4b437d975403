/* What every file of the fabric needs: the public interface, the system's headers, the clock, totals, and errors. */
#ifndef KF_BASE_H
#define KF_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll, pthread_setname_np */
#endif

#include "kf.h"

#include <errno.h>
#include <net/if.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#define KF_ADDRESS_MAX 256
#define KF_GATHER_MAX 8
#define KF_CACHE_LINE 64
#define KF_WAY 96 /* text that names a path */

typedef struct kf_local kf_local;
typedef struct kf_link kf_link;
typedef struct kf_transfer kf_transfer;

int kf_fail(kf_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

static inline uint64_t kf_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Totals that only the engine's thread writes: a plain add without a locked instruction. */
static inline void kf_add(_Atomic uint64_t *total, uint64_t n) {
  atomic_store_explicit(total, atomic_load_explicit(total, memory_order_relaxed) + n, memory_order_relaxed);
}
static inline void kf_sub(_Atomic uint64_t *total, uint64_t n) { kf_add(total, (uint64_t)0 - n); }

#endif
