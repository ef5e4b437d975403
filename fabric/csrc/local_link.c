/* The sending side: one link a receiver, and its regions mapped once each. A link outlives its peers, so that the next
 * request need not map the pool anew; it goes with the receiver, or with the engine. */
#include "local.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

bool kf_link_is_lost(const kf_link *link) { return link->end.fd < 0; }

static kf_link *find(const kf_local *local, const char *name) {
  for (kf_link *link = local->links; link; link = link->next)
    if (!kf_link_is_lost(link) && strcmp(link->name, name) == 0) return link;
  return NULL;
}

/* Sends HELLO with a new board. */
static int greet(kf_link *link) {
  int fd, rc = kf_board_make(&link->board, &fd);
  if (rc) return rc;
  rc = kf_wire_send(link->end.fd, (kf_word){.kind = KF_HELLO}, fd);
  (void)close(fd);
  return rc;
}

static int open_link(kf_engine *engine, const char *name, kf_link **made) {
  kf_link *link = calloc(1, sizeof *link);
  if (!link) return -ENOMEM;
  link->end = (kf_end){KF_END_LINK, -1};
  link->bell = -1;
  snprintf(link->name, sizeof link->name, "%s", name);
  int rc = kf_wire_call(name, &link->end.fd);
  if (rc) link->end.fd = -1;
  if (rc == 0) rc = greet(link);
  if (rc == 0) rc = kf_local_watch(engine->local, &link->end);
  if (rc) {
    kf_link_free(link);
    return rc;
  }
  link->next = engine->local->links;
  engine->local->links = link;
  *made = link;
  return 0;
}

/* The link to the engine with this seat; NULL, and 0, if it is not on this host and `needed` is false. */
int kf_link_get(kf_engine *engine, const char *name, bool needed, kf_link **link, kf_error *error) {
  *link = NULL;
  if (!engine->local || (!name[0] && !needed)) return 0;
  if (strncmp(name, KF_SEAT_PREFIX, strlen(KF_SEAT_PREFIX)) || strlen(name) >= KF_SEAT)
    return kf_fail(error, -EINVAL, "'%.60s' is not an address of an engine on this host", name);
  *link = find(engine->local, name);
  int rc = *link ? 0 : open_link(engine, name, link);
  if (rc == 0 || !needed) return 0;
  return kf_fail(error, rc, "no engine of this host and user answers at '%s': %s", name, strerror(-rc));
}

static void unmap(kf_map *map) {
  if (map->mapping) (void)munmap(map->mapping, map->mapped);
  free(map);
}

/* Checks what was granted as if it were a stranger's: what cannot be touched would end us by SIGBUS. */
static int map_region(kf_map *map, const kf_word *word, int fd) {
  struct stat stat;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstat(fd, &stat) < 0) return -errno;
  uint64_t size = (uint64_t)stat.st_size, unit = (uint64_t)stat.st_blksize; /* of huge pages their size */
  if (!(seals & F_SEAL_SHRINK) || word->offset > size || word->length > size - word->offset) return -EPROTO;
  size_t mapped = (size_t)((word->offset + word->length + unit - 1) / unit * unit);
  void *start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) return -errno;
  (void)madvise(start, mapped, MADV_DONTFORK);
  (void)madvise(start, mapped, MADV_HUGEPAGE); /* who touches a page first says how large it is, and that is mostly us */
  map->mapping = start;
  map->mapped = mapped;
  map->start = (unsigned char *)start + word->offset;
  map->length = word->length;
  map->grant = word->grant;
  map->granted = true;
  return 0;
}

static int take_grant(kf_link *link, const kf_word *word, int passed) {
  kf_map *map = link->maps;
  while (map && (map->granted || map->key != word->key)) map = map->next;
  if (!map || passed < 0 || word->grant >= KF_GRANTS) return -EPROTO;
  int rc = map_region(map, word, passed);
  map->refused = rc != 0;
  return rc;
}

static int take_refusal(kf_link *link, uint64_t key) {
  for (kf_map *map = link->maps; map; map = map->next)
    if (map->key == key && !map->granted) map->refused = true;
  return 0;
}

static void drop_map(kf_link *link, kf_map *map) {
  kf_map **place = &link->maps;
  while (*place != map) place = &(*place)->next;
  *place = map->next;
  unmap(map);
}

