/* The engine's thread: nearly all calls of libfabric are its own. It spins briefly while there is work, then sleeps. */
#include "internal.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define US 1000u
#define MS 1000000u
#define SAFETY_NS (10 * MS)       /* asleep with work: the queue's fd wakes us, this is the net below it */
#define RETRY_NS (200 * US)       /* the provider had no room or is connecting */
#define WATCH_NS (20 * US)        /* a layer counter is awaited that moves without waking anybody */
#define NAP_FIRST_NS (20 * US)    /* providers without an fd: naps double from here... */
#define NAP_BUSY_NS (200 * US)    /* ...to here while writes are in flight, */
#define NAP_ARMED_NS (1 * MS)     /* ...to here while slots are armed or layers awaited, */
#define NAP_LISTENING_NS (20 * MS) /* ...to here while memory is registered that peers may still write to: 0.15 % of a core */
#define TIMER_SLACK_NS (5 * US)
#define SLICE_NS (100 * US)
#define KEEP_POLICY 8 /* SCHED_FLAG_KEEP_POLICY */
#define FOREVER UINT64_MAX
#define DEAD_CHECK_NS (100 * MS) /* so often, while writes are in flight, see whether the receivers live */
#define DRAIN_NS (1000ull * MS) /* at close, at most, for writes in flight */
#define QUIET_NS (20 * MS)      /* at close, without any completion */

static bool has_work(const kf_engine *e) {
  return atomic_load(&e->in_flight) || atomic_load(&e->active_transfers) || atomic_load(&e->slots.armed);
}

/* Without an fd only our own look shows what has come. */
static uint64_t nap(kf_engine *e) {
  uint64_t longest = NAP_LISTENING_NS;
  if (atomic_load(&e->in_flight))
    longest = NAP_BUSY_NS;
  else if (has_work(e))
    longest = NAP_ARMED_NS;
  else if (!atomic_load(&e->regions))
    return FOREVER;
  e->nap_ns = e->nap_ns ? 2 * e->nap_ns : NAP_FIRST_NS;
  if (e->nap_ns > longest) e->nap_ns = longest;
  return e->nap_ns;
}

static uint64_t sleep_limit(kf_engine *e) {
  uint64_t limit = FOREVER;
  if (!kf_domains_have_fds(e))
    limit = nap(e);
  else if (has_work(e))
    limit = SAFETY_NS;
  if (e->stalled && limit > RETRY_NS) limit = RETRY_NS;
  if (limit > WATCH_NS && kf_counters_silent(e)) limit = WATCH_NS;
  if (e->hold_until_ns) {
    uint64_t now = kf_now();
    uint64_t left = e->hold_until_ns > now ? e->hold_until_ns - now : 1;
    if (left < limit) limit = left;
  }
  return limit;
}

static void clear_wake(kf_engine *e) {
  uint64_t count;
  ssize_t n;
  do n = read(e->wake_fd, &count, sizeof count);
  while (n < 0 && errno == EINTR); /* EAGAIN: nobody woke us */
}

/* True if it was woken by somebody, not by the completion queue. */
static bool wait_fds(kf_engine *e, uint64_t limit) {
  struct pollfd fds[2 + KF_MAX_DOMAINS] = {{e->wake_fd, POLLIN, 0}, {kf_local_fd(e), POLLIN, 0}};
  nfds_t count = 2; /* poll() passes over an fd of -1 */
  for (uint32_t i = 0; kf_domains_have_fds(e) && i < e->domain_count; i++)
    fds[count++] = (struct pollfd){e->domains[i].wait_fd, POLLIN, 0};
  struct timespec timeout = {(time_t)(limit / 1000000000u), (long)(limit % 1000000000u)};
  atomic_fetch_add(&e->sleeps, 1);
  int n = ppoll(fds, count, limit == FOREVER ? NULL : &timeout, NULL);
  if (n < 0 && errno != EINTR) kf_add(&e->errors, 1);
  return n > 0 && fds[0].revents;
}

static bool queues_want_reading(kf_engine *e) {
  for (uint32_t i = 0; i < e->domain_count; i++) {
    struct fid *queue = &e->domains[i].cq->fid;
    if (fi_trywait(e->domains[i].fabric, &queue, 1)) return true;
  }
  return false;
}

/* `sleeping` is set before the last look: who changes something after that look sees it and writes to wake_fd. The helm
 * is free while it sleeps. */
static void sleep_now(kf_engine *e) {
  uint64_t limit = sleep_limit(e);
  atomic_store(&e->sleeping, true);
  kf_local_set_asleep(e, true);
  bool wanted = kf_command_waiting(e) || kf_schedule_moved(e) || atomic_load(&e->stopping) || kf_local_waiting(e);
  if (!wanted && kf_domains_have_fds(e)) wanted = queues_want_reading(e);
  pthread_mutex_unlock(&e->helm);
  bool woken = !wanted && wait_fds(e, limit);
  kf_local_set_asleep(e, false);
  bool left_alone = atomic_exchange(&e->sleeping, false); /* false: someone writes, or has written, to wake_fd */
  if (woken || !left_alone) clear_wake(e);
}

static bool round_of_work(kf_engine *e) {
  bool progress = kf_command_round(e);
  progress |= kf_schedule_watch(e); /* first: it is what the thread was woken for, and costs no system call */
  progress |= kf_deadlines_round(e);
  progress |= kf_post_round(e);
  progress |= kf_local_round(e);
  progress |= kf_complete_round(e);
  return progress;
}

static bool receivers_died(kf_engine *e) {
  if (kf_domains_have_fds(e) || !atomic_load(&e->in_flight)) return false;
  uint64_t now = kf_now();
  if (now - e->dead_check_ns < DEAD_CHECK_NS) return false;
  e->dead_check_ns = now;
  return kf_complete_dead_peers(e);
}

