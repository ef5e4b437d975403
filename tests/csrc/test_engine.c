/* Two engines in one process, argv[1] the provider, or `local`: layers bumped by one thread, cancelled and polled by another.
 * A second argument: `unordered`, as over a provider where writes land in any order, or `3:2`, so many domains. */
#include "internal.h"

#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 4, PAGES = 64, PAGE = 1024, TRANSFERS = 120, PATIENCE = 20000, SIZE = LAYERS * PAGES * PAGE };

typedef struct {
  kf_engine *engine;
  kf_region *region;
  unsigned char *memory;
  int fd; /* of the memory */
} side;

static const char *provider;
static bool unordered, local;
static uint32_t domain_counts[2] = {1, 1};
static kf_counter *counter;
static _Atomic int stop;

static void nap(void) {
  struct timespec ms = {0, 1000000};
  nanosleep(&ms, NULL);
}

static unsigned char *open_memory(int *fd) {
  *fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(*fd >= 0 && ftruncate(*fd, SIZE) == 0 && fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  unsigned char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  CHECK(memory != MAP_FAILED);
  return memory;
}

static void close_side(side *s) {
  kf_close(s->engine);
  CHECK(munmap(s->memory, SIZE) == 0 && close(s->fd) == 0);
}

static side open_side(int fill, uint32_t domains) {
  const char *binds[] = {"127.0.0.1", "127.0.0.2", "127.0.0.3"};
  kf_options options = {.provider = provider, .binds = binds, .domains = local ? 0 : domains, .local = local, .spin_ns = 20000, .max_write_bytes = 1 << 16,
                        .window_bytes = 1 << 18, .window = 16, .stall_ns = 5000000000u, .silence_ns = 5000000000u, .trace = 1};
  kf_error error;
  side s = {.engine = kf_open(&options, &error)};
  s.memory = open_memory(&s.fd);
  if (!s.engine) fprintf(stderr, "%s\n", error.text);
  CHECK(s.engine);
  for (int i = 0; i < SIZE; i++) s.memory[i] = fill ? (unsigned char)fill : (unsigned char)(i * 7 + i / PAGE);
  s.region = kf_register(s.engine, s.memory, SIZE, s.fd, 0, &error);
  CHECK(s.region);
  for (uint32_t i = 0; unordered && i < domains; i++) s.engine->domains[i].ordered = false; /* its thread has nothing to post yet */
  return s;
}

static kf_peer *connect_sides(side *from, side *to) {
  unsigned char addresses[KF_MAX_DOMAINS * 256], *at = addresses;
  uint32_t lengths[KF_MAX_DOMAINS], domains = to->engine->domain_count;
  kf_error error;
  for (uint32_t i = 0; i < domains; at += lengths[i++]) CHECK(kf_address(to->engine, i, at, 256, &lengths[i]) == 0);
  CHECK(kf_address(to->engine, domains, at, 256, &lengths[0]) == -EINVAL);
  const char *seat = kf_seat(to->engine);
  CHECK(local == (seat[0] != 0));
  kf_peer *peer = kf_connect(from->engine, addresses, lengths, domains, seat, &error);
  CHECK(peer && kf_connect(from->engine, addresses, lengths, domains, seat, &error) == peer); /* shared */
  CHECK(kf_disconnect(from->engine, peer, &error) == 0);
  return peer;
}

static kf_schedule plan_of(side *from, side *to, kf_peer *peer, const kf_run *runs, uint32_t count) {
  kf_schedule plan = {.counter = counter, .first_value = counter ? kf_counter_value(counter) + 1 : 0, .layers = LAYERS, .generation = 1,
                      .run_count = count, .region = from->region, .peer = peer, .source_layer_stride = PAGES * PAGE,
                      .destination_layer_stride = PAGES * PAGE, .source_page_stride = PAGE,
                      .destination_page_stride = PAGE, .length = PAGE, .runs = runs};
  kf_region_remote(to->region, &plan.remote);
  return plan;
}

static void take(kf_engine *engine, kf_event *event) {
  for (int i = 0; i < PATIENCE; i++) {
    if (kf_poll_events(engine, event, 1)) return;
    nap();
  }
  CHECK(!"an event came in time");
}

static void *bump_for_ever(void *unused) {
  while (!atomic_load(&stop)) {
    kf_counter_bump(counter, 1);
    nap();
  }
  return unused;
}

static void bytes_are_right(side *from, side *to, kf_peer *peer) {
  kf_run runs[] = {{3, 9, 5}, {20, 1, 1}, {40, 50, 14}};
  uint64_t seen[LAYERS], posted[LAYERS];
  kf_event event;
  kf_error error;
  kf_schedule plan = plan_of(from, to, peer, runs, 3);
  CHECK(kf_expect(to->engine, 0, 1, 20 * LAYERS) == 0);
  uint64_t id = kf_start(from->engine, &plan, &error);
  CHECK(id && kf_trace(from->engine, id, seen, posted, LAYERS) == -EBUSY && kf_release(from->engine, id) == -EBUSY);
  CHECK(kf_unregister(from->engine, from->region, &error) == -EBUSY && kf_counter_free(counter, &error) == -EBUSY);
  for (int layer = 0; layer < LAYERS; layer++) kf_counter_bump(counter, 1);
  take(from->engine, &event);
  CHECK(event.kind == KF_DONE && event.transfer == id && event.pages == 20 * LAYERS);
  CHECK(kf_trace(from->engine, id, seen, posted, LAYERS) == LAYERS && posted[0] >= seen[0] && seen[0]);
  CHECK(kf_release(from->engine, id) == 0 && kf_release(from->engine, id) == -ENOENT);
  take(to->engine, &event);
  CHECK(event.kind == KF_ARRIVED && kf_disarm(to->engine, 0, 1) == 1);
  for (int layer = 0; layer < LAYERS; layer++)
    for (int r = 0; r < 3; r++)
      CHECK(!memcmp(to->memory + (layer * PAGES + runs[r].destination) * PAGE,
                    from->memory + (layer * PAGES + runs[r].source) * PAGE, (size_t)runs[r].count * PAGE));
  CHECK(to->memory[0] == 0xA5 && to->memory[2 * PAGE] == 0xA5);
}

static void cancels_from_another_thread(side *from, side *to, kf_peer *peer) {
  kf_run runs[PAGES];
  kf_event event;
  kf_error error;
  pthread_t bumper;
  int ended = 0, kinds[8] = {0};
  for (int i = 0; i < PAGES; i++) runs[i] = (kf_run){i, PAGES - 1 - i, 1};
  CHECK(pthread_create(&bumper, NULL, bump_for_ever, NULL) == 0);
  for (int i = 0; i < TRANSFERS; i++) {
    kf_schedule plan = plan_of(from, to, peer, runs, (uint32_t)(i % PAGES));
    uint64_t id = kf_start(from->engine, &plan, &error);
    CHECK(id);
    if (i == TRANSFERS / 2) CHECK(kf_fault(from->engine, KF_FAULT_FAIL, 3) == 0);
    if (i == TRANSFERS / 3) CHECK(kf_fault(from->engine, KF_FAULT_CORRUPT, 2) == 0);
    if (i % 4 == 3) CHECK(kf_cancel(from->engine, id) == 0);
    for (; i - ended > 6; ended++) {
      take(from->engine, &event);
      kinds[event.kind]++;
      CHECK(kf_release(from->engine, event.transfer) == 0);
    }
  }
  for (; ended < TRANSFERS; ended++) {
    take(from->engine, &event);
    kinds[event.kind]++;
    if (ended % 2) CHECK(kf_release(from->engine, event.transfer) == 0); /* the others are freed by closing */
  }
  atomic_store(&stop, 1);
  CHECK(pthread_join(bumper, NULL) == 0);
  int failed = peer->path_count <= 1; /* with several ways, what one does not take goes by another */
  CHECK(kinds[KF_DONE] > 0 && kinds[KF_FAILED] == failed && kinds[KF_DONE] + kinds[KF_CANCELLED] + failed == TRANSFERS);
}

typedef struct {
  side *from, *to;
  kf_peer *peer;
  uint32_t half; /* of the pages of layer 0 */
} writer;

static void *write_half(void *argument) {
  writer *w = argument;
  kf_error error;
  kf_remote remote;
  kf_region_remote(w->to->region, &remote);
  for (uint64_t i = 0; i < PAGES / 2; i++) {
    uint64_t offset = (w->half * PAGES / 2 + i) * PAGE;
    CHECK(kf_write_one(w->from->engine, w->from->region, offset, w->peer, &remote, offset, PAGE, 2, 7, 0, &error));
  }
  return NULL;
}

/* Small writes are posted by whoever asks for them; the engine's thread and another writer want to do so too. */
static void small_writes_of_two_threads(side *from, side *to, kf_peer *peer) {
  writer writers[2] = {{from, to, peer, 0}, {from, to, peer, 1}};
  pthread_t threads[2];
  kf_event event;
  memset(to->memory, 0, PAGES * PAGE);
  CHECK(kf_expect(to->engine, 2, 7, PAGES) == 0);
  for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, write_half, &writers[i]) == 0);
  for (int i = 0; i < PAGES; i++) {
    take(from->engine, &event);
    CHECK(event.kind == KF_DONE && event.pages == 1 && kf_release(from->engine, event.transfer) == 0);
  }
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  take(to->engine, &event);
  CHECK(event.kind == KF_ARRIVED && event.pages == PAGES && kf_disarm(to->engine, 2, 7) == 1);
  CHECK(!memcmp(to->memory, from->memory, PAGES * PAGE));
}

