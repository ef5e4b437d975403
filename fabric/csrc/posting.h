/* What a transfer writes next: from its schedule, by batches of pages and turns, to their completion. */
#ifndef KF_POSTING_H
#define KF_POSTING_H

#include "transfer.h"

/* ---- schedule.c ---- */
int kf_schedule_check(const kf_schedule *plan, kf_error *error);
bool kf_schedule_moved(const kf_engine *engine);
bool kf_schedule_follow(kf_transfer *transfer);
bool kf_schedule_watch(kf_engine *engine);

/* One that is posted, until it completes. */
typedef struct kf_write {
  struct fi_context2 context; /* first: libfabric gives its address back */
  kf_transfer *transfer;
  kf_path *path;
  uint64_t bytes;         /* that have landed once this is complete: of this write and of unsealed ones before it */
  unsigned char *flipped; /* byte that the CORRUPT fault turned, to be turned back */
  bool orphan;            /* its receiver is dead: kf_complete_dead_peers */
  struct kf_write *next;
} kf_write;

/* The pages that one write carries. */
typedef struct {
  struct iovec local[KF_GATHER_MAX];
  void *descriptors[KF_GATHER_MAX];
  struct fi_rma_iov remote[KF_GATHER_MAX];
  uint32_t parts;
  uint32_t pages;
  uint64_t bytes;
  uint32_t run; /* where the next write of this layer begins; run_count: there is none */
  int32_t page;
} kf_batch;

/* ---- batch.c ---- */
void kf_batch_fill(const kf_engine *engine, const kf_transfer *transfer, const kf_path *path, kf_batch *batch);
void kf_batch_first(const kf_transfer *transfer, const kf_path *path, kf_batch *batch); /* the first page of the first layer */

/* ---- post.c ---- */
bool kf_post_turn(kf_engine *engine, kf_transfer *transfer);
void kf_post_at_once(kf_engine *engine, kf_transfer *transfer);
bool kf_post_round(kf_engine *engine);
void kf_post_take_off(kf_engine *engine, kf_transfer *transfer, kf_path *path, kf_write *write, uint64_t bytes, bool seal);
void kf_post_account(kf_engine *engine, kf_transfer *transfer, const kf_batch *batch, uint64_t now_ns);
void kf_post_advance(kf_engine *engine, kf_transfer *transfer, const kf_batch *batch);
bool kf_post_stalled_too_long(kf_engine *engine, kf_transfer *transfer);
bool kf_post_held_back(kf_engine *engine, const kf_transfer *transfer);

/* ---- flush.c ---- */
bool kf_flush_may_follow(const kf_transfer *transfer, const kf_path *path);
bool kf_flush(kf_engine *engine, kf_transfer *transfer);

/* ---- complete.c ---- */
bool kf_complete_round(kf_engine *engine);
bool kf_complete_dead_peers(kf_engine *engine);

/* ---- fault.c ---- */
typedef struct {
  _Atomic bool on; /* any of the three; the one branch that the hot path pays */
  _Atomic uint64_t corrupt;
  _Atomic uint64_t fail;
  _Atomic uint64_t delay_ns;
} kf_faults;

int kf_faults_set(kf_faults *faults, int kind, uint64_t value);
uint64_t kf_faults_hold_until(const kf_faults *faults, uint64_t seen_ns);
bool kf_faults_fail(kf_faults *faults);
void kf_faults_uncount(kf_faults *faults);
bool kf_faults_corrupt(kf_faults *faults);

#endif
