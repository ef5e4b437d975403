/* Opening, closing, and the calls that other threads make. */
#include "internal.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int kf_fail(kf_error *error, int code, const char *format, ...) {
  if (!error) return code;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  error->code = code;
  return code;
}

const char *kf_strerror(int code) { return fi_strerror(code < 0 ? -code : code); }

static int open_locks(kf_engine *e) {
  int rc = -pthread_mutex_init(&e->helm, NULL);
  if (rc == 0) rc = -pthread_mutex_init(&e->command_lock, NULL);
  if (rc == 0) rc = -pthread_cond_init(&e->command_done, NULL);
  if (rc == 0) rc = kf_events_open(&e->events);
  if (rc == 0) rc = kf_slots_open(&e->slots, &e->events);
  if (rc == 0) rc = kf_registry_open(&e->registry);
  return rc;
}

/* Locks hold nothing that is to be given back. */
static void unprepare(kf_engine *e) {
  if (e->events.fd >= 0) (void)close(e->events.fd);
  if (e->wake_fd >= 0) (void)close(e->wake_fd);
}

static int prepare(kf_engine *e, const kf_options *options) {
  e->events.fd = -1;
  e->options = *options;
  snprintf(e->provider_name, sizeof e->provider_name, "%s", options->provider);
  e->options.provider = e->provider_name;
  const kf_provider *provider = kf_provider_find(options->provider);
  if (e->options.window_bytes == 0 && provider) e->options.window_bytes = provider->window_bytes;
  e->active.next = e->active.previous = &e->active;
  e->domain_count = options->domains;
  for (uint32_t i = 0; i < KF_MAX_DOMAINS; i++) {
    e->domains[i].index = i;
    e->domains[i].wait_fd = -1;
  }
  e->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (e->wake_fd < 0) return -errno;
  e->pace.spin_ns = options->spin_ns;
  return open_locks(e);
}

/* Signals belong to the application's threads. */
static int start_thread(kf_engine *e) {
  sigset_t all, before;
  sigfillset(&all);
  int rc = pthread_sigmask(SIG_SETMASK, &all, &before);
  if (rc) return -rc;
  rc = pthread_create(&e->thread, NULL, kf_thread_main, e);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* it took `all` */
  if (rc) return -rc;
  (void)pthread_setname_np(e->thread, "kvferry-fabric");
  pthread_mutex_lock(&e->command_lock);
  while (!e->opened) pthread_cond_wait(&e->command_done, &e->command_lock);
  rc = e->open_result;
  pthread_mutex_unlock(&e->command_lock);
  return rc;
}

static void free_engine(kf_engine *e) {
  kf_memory_close(e);
  for (uint32_t i = 0; i < e->domain_count; i++) kf_domain_close(&e->domains[i]);
  kf_peers_close(e);
  kf_local_close(e);
  kf_counters_close(e);
  kf_registry_close(&e->registry);
  kf_slots_close(&e->slots);
  kf_events_close(&e->events);
  (void)close(e->wake_fd);
  (void)pthread_cond_destroy(&e->command_done);
  (void)pthread_mutex_destroy(&e->command_lock);
  (void)pthread_mutex_destroy(&e->helm);
  free(e->writes);
  free(e);
}

kf_engine *kf_open(const kf_options *options, kf_error *error) {
  if ((options->domains == 0 && !options->local) || options->domains > KF_MAX_DOMAINS) {
    kf_fail(error, -EINVAL, "an engine has 1 to %d domains, or serves its host alone, not %u", KF_MAX_DOMAINS, options->domains);
    return NULL;
  }
  if (options->window == 0 || options->max_write_bytes == 0) {
    kf_fail(error, -EINVAL, "window and write size must be at least 1");
    return NULL;
  }
  kf_engine *e = calloc(1, sizeof *e);
  int rc = e ? prepare(e, options) : -ENOMEM;
  if (rc) {
    kf_fail(error, rc, "cannot open a transfer engine: %s", fi_strerror(-rc));
    if (e) unprepare(e);
    free(e);
    return NULL;
  }
  error->text[0] = 0;
  e->open_error = error;
  rc = start_thread(e);
  if (rc == 0) return e;
  if (error->text[0] == 0) kf_fail(error, rc, "cannot start the fabric's thread: %s", fi_strerror(-rc));
  if (e->opened) (void)pthread_join(e->thread, NULL);
  free_engine(e);
  return NULL;
}

void kf_close(kf_engine *engine) {
  atomic_store(&engine->stopping, true);
  kf_wake(engine);
  (void)pthread_join(engine->thread, NULL);
  free_engine(engine);
}

int kf_address(kf_engine *engine, uint32_t domain, unsigned char *bytes, uint32_t room, uint32_t *length) {
  if (domain >= engine->domain_count) return -EINVAL;
  const kf_domain *d = &engine->domains[domain];
  if (room < d->address_length) return -ENOBUFS;
  memcpy(bytes, d->address, d->address_length);
  *length = (uint32_t)d->address_length;
  return 0;
}

int kf_event_fd(kf_engine *engine) { return engine->events.fd; }

int kf_expect(kf_engine *engine, uint32_t slot, uint32_t generation, uint64_t pages) {
  int rc = kf_slots_expect(&engine->slots, slot, generation, pages);
  if (rc) return rc;
  atomic_store(&engine->armed_ns, kf_now());
  kf_wake(engine);
  return 0;
}

int kf_disarm(kf_engine *engine, uint32_t slot, uint32_t generation) {
  return kf_slots_disarm(&engine->slots, slot, generation);
}

uint64_t kf_arrived(kf_engine *engine, uint32_t slot) { return kf_slots_arrived(&engine->slots, slot); }

int kf_poll_events(kf_engine *engine, kf_event *events, int room) {
  return kf_events_take(&engine->events, events, room);
}

int kf_fault(kf_engine *engine, int kind, uint64_t value) {
  int rc = kf_faults_set(&engine->faults, kind, value);
  kf_wake(engine);
  return rc;
}

void kf_stats(kf_engine *e, kf_stats_values *values) {
  *values = (kf_stats_values){.armed_slots = atomic_load(&e->slots.armed),
                              .active_transfers = atomic_load(&e->active_transfers),
                              .held_transfers = atomic_load(&e->held_transfers),
                              .in_flight_writes = atomic_load(&e->in_flight),
                              .regions = atomic_load(&e->regions),
                              .peers = atomic_load(&e->peer_count),
                              .counters = atomic_load(&e->counters),
                              .stale_immediates = atomic_load(&e->slots.stale),
                              .writes = atomic_load(&e->total_writes),
                              .pages = atomic_load(&e->total_pages),
                              .bytes = atomic_load(&e->total_bytes),
                              .local_bytes = atomic_load(&e->local_bytes),
                              .arrivals = atomic_load(&e->slots.counted),
                              .errors = atomic_load(&e->errors),
                              .sleeps = atomic_load(&e->sleeps),
                              .outages = atomic_load(&e->outages)};
}
