/* What silence is, and what an error on one path says of the others, without an endpoint. */
#include "internal.h"

#include "check.h"

#include <string.h>

#define MS 1000000ull
#define SILENCE (1000 * MS)

enum { PATHS = 2 };

static const kf_provider provider = {.name = "test"};
static kf_engine engine = {.options = {.silence_ns = SILENCE, .window = 8, .window_bytes = 4096, .max_write_bytes = 4096},
                           .domain_count = PATHS, .gather = 1};
static kf_path paths[PATHS];
static kf_peer peer = {.users = 1, .domains = 1, .path_count = PATHS, .paths = paths};
static char memory[4096];
static kf_region region = {.start = memory, .length = sizeof memory};
static kf_write write_of[PATHS];
static kf_write *broken; /* the write of the error that the queues have next */

static ssize_t read_queue(struct fid_cq *queue, void *entries, size_t count) {
  (void)queue, (void)entries, (void)count;
  return broken ? -FI_EAVAIL : -FI_EAGAIN;
}

static ssize_t read_error(struct fid_cq *queue, struct fi_cq_err_entry *entry, uint64_t flags) {
  (void)queue, (void)flags;
  *entry = (struct fi_cq_err_entry){.op_context = broken, .err = FI_ECANCELED};
  broken = NULL;
  return 1;
}

static const char *name_address(struct fid_av *av, const void *address, char *text, size_t *length) {
  (void)av, (void)address, (void)length;
  return strcpy(text, "somebody");
}

static struct fi_ops_cq queue_calls = {.size = sizeof queue_calls, .read = read_queue, .readerr = read_error};
static struct fi_ops_av address_calls = {.size = sizeof address_calls, .straddr = name_address};
static struct fid_cq queue = {.ops = &queue_calls};
static struct fid_av addresses = {.ops = &address_calls};

static void open_engine(void) {
  engine.active.next = engine.active.previous = &engine.active;
  engine.peers = &peer;
  CHECK(kf_events_open(&engine.events) == 0 && kf_registry_open(&engine.registry) == 0);
  for (uint32_t i = 0; i < PATHS; i++) {
    engine.domains[i].provider = &provider;
    engine.domains[i].cq = &queue;
    engine.domains[i].av = &addresses;
    paths[i] = (kf_path){.domain = &engine.domains[i]};
  }
}

/* Looks every 100 ms, from `from` on for so long. Returns why path 0 was cut, if it was. */
static const char *watch(uint64_t from, uint64_t how_long) {
  for (uint64_t now = from; now <= from + how_long; now += 100 * MS) kf_health_check(&engine, now);
  return paths[0].cut;
}

static void silence_is_what_was_listened_to(void) {
  uint64_t now = 1000000 * MS;
  paths[0].in_flight = 1;
  paths[0].progress_ns = now;
  CHECK(!watch(now, 900 * MS));
  CHECK(strstr(watch(now + 1000 * MS, 300 * MS), "confirmed nothing"));
  paths[0].cut = NULL;
  paths[0].progress_ns = now += 2000 * MS;
  engine.health_check_ns = now;
  now += 60000 * MS; /* nobody looked for a minute */
  CHECK(!watch(now, 800 * MS));
  CHECK(watch(now + 900 * MS, 400 * MS));
  paths[0] = (kf_path){.domain = &engine.domains[0]};
}

static kf_transfer *posting(const kf_run *run) {
  const kf_schedule plan = {.layers = 2, .run_count = 1, .runs = run, .region = &region, .peer = &peer, .length = 256};
  kf_transfer *t = kf_transfer_new(&plan, false);
  CHECK(t && kf_registry_add(&engine.registry, t) == 0);
  kf_transfer_begin(&engine, t);
  kf_transfer_move(t, KF_POSTING);
  return t;
}

/* `written` is in flight, and what went over path 0 before is not known to have landed; then `written` breaks. */
static kf_transfer *break_a_write(kf_transfer *t, kf_write *written, kf_path *path) {
  *written = (kf_write){.transfer = t, .path = path};
  path->in_flight = t->in_flight = 1;
  atomic_store(&path->domain->in_flight, 1);
  t->path = &paths[0];
  t->unsealed = 2;
  broken = written;
  CHECK(kf_complete_round(&engine));
  return t;
}

