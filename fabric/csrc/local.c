/* The seat: where engines of the same host find us, and the round in which their sockets and rings are looked at. */
#include "local.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOOK_EVERY 32 /* rounds: a look at the sockets is a system call, a look at a ring is not */
#define EVENTS 32

void kf_local_drop_fd(int fd) {
  if (fd >= 0) (void)close(fd);
}

int kf_local_watch(kf_local *local, kf_end *end) {
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = end};
  return epoll_ctl(local->epoll, EPOLL_CTL_ADD, end->fd, &event) ? -errno : 0;
}

/* Closing takes it out of epoll too: nobody else has this end of it. */
void kf_local_forget(kf_end *end) {
  kf_local_drop_fd(end->fd);
  end->fd = -1;
}

static int open_seat(kf_local *local, char name[KF_SEAT]) {
  local->seat = (kf_end){KF_END_SEAT, -1};
  local->spare = -1;
  local->look = true;
  local->epoll = epoll_create1(EPOLL_CLOEXEC);
  if (local->epoll < 0) return -errno;
  int rc = kf_wire_listen(name, &local->seat.fd);
  if (rc == 0) rc = kf_local_watch(local, &local->seat);
  if (rc == 0 && (local->spare = fcntl(local->epoll, F_DUPFD_CLOEXEC, 0)) < 0) rc = -errno;
  return rc;
}

int kf_local_open(kf_engine *engine, kf_error *error) {
  engine->local = calloc(1, sizeof *engine->local);
  int rc = engine->local ? open_seat(engine->local, engine->seat) : -ENOMEM;
  return rc ? kf_fail(error, rc, "cannot open a seat for peers on this host: %s", strerror(-rc)) : 0;
}

void kf_local_close(kf_engine *engine) {
  kf_local *local = engine->local;
  if (!local) return;
  for (kf_guest *guest = local->guests, *next; guest; guest = next) {
    next = guest->next;
    kf_guest_free(guest);
  }
  for (kf_link *link = local->links, *next; link; link = next) {
    next = link->next;
    kf_link_free(link);
  }
  kf_local_forget(&local->seat);
  kf_local_drop_fd(local->spare);
  kf_local_drop_fd(local->epoll);
  free(local);
  engine->local = NULL;
}

/* Memory is offered to peers on this host if it lies in a memfd that cannot shrink. */
static int check_share(int fd, uint64_t offset, uint64_t length) {
  struct stat stat;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstat(fd, &stat) < 0) return -errno;
  uint64_t size = (uint64_t)stat.st_size;
  return !(seals & F_SEAL_SHRINK) || offset > size || length > size - offset ? -EINVAL : 0;
}

int kf_local_share(kf_engine *engine, kf_region *region, kf_error *error) {
  int fd = region->share_fd;
  region->share_fd = -1;
  if (fd < 0 || !engine->local) return 0;
  int rc = check_share(fd, region->share_offset, region->length);
  if (rc) return kf_fail(error, rc, "memory to be shared must lie in a memfd that is sealed against shrinking");
  region->share_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (region->share_fd < 0) return kf_fail(error, -errno, "cannot keep the memory's file descriptor: %s", strerror(errno));
  do
    if (getrandom(&region->remote.local_key, sizeof region->remote.local_key, 0) < 0)
      return kf_fail(error, -errno, "no random key for the memory: %s", strerror(errno));
  while (region->remote.local_key == 0);
  return 0;
}

void kf_local_unshare(kf_region *region) {
  kf_local_drop_fd(region->share_fd);
  region->share_fd = -1;
}

/* 0 once no peer can write to the region any more; -EAGAIN while one is in the middle of a copy. */
int kf_local_revoke(kf_engine *engine, kf_region *region) {
  region->revoked = true;
  bool over = true;
  for (kf_guest *guest = engine->local ? engine->local->guests : NULL; guest; guest = guest->next)
    if (!kf_guest_revoke(guest, region)) over = false;
  return over ? 0 : -EAGAIN;
}

static bool serve_end(kf_engine *engine, kf_end *end) {
  if (end->kind == KF_END_GUEST) return kf_guest_serve(engine, (kf_guest *)end);
  if (end->kind == KF_END_LINK) return kf_link_serve(engine, (kf_link *)end);
  if (kf_guest_admit(engine)) kf_add(&engine->errors, 1);
  return true;
}

/* No end that is served frees another one, so what epoll has told stays valid to the last. */
static bool look_at_sockets(kf_engine *engine) {
  struct epoll_event events[EVENTS];
  kf_local *local = engine->local;
  local->look = false;
  local->rounds = 0;
  int count = epoll_wait(local->epoll, events, EVENTS, 0);
  for (int i = 0; i < count; i++) (void)serve_end(engine, events[i].data.ptr);
  if (count < 0 && errno != EINTR) kf_add(&engine->errors, 1);
  if (count == EVENTS) local->look = true;
  return count > 0;
}

bool kf_local_round(kf_engine *engine) {
  kf_local *local = engine->local;
  if (!local) return false;
  bool progress = (local->look || ++local->rounds >= LOOK_EVERY) && look_at_sockets(engine);
  for (kf_guest *guest = local->guests; guest; guest = guest->next) progress |= kf_guest_drain(engine, guest);
  return progress;
}

/* Before the last look, and after sleeping. */
void kf_local_set_asleep(kf_engine *engine, bool asleep) {
  kf_local *local = engine->local;
  if (!local) return;
  for (kf_guest *guest = local->guests; guest; guest = guest->next)
    if (guest->board) (void)atomic_exchange(&guest->board->asleep, asleep);
  if (!asleep) local->look = true;
}

bool kf_local_waiting(const kf_engine *engine) {
  for (const kf_guest *guest = engine->local ? engine->local->guests : NULL; guest; guest = guest->next)
    if (guest->board && !guest->deaf && !kf_board_empty(guest->board)) return true;
  return false;
}

const char *kf_seat(const kf_engine *engine) { return engine->seat; }

int kf_local_fd(const kf_engine *engine) { return engine->local ? engine->local->epoll : -1; }
