/* The board of a link: immediates from one thread to another, none lost, and a key that is taken back while its holder
 * copies. */
#include "local.h"

#include "check.h"

#include <fcntl.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

enum { IMMEDIATES = 20000, REVOCATIONS = 40, BYTES = 3 };

static kf_board *board;
static unsigned char pool[BYTES]; /* what is copied into; the race on it is the one that revoking must prevent */
static _Atomic uint32_t rung;

static void *put_all(void *unused) {
  for (uint32_t i = 0; i < IMMEDIATES; i++) {
    while (kf_board_full(board)) (void)sched_yield();
    kf_board_put(board, i);
    if (kf_board_wakes(board)) atomic_fetch_add(&rung, 1);
  }
  return unused;
}

/* Sleeps as the engine's thread does: says so, looks once more, and is then owed a bell. */
static void sleep_until_rung(void) {
  uint32_t before = atomic_load(&rung);
  (void)atomic_exchange(&board->asleep, 1);
  while (kf_board_empty(board) && atomic_load(&rung) == before) (void)sched_yield();
  (void)atomic_exchange(&board->asleep, 0);
}

static void nothing_is_lost_between_two_threads(void) {
  pthread_t thread;
  uint32_t got[64], next = 0;
  CHECK(pthread_create(&thread, NULL, put_all, NULL) == 0);
  while (next < IMMEDIATES) {
    int count = kf_board_take(board, got, 64);
    CHECK(count >= 0);
    for (int i = 0; i < count; i++) CHECK(got[i] == next++);
    if (count == 0) sleep_until_rung();
  }
  CHECK(pthread_join(thread, NULL) == 0 && kf_board_empty(board));
}

static void a_full_ring_is_full(void) {
  uint32_t got[KF_RING];
  for (uint32_t i = 0; i < KF_RING; i++) {
    CHECK(!kf_board_full(board));
    kf_board_put(board, i);
  }
  CHECK(kf_board_full(board) && kf_board_take(board, got, 1) == 1 && !kf_board_full(board));
  CHECK(kf_board_take(board, got, KF_RING) == KF_RING - 1 && got[KF_RING - 2] == KF_RING - 1);
  atomic_store(&board->put, atomic_load(&board->taken) + KF_RING + 1);
  CHECK(kf_board_take(board, got, KF_RING) == -EPROTO);
  atomic_store(&board->put, atomic_load(&board->taken));
}

static void *copy_until_revoked(void *unused) {
  while (kf_board_enter(board, 1)) {
    for (int i = 0; i < BYTES; i++) pool[i]++;
    kf_board_leave(board);
  }
  return unused;
}

static void nothing_is_copied_after_a_key_was_taken_back(void) {
  for (int round = 0; round < REVOCATIONS; round++) {
    pthread_t thread;
    atomic_store(&board->revoked[1], 0);
    CHECK(pthread_create(&thread, NULL, copy_until_revoked, NULL) == 0);
    for (int i = round % 8; i > 0; i--) (void)sched_yield();
    kf_board_revoke(board, 1);
    while (kf_board_is_in(board, 1)) (void)sched_yield();
    memset(pool, 0, sizeof pool); /* under ThreadSanitizer a race with the copy ends the test */
    CHECK(pool[0] == 0 && pool[BYTES - 1] == 0);
    CHECK(pthread_join(thread, NULL) == 0 && pool[0] == 0);
  }
}

static void a_board_that_could_shrink_is_refused(void) {
  kf_board *mapped;
  int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, sizeof *board) == 0 && kf_board_map(fd, &mapped) == -EPROTO);
  CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && kf_board_map(fd, &mapped) == 0);
  kf_board_unmap(mapped);
  CHECK(close(fd) == 0);
  fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, 64) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(kf_board_map(fd, &mapped) == -EPROTO && close(fd) == 0);
}

static void copies_are_exact(void) {
  enum { SIZE = 20000 };
  static char from[SIZE + 64], to[SIZE + 256];
  for (int i = 0; i < SIZE + 64; i++) from[i] = (char)(i * 31 + i / 251);
  for (int size = 0; size < SIZE; size = size * 2 + 1)
    for (int shift = 0; shift < 70; shift += 23) {
      memset(to, 1, sizeof to);
      kf_copy(to + 64 + shift, from + shift % 64, (size_t)size);
      CHECK(memcmp(to + 64 + shift, from + shift % 64, (size_t)size) == 0);
      CHECK(to[63 + shift] == 1 && to[64 + shift + size] == 1);
    }
}

int main(void) {
  int fd;
  CHECK(kf_board_make(&board, &fd) == 0 && close(fd) == 0);
  nothing_is_lost_between_two_threads();
  a_full_ring_is_full();
  nothing_is_copied_after_a_key_was_taken_back();
  kf_board_unmap(board);
  a_board_that_could_shrink_is_refused();
  copies_are_exact();
  return 0;
}