static void an_error_on_one_path_says_nothing_of_another(void) {
  const kf_run run = {0, 0, 1};
  kf_transfer *t = break_a_write(posting(&run), &write_of[0], &paths[1]);
  CHECK(t->state == KF_DRAINING && t->unsealed == 2 && !t->ended); /* it may still land: it is to be flushed first */
  CHECK(strstr(t->node.event.text, "connection lost"));
  t->in_flight = 0;
  kf_transfer_lose(t);
  kf_transfer_settle(&engine, t);
  paths[0].cut = "the receiver takes nothing";
  t = break_a_write(posting(&run), &write_of[1], &paths[0]);
  CHECK(t->state == KF_END_FAILED && t->ended && t->unsealed == 0);
  CHECK(strstr(t->node.event.text, "connection cut with writes in flight: the receiver takes nothing"));
}

static ssize_t taken; /* what the endpoint says of the next write */

static ssize_t write_message(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags) {
  (void)ep, (void)message, (void)flags;
  return taken;
}

static struct fi_ops_rma write_calls = {.size = sizeof write_calls, .writemsg = write_message};
static struct fid_ep endpoint = {.rma = &write_calls};
static struct fi_tx_attr room = {.size = 8};
static struct fi_info info = {.tx_attr = &room};
static const kf_provider sockets = {.name = "test", .over_sockets = true};

/* Sends over sockets, and over path 0 alone. */
static void over_sockets(void) {
  peer.path_count = 1;
  paths[0] = (kf_path){.domain = &engine.domains[0]};
  engine.domains[0].provider = &sockets;
  engine.domains[0].ordered = true;
  engine.domains[0].info = &info;
  engine.domains[0].ep = &endpoint;
  atomic_store(&engine.domains[0].in_flight, 0);
  for (int i = 0; i < PATHS; i++) {
    write_of[i] = (kf_write){.next = engine.free_writes};
    engine.free_writes = &write_of[i];
  }
}

/* One whose last turn was cut short: its writes have left, and none of them was sealed. */
static kf_transfer *cut_short(const kf_run *run) {
  kf_transfer *t = posting(run);
  t->layers_seen = 2;
  t->path = &paths[0];
  t->unsealed = 1;
  t->breaks = paths[0].breaks;
  return t;
}

static void drop(kf_transfer *t) {
  kf_transfer_lose(t);
  t->in_flight = 0;
  kf_transfer_stop(&engine, t, KF_END_CANCELLED, 0, "");
  CHECK(t->ended);
}

static bool fails_unconfirmed(kf_transfer *t) {
  bool moved = kf_post_turn(&engine, t);
  return moved && t->state == KF_END_FAILED && strstr(t->node.event.text, "before all writes were confirmed");
}

/* Whoever meets the loss first brings the next connection about, which would confirm what that one took with it. */
static void a_lost_connection_takes_with_it_what_has_no_seal(void) {
  const kf_run run = {0, 0, 1};
  over_sockets();
  kf_transfer *t = cut_short(&run), *other = cut_short(&run);
  other->unsealed = 0;
  taken = -FI_EAGAIN;
  CHECK(!kf_post_turn(&engine, other));
  taken = 0;
  CHECK(fails_unconfirmed(t));
  CHECK(kf_post_turn(&engine, other) && other->in_flight);
  t = cut_short(&run);
  for (int i = 0; i < PATHS; i++) { /* the two of `other`, a layer each */
    broken = &write_of[i];
    CHECK(kf_complete_round(&engine));
  }
  CHECK(other->ended && fails_unconfirmed(t));
}

/* It has no room: what is in flight on the path says that it is connected. */
static void a_full_queue_takes_nothing_with_it(void) {
  const kf_run run = {0, 0, 1};
  over_sockets();
  kf_transfer *t = cut_short(&run);
  paths[0].in_flight = 1;
  taken = -FI_EAGAIN;
  CHECK(!kf_post_turn(&engine, t));
  taken = 0;
  CHECK(kf_post_turn(&engine, t) && t->state != KF_END_FAILED && t->unsealed == 0);
  drop(t);
}

int main(void) {
  open_engine();
  silence_is_what_was_listened_to();
  an_error_on_one_path_says_nothing_of_another();
  a_lost_connection_takes_with_it_what_has_no_seal();
  a_full_queue_takes_nothing_with_it();
  kf_registry_close(&engine.registry);
  kf_events_close(&engine.events);
  return 0;
}