static int take_revocation(kf_link *link, uint32_t grant) {
  for (kf_map *map = link->maps; map; map = map->next)
    if (map->granted && map->grant == grant) {
      drop_map(link, map);
      return kf_wire_send(link->end.fd, (kf_word){.kind = KF_DROPPED, .grant = grant}, -1);
    }
  return -EPROTO;
}

static int take_welcome(kf_link *link, int *passed) {
  if (*passed < 0 || link->bell >= 0) return -EPROTO;
  link->bell = *passed;
  *passed = -1;
  return 0;
}

static int take(kf_link *link, const kf_word *word, int *passed) {
  switch (word->kind) {
    case KF_WELCOME: return take_welcome(link, passed);
    case KF_GRANT: return take_grant(link, word, *passed);
    case KF_REFUSE: return take_refusal(link, word->key);
    case KF_REVOKED: return take_revocation(link, word->grant);
    default: return -EPROTO;
  }
}

bool kf_link_serve(kf_engine *engine, kf_link *link) {
  kf_word word;
  int passed, rc;
  while ((rc = kf_wire_take(link->end.fd, &word, &passed)) > 0) {
    if (take(link, &word, &passed)) kf_add(&engine->errors, 1);
    kf_local_drop_fd(passed);
  }
  if (rc < 0) kf_link_lose(engine, link);
  return true;
}

static bool uses(const kf_transfer *t, const kf_link *link) {
  return t->by_link && t->plan.peer->link == link && t->state < KF_DRAINING;
}

/* The receiver is gone: its memory is let go, and what was to go there fails, whatever it waits for. */
void kf_link_lose(kf_engine *engine, kf_link *link) {
  kf_local_forget(&link->end);
  kf_local_drop_fd(link->bell);
  link->bell = -1;
  while (link->maps) drop_map(link, link->maps);
  kf_link_hold(link); /* the last transfer to fail may be its last user */
  for (kf_transfer *t = engine->active.next, *next; t != &engine->active; t = next) {
    next = t->next;
    if (uses(t, link))
      kf_transfer_stop(engine, t, KF_END_FAILED, ECONNRESET, "the receiver, a process of this host, has died or closed its fabric");
  }
  kf_link_drop(engine, link);
}

void kf_link_forget(kf_engine *engine, const char *name) {
  kf_link *link = engine->local ? find(engine->local, name) : NULL;
  if (link) kf_link_lose(engine, link);
}

void kf_link_hold(kf_link *link) { link->users++; }

void kf_link_drop(kf_engine *engine, kf_link *link) {
  if (--link->users || link->end.fd >= 0) return;
  kf_link **place = &engine->local->links;
  while (*place != link) place = &(*place)->next;
  *place = link->next;
  kf_link_free(link);
}

void kf_link_free(kf_link *link) {
  kf_local_forget(&link->end);
  while (link->maps) drop_map(link, link->maps);
  if (link->board) kf_board_unmap(link->board);
  kf_local_drop_fd(link->bell);
  free(link);
}

static int ask(kf_link *link, uint64_t key, kf_map **made) {
  kf_map *map = calloc(1, sizeof *map);
  if (!map) return -ENOMEM;
  int rc = kf_wire_send(link->end.fd, (kf_word){.kind = KF_ASK, .key = key}, -1);
  if (rc) {
    free(map);
    return rc == -EPIPE ? -ECONNRESET : rc;
  }
  map->key = key;
  map->next = link->maps;
  link->maps = *made = map;
  return 0;
}

/* 0: `map` may be written to. -EAGAIN: not yet. -EACCES: the key opens nothing. -ECONNRESET: the receiver is gone. */
int kf_link_map(kf_link *link, uint64_t key, kf_map **map) {
  if (link->end.fd < 0) return -ECONNRESET;
  if (link->bell < 0) return -EAGAIN;
  kf_map *found = link->maps;
  while (found && found->key != key) found = found->next;
  int rc = found ? 0 : ask(link, key, &found);
  if (rc) return rc;
  *map = found;
  if (found->granted) return 0;
  if (!found->refused) return -EAGAIN;
  drop_map(link, found);
  return -EACCES;
}

/* Wakes the receiver if it sleeps. */
void kf_link_ring(kf_engine *engine, kf_link *link) {
  if (!kf_board_wakes(link->board)) return;
  uint64_t one = 1;
  ssize_t n;
  do n = write(link->bell, &one, sizeof one);
  while (n < 0 && errno == EINTR);
  if (n < 0 && errno != EAGAIN) kf_add(&engine->errors, 1);
}
