/* What transfers read from and follow: registered memory and layer counters. */
#ifndef KF_REGIONS_H
#define KF_REGIONS_H

#include "base.h"

/* ---- memory.c ---- */
struct kf_region {
  kf_region *next;
  void *start;
  uint64_t length;
  struct fid_mr *mr[KF_MAX_DOMAINS];
  void *descriptors[KF_MAX_DOMAINS];
  kf_remote remote;
  uint32_t readers; /* transfers that read from it */
  int share_fd;     /* its memfd, ours once registered; -1: no peer on this host may have it */
  uint64_t share_offset;
  bool on_device; /* in a GPU's memory: the host must not touch it */
  int device;
  int dma_buf;
  bool revoked; /* nobody on this host is granted it any more */
};

int kf_memory_register(kf_engine *engine, kf_region *region, kf_error *error);
int kf_memory_unregister(kf_engine *engine, kf_region *region, kf_error *error);
void kf_memory_revoke(kf_engine *engine);
bool kf_memory_at_rest(kf_engine *engine);
void kf_memory_close(kf_engine *engine);

/* ---- counter.c ---- */
struct kf_counter {
  _Alignas(KF_CACHE_LINE) _Atomic uint64_t value; /* alone in its cache line: compute threads write it */
  _Alignas(KF_CACHE_LINE) _Atomic uint64_t *word; /* `value`, or the caller's: that moves without waking anybody */
  kf_engine *engine;
  kf_counter *next;
  _Atomic uint32_t waiters; /* transfers that follow it */
};

void kf_counters_close(kf_engine *engine);
bool kf_counters_silent(const kf_engine *engine);

#endif