/* A transfer whose layers never come, looked at by another thread than the one that ends it. */
static void looked_at_until_its_deadline(side *from, side *to, kf_peer *peer) {
  kf_run run = {0, 0, 3};
  kf_event event;
  kf_error error;
  uint64_t signalled = 0;
  int state, fd = eventfd(0, EFD_CLOEXEC);
  kf_schedule plan = plan_of(from, to, peer, &run, 1);
  plan.timeout_ns = 20000000;
  uint64_t id = kf_start(from->engine, &plan, &error);
  CHECK(fd >= 0 && id && kf_notify(from->engine, id, fd) == 0);
  while ((state = kf_look(from->engine, id, &event)) < KF_END_DONE) CHECK(state == KF_WAITING && event.kind == 0);
  CHECK(state == KF_END_FAILED && event.kind == KF_FAILED && event.error == ETIMEDOUT && event.pages == 0);
  CHECK(strstr(event.text, "not over within 0.020 s") && kf_notify(from->engine, id, -1) == 1);
  CHECK(read(fd, &signalled, sizeof signalled) == sizeof signalled && signalled == 1 && close(fd) == 0);
  take(from->engine, &event);
  CHECK(event.transfer == id && kf_release(from->engine, id) == 0);
  CHECK(kf_look(from->engine, id, &event) == -ENOENT && kf_notify(from->engine, id, -1) == -ENOENT);
}