/* One look at everything, and one wait. */
static void serve_once(kf_engine *e) {
  pthread_mutex_lock(&e->helm);
  bool progress = round_of_work(e) || receivers_died(e);
  uint64_t now = kf_now();
  if (atomic_load_explicit(&e->active_transfers, memory_order_relaxed)) kf_health_check(e, now);
  kf_pace_armed(&e->pace, atomic_load_explicit(&e->armed_ns, memory_order_relaxed));
  if (progress) {
    kf_pace_progress(&e->pace, now);
    e->nap_ns = 0;
    pthread_mutex_unlock(&e->helm);
  } else if (!e->hold_until_ns && kf_pace_awake(&e->pace, now, has_work(e) ? e->options.spin_ns : 0)) {
    pthread_mutex_unlock(&e->helm);
    kf_pace_yield(&e->pace, now);
  } else {
    kf_pace_in_vain(&e->pace);
    sleep_now(e);
  }
}

static void serve(kf_engine *e) {
  e->pace.since_ns = kf_now();
  while (!atomic_load_explicit(&e->stopping, memory_order_relaxed)) serve_once(e);
}

static void cancel_all(kf_engine *e) {
  for (kf_transfer *t = e->active.next, *next; t != &e->active; t = next) {
    next = t->next;
    if (t->state < KF_DRAINING) kf_transfer_stop(e, t, KF_END_CANCELLED, 0, "");
  }
}

/* Reads completions until `quiet_ns` have passed without any and nothing is in flight, or until the deadline. */
static void settle(kf_engine *e, uint64_t quiet_ns, uint64_t deadline) {
  uint64_t now = kf_now(), quiet_since = now;
  while (now < deadline && (atomic_load(&e->in_flight) || now - quiet_since < quiet_ns)) {
    if (kf_complete_round(e))
      quiet_since = kf_now();
    else
      wait_fds(e, NAP_BUSY_NS);
    now = kf_now();
  }
}

/* Before closing, both directions come to rest, or time is up. Ours: writes in flight read from memory that its owner
 * is about to free. Theirs: the keys go, so that further writes are refused, and what is half received is taken to its
 * end; rxm 1.17 dereferences a null pointer if its endpoint is closed in the middle of an incoming write. */
static void drain(kf_engine *e) {
  uint64_t deadline = kf_now() + DRAIN_NS;
  pthread_mutex_lock(&e->helm);
  cancel_all(e);
  settle(e, 0, deadline);
  while (!kf_memory_at_rest(e) && kf_now() < deadline)
    if (!kf_local_round(e)) wait_fds(e, NAP_BUSY_NS);
  kf_memory_revoke(e);
  settle(e, QUIET_NS, deadline + QUIET_NS);
  pthread_mutex_unlock(&e->helm);
}

static int open_writes(kf_engine *e) {
  e->write_count = e->options.window * e->domain_count;
  e->writes = calloc(e->write_count ? e->write_count : 1, sizeof *e->writes);
  if (!e->writes) return kf_fail(e->open_error, -ENOMEM, "no memory for %u writes in flight", e->write_count);
  for (uint32_t i = e->write_count; i-- > 0; e->free_writes = &e->writes[i]) e->writes[i].next = e->free_writes;
  return 0;
}

static int open_all(kf_engine *e) {
  int rc = kf_pin(&e->options, e->open_error);
  if (rc == 0) rc = open_writes(e);
  if (rc == 0 && e->options.local) rc = kf_local_open(e, e->open_error);
  for (uint32_t i = 0; rc == 0 && i < e->domain_count; i++)
    rc = kf_domain_open(&e->domains[i], &e->options, e->open_error);
  return rc;
}

static uint32_t pieces_in_a_write(const kf_engine *e) {
  size_t limit = KF_GATHER_MAX;
  for (uint32_t i = 0; i < e->domain_count; i++) {
    const struct fi_tx_attr *attr = e->domains[i].info->tx_attr;
    if (limit > attr->iov_limit) limit = attr->iov_limit;
    if (limit > attr->rma_iov_limit) limit = attr->rma_iov_limit;
  }
  if (e->options.gather && e->options.gather < limit) return e->options.gather;
  return limit ? (uint32_t)limit : 1;
}

static int open_and_report(kf_engine *e) {
  int rc = open_all(e);
  pthread_mutex_lock(&e->command_lock);
  e->opened = true;
  e->open_result = rc;
  e->open_error = NULL;
  e->commands_open = rc == 0;
  pthread_cond_broadcast(&e->command_done);
  pthread_mutex_unlock(&e->command_lock);
  return rc;
}

/* Who asks for a short slice of a core runs at once when it wakes up beside threads that compute: beside one busy thread
 * on two cores the p99 of a wake-up was 27 us instead of 2.1 ms. Linux has it since 6.12, without privilege; an older one
 * takes no notice, and a real-time thread, which has no use for it, is refused. */
static void ask_for_short_slices(void) {
  struct { /* sched_attr, which few C libraries declare */
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attr = {.size = sizeof attr, .flags = KEEP_POLICY, .nice = getpriority(PRIO_PROCESS, 0), .runtime = SLICE_NS};
  (void)syscall(SYS_sched_setattr, 0, &attr, 0);
}

void *kf_thread_main(void *engine) {
  kf_engine *e = engine;
  (void)prctl(PR_SET_TIMERSLACK, (unsigned long)TIMER_SLACK_NS); /* refused: naps are a little longer */
  ask_for_short_slices();
  if (open_and_report(e) == 0) {
    e->gather = pieces_in_a_write(e);
    serve(e);
    drain(e);
  }
  kf_command_refuse_all(e);
  return NULL;
}
