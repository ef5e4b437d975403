/* Which way the next turn of a transfer goes: over the domain, ours and the peer's, that has the least to do. */
#include "local.h"

#include <stdio.h>

/* Domains of the two sides belong together by number, as cables do; the longer side's are dealt out to the shorter's. */
static bool belongs(const kf_engine *engine, const kf_peer *peer, const kf_path *path) {
  uint32_t fewer = engine->domain_count < peer->domains ? engine->domain_count : peer->domains;
  return path->domain->index % fewer == path->remote % fewer;
}

static uint64_t read_own(const _Atomic uint64_t *total) { return atomic_load_explicit(total, memory_order_relaxed); }

/* Least in flight first; of two that are equal, the one that has carried less, so that idle ones take turns. */
static bool is_better(const kf_path *path, const kf_path *best) {
  uint64_t flying = path->in_flight_bytes, other = best->in_flight_bytes;
  uint64_t carried = path->carried_bytes, other_carried = best->carried_bytes;
  if (path->domain != best->domain) {
    flying = read_own(&path->domain->in_flight_bytes);
    other = read_own(&best->domain->in_flight_bytes);
    carried = read_own(&path->domain->total_bytes);
    other_carried = read_own(&best->domain->total_bytes);
  }
  return flying < other || (flying == other && carried < other_carried);
}

/* Lower is better. Another domain of the peer than its own helps a domain of ours only where no pair is left. */
static int rank(const kf_engine *engine, const kf_peer *peer, const kf_path *path) {
  bool pair = belongs(engine, peer, path);
  if (kf_path_usable(path)) return pair ? (kf_path_rests(path) ? 1 : 0) : 2;
  return pair ? 3 : 4;
}

kf_path *kf_paths_choose(const kf_engine *engine, const kf_peer *peer) {
  if (peer->path_count == 1) return &peer->paths[0];
  kf_path *best = NULL;
  int best_rank = 0;
  for (uint32_t i = 0; i < peer->path_count; i++) {
    kf_path *path = &peer->paths[i];
    int here = rank(engine, peer, path);
    if (best && (here > best_rank || (here == best_rank && !is_better(path, best)))) continue;
    best = path;
    best_rank = here;
  }
  return best;
}

bool kf_paths_left(const kf_peer *peer) {
  for (uint32_t i = 0; i < peer->path_count; i++)
    if (kf_path_usable(&peer->paths[i])) return true;
  return false;
}

static const char *address_name(const kf_peer *peer, const kf_path *path, char *text, size_t room) {
  size_t length = room;
  (void)fi_av_straddr(path->domain->av, peer->addresses[path->remote].bytes, text, &length);
  text[room - 1] = 0;
  return text;
}

/* For people: the peer's first address, or its seat on this host. */
const char *kf_peer_name(const kf_peer *peer, char *text, size_t room) {
  if (peer->path_count) return address_name(peer, &peer->paths[0], text, room);
  snprintf(text, room, "%s on this host", peer->link ? peer->link->name : "nobody");
  return text;
}

/* For people: which of our domains, by the address it is bound to, and which address of the peer. */
const char *kf_path_name(const kf_transfer *transfer, const kf_path *path, char *text, size_t room) {
  char peer[KF_WAY / 2];
  address_name(transfer->plan.peer, path, peer, sizeof peer);
  snprintf(text, room, "domain %u (%s) to %s", path->domain->index, path->domain->bind, peer);
  return text;
}

void kf_path_add(kf_path *path, uint64_t bytes) {
  path->in_flight_bytes += bytes;
  path->carried_bytes += bytes;
  kf_add(&path->domain->in_flight_bytes, bytes);
}

void kf_path_sub(kf_path *path, uint64_t bytes) {
  path->in_flight_bytes -= bytes;
  kf_sub(&path->domain->in_flight_bytes, bytes);
}