/* Nothing but a count, even one of none. */
static void immediates_alone(side *from, side *to, kf_peer *peer) {
  kf_event event;
  kf_error error;
  kf_remote remote;
  kf_region_remote(to->region, &remote);
  memset(to->memory, 0x5A, SIZE);
  CHECK(kf_expect(to->engine, 3, 9, 5) == 0);
  CHECK(kf_write_immediate(from->engine, peer, &remote, 3, 9, 0, 0, &error));
  CHECK(kf_write_immediate(from->engine, peer, &remote, 3, 9, 5, 0, &error));
  CHECK(!kf_write_immediate(from->engine, peer, &remote, 3, 9, KF_MAX_PAGES_PER_WRITE + 1, 0, &error));
  CHECK(error.code == -EINVAL);
  for (int i = 0; i < 2; i++) {
    take(from->engine, &event);
    CHECK(event.kind == KF_DONE && event.bytes == 0 && event.writes == 1 && kf_release(from->engine, event.transfer) == 0);
  }
  take(to->engine, &event);
  CHECK(event.kind == KF_ARRIVED && event.pages == 5 && kf_disarm(to->engine, 3, 9) == 1);
  for (int i = 0; i < SIZE; i++) CHECK(to->memory[i] == 0x5A);
}

/* A receiver is found dead while what it confirmed is still in the queue: none of that is lost, nor left to be taken for the
 * end of what is written next. The helm is held throughout, as by a thread that stands still, so that nobody reads it. */
