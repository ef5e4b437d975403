/* Which domains and paths are used, and when those that were taken out are tried again.
 *
 *              fault                 link up, or time is up
 *   HEALTHY ──────────▶ OUT ◀──────────────────────────────▶ TRIED
 *      ▲                              fault                    │
 *      └────────────────────── a write completes ──────────────┘
 *
 * A domain is taken out when its link is down; a path, when a write over it fails, cannot be posted, or goes without a
 * sign of life. What is out is used only where nothing else is left, so that an engine of one domain goes on trying. */
#include "internal.h"

#define MS 1000000ull
#define CHECK_NS (100 * MS)
#define STOOD_STILL_NS (3 * CHECK_NS)
#define PAUSE_FIRST_NS (500 * MS)
#define PAUSE_MOST_NS (16000 * MS)
#define REFUSAL_NS (1 * MS) /* a path that took no write is passed over for so long */

static const bool moves[KF_HEALTHS][KF_HEALTHS] = {
    [KF_HEALTHY] = {[KF_OUT] = true},
    [KF_OUT] = {[KF_TRIED] = true},
    [KF_TRIED] = {[KF_HEALTHY] = true, [KF_OUT] = true},
};

bool kf_health_allows(kf_health_state from, kf_health_state to) { return moves[from][to]; }

static bool move(kf_health *health, kf_health_state to) {
  bool allowed = kf_health_allows(health->state, to);
  if (allowed) health->state = to;
  return allowed;
}

static void take_out(kf_engine *engine, kf_health *health) {
  if (health->state == KF_OUT || !move(health, KF_OUT)) return;
  health->pause_ns = health->pause_ns ? 2 * health->pause_ns : PAUSE_FIRST_NS;
  if (health->pause_ns > PAUSE_MOST_NS) health->pause_ns = PAUSE_MOST_NS;
  health->out_since_ns = kf_now();
  kf_add(&engine->outages, 1);
}

static void recover(kf_health *health) {
  if (health->state == KF_TRIED && move(health, KF_HEALTHY)) health->pause_ns = 0;
}

void kf_path_failed(kf_engine *engine, kf_path *path) {
  path->socket = KF_SOCKET_UNKNOWN; /* the next connection is another */
  take_out(engine, &path->health);
}

void kf_path_completed(kf_path *path, uint64_t now) {
  path->progress_ns = now;
  recover(&path->health);
  recover(&path->domain->health);
}

/* It has no room, or no connection yet. One that never gets a connection is taken out. */
void kf_path_refused(kf_engine *engine, kf_path *path) {
  uint64_t now = kf_now();
  if (path->refused_since_ns == 0 || path->in_flight) path->refused_since_ns = now;
  path->refused_ns = now;
  if (kf_path_unconnected(path)) path->socket = KF_SOCKET_UNKNOWN; /* lost with nothing in flight, no error tells of it */
  if (now - path->refused_since_ns > engine->options.stall_ns) kf_path_failed(engine, path);
}

/* It took nothing though nothing is in flight and there is room: it has no connection any more, or none yet. */
bool kf_path_unconnected(const kf_path *path) {
  const kf_domain *domain = path->domain;
  return domain->provider->over_sockets && path->in_flight == 0 && domain->in_flight < domain->info->tx_attr->size;
}

bool kf_path_rests(const kf_path *path) { return path->refused_ns != 0 && kf_now() - path->refused_ns < REFUSAL_NS; }

/* What is on trial carries one turn at a time. */
static bool takes_more(const kf_health *health, uint64_t in_flight) {
  return health->state == KF_HEALTHY || (health->state == KF_TRIED && in_flight == 0);
}

bool kf_path_usable(const kf_path *path) {
  return takes_more(&path->health, path->in_flight) &&
         takes_more(&path->domain->health, atomic_load_explicit(&path->domain->in_flight, memory_order_relaxed));
}

/* Its writes end in errors, and none of them can land once the receiver is back. */
void kf_path_cut(kf_engine *engine, kf_path *path, const kf_peer *peer, const char *why) {
  path->cut = why;
  kf_path_failed(engine, path);
  kf_peers_cut(engine, path->domain, &peer->addresses[path->remote]);
}

static void check_link(kf_engine *engine, kf_domain *domain) {
  domain->link_down = !kf_link_is_up(domain->interface);
  if (domain->link_down)
    take_out(engine, &domain->health);
  else if (domain->health.state == KF_OUT)
    (void)move(&domain->health, KF_TRIED);
  atomic_store_explicit(&domain->out, domain->link_down, memory_order_relaxed);
}

static void check_path(kf_engine *engine, kf_path *path, const kf_peer *peer, uint64_t now) {
  if (path->health.state == KF_OUT && now - path->health.out_since_ns >= path->health.pause_ns)
    (void)move(&path->health, KF_TRIED);
  if (path->in_flight == 0) return;
  bool cut_off = path->domain->link_down && engine->domain_count > 1; /* alone, it may come back as it was */
  if (!cut_off && now - path->progress_ns <= engine->options.silence_ns) return;
  path->progress_ns = now; /* once in so long, until the errors have come */
  kf_path_cut(engine, path, peer, cut_off ? "the link is down" : "the receiver has confirmed nothing for too long");
}

/* This thread did not run: its process was stopped or starved, or the machine stood still. What was confirmed meanwhile
 * is yet to be read, and who was to confirm it may have stood still as well: that time is nobody's silence. */
static void pass_over(kf_engine *engine, uint64_t missed, uint64_t now) {
  for (kf_peer *peer = engine->peers; peer; peer = peer->next)
    for (uint32_t i = 0; i < peer->path_count; i++) {
      uint64_t *progress = &peer->paths[i].progress_ns;
      *progress = now - *progress > missed ? *progress + missed : now;
    }
}

/* Before a transfer begins, and every so often while there is something to do. */
void kf_health_check(kf_engine *engine, uint64_t now) {
  uint64_t since = now - engine->health_check_ns;
  if (since < CHECK_NS) return;
  engine->health_check_ns = now;
  if (since > STOOD_STILL_NS) pass_over(engine, since - CHECK_NS, now);
  for (uint32_t i = 0; i < engine->domain_count; i++) {
    kf_domain *domain = &engine->domains[i];
    check_link(engine, domain);
  }
  for (kf_peer *peer = engine->peers; peer; peer = peer->next)
    for (uint32_t i = 0; i < peer->path_count; i++) check_path(engine, &peer->paths[i], peer, now);
}
