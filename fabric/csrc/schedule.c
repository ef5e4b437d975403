/* Checks a schedule before it starts, and follows its layer counter after. */
#include "internal.h"

typedef unsigned __int128 wide; /* products of three 64-bit numbers of a stranger must not wrap */

typedef struct {
  const char *name;
  uint64_t start, layer_stride, page_stride, offset, room;
} side;

static int check_piece(const side *s, const kf_schedule *plan, kf_error *error) {
  if ((wide)s->offset + plan->length > s->page_stride)
    return kf_fail(error, -ERANGE, "piece of %llu bytes at offset %llu leaves its %s page of %llu bytes",
                   (unsigned long long)plan->length, (unsigned long long)s->offset, s->name,
                   (unsigned long long)s->page_stride);
  return 0;
}

/* Pages from `first` on, `count` of them, in every layer; the last byte of the last layer is the furthest. */
static int check_pages(const side *s, const kf_schedule *plan, uint32_t run, int32_t first, int32_t count, kf_error *error) {
  if (first < 0)
    return kf_fail(error, -ERANGE, "run %u starts at %s page %d", run, s->name, first);
  wide in_layer = (wide)((uint64_t)first + (uint64_t)count - 1) * s->page_stride;
  wide end = in_layer + (wide)(plan->layers - 1) * s->layer_stride + s->start + s->offset + plan->length;
  if (end > s->room)
    return kf_fail(error, -ERANGE, "run %u (%s pages %d..%lld, %u layers) is out of bounds: the region has %llu bytes",
                   run, s->name, first, (long long)first + count - 1, plan->layers, (unsigned long long)s->room);
  if (plan->layers > 1 && s->layer_stride >= s->page_stride && in_layer + s->page_stride > s->layer_stride)
    return kf_fail(error, -ERANGE, "run %u (%s pages %d..%lld) is out of bounds: a layer has %llu pages", run, s->name,
                   first, (long long)first + count - 1, (unsigned long long)(s->layer_stride / s->page_stride));
  return 0;
}

static int check_fields(const kf_schedule *plan, kf_error *error) {
  if (!plan->peer) return kf_fail(error, -EINVAL, "a transfer needs a peer");
  if (plan->remote.domains != plan->peer->domains)
    return kf_fail(error, -EINVAL, "memory of %u domains does not belong to a peer of %u", plan->remote.domains,
                   plan->peer->domains);
  if (plan->remote.domains == 0 && !plan->remote.local_key)
    return kf_fail(error, -EINVAL, "memory that is not shared cannot be written to by peers on its host");
  if (plan->layers == 0) return kf_fail(error, -EINVAL, "a transfer needs at least one layer");
  if (plan->slot >= KF_MAX_SLOTS) return kf_fail(error, -EINVAL, "slot %u is not below %d", plan->slot, KF_MAX_SLOTS);
  if (plan->generation >= KF_MAX_GENERATIONS)
    return kf_fail(error, -EINVAL, "generation %u is not below %d", plan->generation, KF_MAX_GENERATIONS);
  return 0;
}

static int check_immediate(const kf_schedule *plan, kf_error *error) {
  if (plan->layers != 1 || plan->length != 0 || plan->run_count != 1)
    return kf_fail(error, -EINVAL, "a transfer of pages needs a memory region");
  int64_t pages = plan->runs[0].count;
  if (pages < 0 || pages > KF_MAX_PAGES_PER_WRITE)
    return kf_fail(error, -EINVAL, "an immediate counts at most %d pages", KF_MAX_PAGES_PER_WRITE);
  return 0;
}

int kf_schedule_check(const kf_schedule *plan, kf_error *error) {
  int rc = check_fields(plan, error);
  if (rc) return rc;
  if (!plan->region) return check_immediate(plan, error);
  if (plan->length == 0) return kf_fail(error, -EINVAL, "a transfer's piece is empty");
  const side source = {"source", plan->source_start, plan->source_layer_stride, plan->source_page_stride,
                       plan->source_offset, plan->region->length};
  const side target = {"destination", plan->destination_start, plan->destination_layer_stride,
                       plan->destination_page_stride, plan->destination_offset, plan->remote.length};
  if ((rc = check_piece(&source, plan, error))) return rc;
  if ((rc = check_piece(&target, plan, error))) return rc;
  for (uint32_t i = 0; i < plan->run_count; i++) {
    const kf_run *run = &plan->runs[i];
    if (run->count < 1) return kf_fail(error, -ERANGE, "run %u has %d pages", i, run->count);
    if ((rc = check_pages(&source, plan, i, run->source, run->count, error))) return rc;
    if ((rc = check_pages(&target, plan, i, run->destination, run->count, error))) return rc;
  }
  return 0;
}

/* Layers that the model has finished; the counter may have moved by several since the last look. Sequentially
 * consistent, as kf_counter_bump is: the last look before sleeping must not be moved before `sleeping` is set. */
static uint32_t layers_done(const kf_transfer *transfer) {
  if (!transfer->plan.counter) return transfer->plan.layers;
  uint64_t value = atomic_load(transfer->plan.counter->word);
  if (value < transfer->plan.first_value) return 0;
  uint64_t done = value - transfer->plan.first_value;
  return done >= transfer->plan.layers ? transfer->plan.layers : (uint32_t)done + 1;
}

static bool follows(const kf_transfer *transfer) {
  return transfer->state <= KF_POSTING && transfer->layers_seen < transfer->plan.layers;
}

bool kf_schedule_moved(const kf_engine *engine) {
  for (const kf_transfer *t = engine->active.next; t != &engine->active; t = t->next)
    if (follows(t) && layers_done(t) > t->layers_seen) return true;
  return false;
}

bool kf_schedule_follow(kf_transfer *transfer) {
  if (!follows(transfer)) return false;
  uint32_t done = layers_done(transfer);
  if (done <= transfer->layers_seen) return false;
  uint64_t now = kf_now();
  while (transfer->layers_seen < done) transfer->seen_ns[transfer->layers_seen++] = now;
  if (done == transfer->plan.layers) transfer->node.event.last_counter_ns = now;
  if (transfer->state == KF_WAITING) kf_transfer_move(transfer, KF_POSTING);
  return true;
}

bool kf_schedule_watch(kf_engine *engine) {
  bool moved = false, more = false;
  for (kf_transfer *t = engine->active.next; t != &engine->active; t = t->next) {
    if (kf_schedule_follow(t)) moved = true;
    if (follows(t)) more = true;
  }
  engine->pace.layers = more;
  return moved;
}