static void dead_after_it_confirmed(side *from, side *to, kf_peer *peer) {
  kf_run runs[] = {{0, 8, 1}, {2, 4, 1}, {4, 0, 1}};
  kf_event event;
  kf_error error;
  kf_schedule plan = plan_of(from, to, peer, runs, 3);
  plan.counter = NULL;
  plan.slot = 4;
  plan.layers = 1;
  const kf_address_bytes there = peer->addresses[0];
  CHECK(kf_expect(to->engine, 4, 1, 3) == 0);
  pthread_mutex_lock(&from->engine->helm);
  CHECK(kf_start(from->engine, &plan, &error) && kf_command_round(from->engine) && kf_schedule_watch(from->engine));
  CHECK(kf_post_round(from->engine) && atomic_load(&from->engine->in_flight) == 3);
  take(to->engine, &event);
  CHECK(event.kind == KF_ARRIVED && kf_disarm(to->engine, 4, 1) == 1);
  snprintf((char *)peer->addresses[0].bytes, sizeof there.bytes, "fi_shm://%d:0:0", INT_MAX); /* no process has that pid */
  CHECK(kf_complete_dead_peers(from->engine) && atomic_load(&from->engine->in_flight) == 0);
  peer->addresses[0] = there;
  pthread_mutex_unlock(&from->engine->helm);
  take(from->engine, &event);
  CHECK(event.kind == KF_DONE && event.pages == 3 && kf_release(from->engine, event.transfer) == 0);
}

/* One side goes away while the other is writing to it, and then the writer in the middle of its failed transfers. */
static void closing_in_the_middle(void) {
  kf_run runs[PAGES];
  kf_error error;
  kf_stats_values stats;
  side from = open_side(0, domain_counts[0]), to = open_side(0xA5, domain_counts[1]);
  kf_peer *peer = connect_sides(&from, &to);
  for (int i = 0; i < PAGES; i++) runs[i] = (kf_run){i, PAGES - 1 - i, 1};
  for (int i = 0; i < 20; i++) {
    kf_schedule plan = plan_of(&from, &to, peer, runs, PAGES);
    plan.counter = NULL;
    CHECK(kf_start(from.engine, &plan, &error));
  }
  do kf_stats(from.engine, &stats);
  while (stats.writes == 0);
  close_side(&to);
  close_side(&from);
}

int main(int argc, char **argv) {
  provider = argc > 1 ? argv[1] : "tcp";
  local = strcmp(provider, "local") == 0;
  unordered = argc > 2 && strcmp(argv[2], "unordered") == 0;
  if (argc > 2 && !unordered) sscanf(argv[2], "%u:%u", &domain_counts[0], &domain_counts[1]);
  kf_error error;
  kf_stats_values stats;
  side from = open_side(0, domain_counts[0]), to = open_side(0xA5, domain_counts[1]);
  counter = kf_counter_new(from.engine, &error);
  CHECK(counter && kf_counter_address(counter) % 64 == 0);
  kf_peer *peer = connect_sides(&from, &to);
  bytes_are_right(&from, &to, peer);
  cancels_from_another_thread(&from, &to, peer);
  small_writes_of_two_threads(&from, &to, peer);
  looked_at_until_its_deadline(&from, &to, peer);
  if (strcmp(provider, "shm") != 0) immediates_alone(&from, &to, peer); /* it never completes a write of nothing */
  if (strcmp(provider, "shm") == 0) dead_after_it_confirmed(&from, &to, peer); /* the others tell of it by themselves */
  CHECK(kf_disconnect(from.engine, peer, &error) == 0 && kf_counter_free(counter, &error) == 0);
  counter = NULL;
  kf_stats(from.engine, &stats);
  CHECK(!stats.active_transfers && !stats.in_flight_writes && !stats.peers && !stats.counters && stats.regions == 1);
  CHECK(kf_unregister(from.engine, from.region, &error) == 0);
  close_side(&from);
  close_side(&to); /* with its region still registered */
  /* Not shm: libfabric 1.17 lets two endpoints of one process share a mapping, and frees it under the other one. */
  for (int i = 0; i < 5 && strcmp(provider, "shm") != 0; i++) closing_in_the_middle();
  return 0;
}
