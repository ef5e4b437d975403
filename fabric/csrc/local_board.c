/* A ring of immediates with one writer and one reader, and the flags by which a key is taken back.
 *
 * Taking back: the sender says `copying`, then looks at `revoked`; the receiver says `revoked`, then looks at
 * `copying`. All four are sequentially consistent, so at least one of them sees the other: either nothing is copied
 * after the key was closed, or the receiver knows that a copy may still be running. */
#include "local.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int kf_board_make(kf_board **board, int *fd) {
  *fd = memfd_create("kvferry-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd < 0) return -errno;
  int rc = ftruncate(*fd, sizeof **board) == 0 ? 0 : -errno;
  if (rc == 0 && fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) rc = -errno;
  if (rc == 0) rc = kf_board_map(*fd, board);
  if (rc) (void)close(*fd);
  return rc;
}

/* Takes only memory that cannot shrink: a touch beyond its end would be SIGBUS. */
int kf_board_map(int fd, kf_board **board) {
  struct stat stat;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstat(fd, &stat) < 0) return -errno;
  if (!(seals & F_SEAL_SHRINK) || stat.st_size < (off_t)sizeof **board) return -EPROTO;
  void *start = mmap(NULL, sizeof **board, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) return -errno;
  (void)madvise(start, sizeof **board, MADV_DONTFORK);
  *board = start;
  return 0;
}

void kf_board_unmap(kf_board *board) { (void)munmap(board, sizeof *board); }

bool kf_board_full(const kf_board *board) {
  uint32_t put = atomic_load_explicit(&board->put, memory_order_relaxed);
  return put - atomic_load_explicit(&board->taken, memory_order_acquire) >= KF_RING;
}

/* What was copied before is seen by who takes the immediate. */
void kf_board_put(kf_board *board, uint32_t immediate) {
  uint32_t put = atomic_load_explicit(&board->put, memory_order_relaxed);
  board->ring[put % KF_RING] = immediate;
  atomic_store_explicit(&board->put, put + 1, memory_order_release);
}

/* Whether the receiver sleeps, or is about to, and may not have seen what was put. Both sides exchange the word, so
 * that the later of the two sees all that the earlier one did before. */
bool kf_board_wakes(kf_board *board) {
  return atomic_exchange(&board->asleep, 0);
}

bool kf_board_empty(const kf_board *board) {
  return atomic_load(&board->put) == atomic_load_explicit(&board->taken, memory_order_relaxed);
}

/* Number of immediates taken, or -EPROTO if there are more than the ring can hold. */
int kf_board_take(kf_board *board, uint32_t *immediates, uint32_t room) {
  uint32_t taken = atomic_load_explicit(&board->taken, memory_order_relaxed);
  uint32_t waiting = atomic_load_explicit(&board->put, memory_order_acquire) - taken;
  if (waiting > KF_RING) return -EPROTO;
  uint32_t count = waiting < room ? waiting : room;
  for (uint32_t i = 0; i < count; i++) immediates[i] = board->ring[(taken + i) % KF_RING];
  if (count) atomic_store_explicit(&board->taken, taken + count, memory_order_release);
  return (int)count;
}

/* Begins a piece, and ends the one before it. False: the key was closed, nothing may be copied. */
bool kf_board_enter(kf_board *board, uint32_t grant) {
  atomic_store(&board->copying, grant + 1);
  if (!atomic_load(&board->revoked[grant])) return true;
  kf_board_leave(board);
  return false;
}

void kf_board_leave(kf_board *board) { atomic_store_explicit(&board->copying, 0, memory_order_release); }

void kf_board_revoke(kf_board *board, uint32_t grant) { atomic_store(&board->revoked[grant], 1); }

bool kf_board_is_in(const kf_board *board, uint32_t grant) { return atomic_load(&board->copying) == grant + 1; }
