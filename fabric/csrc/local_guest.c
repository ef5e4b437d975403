/* The receiving side: who is admitted, what it is granted, and how that is taken back. */
#include "local.h"

#include <fcntl.h>
#include <stdlib.h>

#define BATCH 256
#define CALLS 16 /* admitted in one round */

static int admit_one(kf_engine *engine) {
  int fd, rc = kf_wire_accept(engine->local->seat.fd, &fd);
  if (rc) return rc;
  kf_guest *guest = calloc(1, sizeof *guest);
  if (!guest) {
    kf_local_drop_fd(fd);
    return -ENOMEM;
  }
  guest->end = (kf_end){KF_END_GUEST, fd};
  guest->next = engine->local->guests;
  engine->local->guests = guest;
  return kf_local_watch(engine->local, &guest->end);
}

/* Out of fds: a caller that stayed in the queue would keep the thread awake, and wait for nothing. It is hung up on. */
static int turn_away(kf_local *local) {
  int fd;
  kf_local_drop_fd(local->spare);
  int rc = kf_wire_accept(local->seat.fd, &fd);
  if (rc == 0) kf_local_drop_fd(fd);
  local->spare = fcntl(local->epoll, F_DUPFD_CLOEXEC, 0);
  return rc ? rc : -EMFILE;
}

/* What could not be taken stays in the queue of the listening socket. */
int kf_guest_admit(kf_engine *engine) {
  int rc = 0;
  for (int i = 0; rc == 0 && i < CALLS; i++) rc = admit_one(engine);
  if (rc == -EMFILE || rc == -ENFILE) rc = turn_away(engine->local);
  return rc == -EAGAIN || rc == -EPERM || rc == -ECONNABORTED ? 0 : rc;
}

static kf_region *region_of(const kf_engine *engine, uint64_t key) {
  for (kf_region *region = engine->region_list; region; region = region->next)
    if (key && region->remote.local_key == key && !region->revoked) return region;
  return NULL;
}

static int free_grant(const kf_guest *guest) {
  for (int i = 0; i < KF_GRANTS; i++)
    if (!guest->grants[i].used) return i;
  return -1;
}

static int answer_ask(kf_engine *engine, kf_guest *guest, uint64_t key) {
  kf_region *region = region_of(engine, key);
  int grant = guest->board ? free_grant(guest) : -1;
  if (!region || grant < 0) return kf_wire_send(guest->end.fd, (kf_word){.kind = KF_REFUSE, .key = key}, -1);
  kf_word word = {.kind = KF_GRANT, .key = key, .offset = region->share_offset, .length = region->length, .grant = (uint32_t)grant};
  int rc = kf_wire_send(guest->end.fd, word, region->share_fd);
  if (rc) return rc;
  guest->grants[grant].used = true;
  guest->grants[grant].region = region;
  return 0;
}

static int answer_hello(kf_engine *engine, kf_guest *guest, int passed) {
  if (guest->board || passed < 0) return -EPROTO;
  int rc = kf_board_map(passed, &guest->board);
  return rc ? rc : kf_wire_send(guest->end.fd, (kf_word){.kind = KF_WELCOME}, engine->wake_fd);
}

static int drop_grant(kf_guest *guest, uint32_t grant) {
  if (grant >= KF_GRANTS || !guest->grants[grant].used || guest->grants[grant].region) return -EPROTO;
  guest->grants[grant].used = false;
  atomic_store(&guest->board->revoked[grant], 0);
  return 0;
}

static int answer(kf_engine *engine, kf_guest *guest, const kf_word *word, int passed) {
  switch (word->kind) {
    case KF_HELLO: return answer_hello(engine, guest, passed);
    case KF_ASK: return answer_ask(engine, guest, word->key);
    case KF_DROPPED: return drop_grant(guest, word->grant);
    default: return -EPROTO;
  }
}

/* A guest goes when its socket hangs up, and not before: while it lives it may be in the middle of a copy. */
static void leave(kf_engine *engine, kf_guest *guest) {
  while (guest->board && kf_guest_drain(engine, guest)) continue; /* what it put before it went counts */
  kf_guest **place = &engine->local->guests;
  while (*place != guest) place = &(*place)->next;
  *place = guest->next;
  kf_guest_free(guest);
}

bool kf_guest_serve(kf_engine *engine, kf_guest *guest) {
  kf_word word;
  int passed, rc;
  while ((rc = kf_wire_take(guest->end.fd, &word, &passed)) > 0) {
    int failed = answer(engine, guest, &word, passed);
    kf_local_drop_fd(passed);
    if (failed) kf_add(&engine->errors, 1); /* it waits in vain, and says so after its stall time */
  }
  if (rc == -EPROTO) kf_add(&engine->errors, 1);
  if (rc == -ECONNRESET || rc == -EPIPE) leave(engine, guest);
  return true;
}

bool kf_guest_drain(kf_engine *engine, kf_guest *guest) {
  uint32_t immediates[BATCH];
  if (!guest->board || guest->deaf) return false;
  int count = kf_board_take(guest->board, immediates, BATCH);
  if (count < 0) {
    guest->deaf = true;
    kf_add(&engine->errors, 1);
  }
  if (count <= 0) return false;
  kf_slots_count(&engine->slots, immediates, (uint32_t)count, kf_now());
  return true;
}

/* False while it may still be copying into the region; nothing new begins in any case. */
bool kf_guest_revoke(kf_guest *guest, const kf_region *region) {
  bool over = true;
  for (uint32_t i = 0; i < KF_GRANTS; i++) {
    if (guest->grants[i].region != region) continue;
    kf_board_revoke(guest->board, i);
    if (kf_board_is_in(guest->board, i)) {
      over = false;
      continue;
    }
    guest->grants[i].region = NULL;
    /* Not heard, as its queue is full: it learns of it when it next copies, and the number stays used. */
    (void)kf_wire_send(guest->end.fd, (kf_word){.kind = KF_REVOKED, .grant = i}, -1);
  }
  return over;
}

void kf_guest_free(kf_guest *guest) {
  kf_local_forget(&guest->end);
  if (guest->board) kf_board_unmap(guest->board);
  free(guest);
}
