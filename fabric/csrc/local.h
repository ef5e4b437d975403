/* The way to peers on the same host: pages are copied into their memory, and immediates put into a ring.
 *
 *   sender                                         receiver
 *   link ── HELLO, with a board to share ──────▶   guest         (unix socket; its hang-up is the other end's death)
 *        ◀─ WELCOME, with the receiver's bell ──
 *        ── ASK for a memory key ──────────────▶
 *        ◀─ GRANT, with the pool's memfd ───────   or REFUSE
 *   map  ══ bytes into the pool, immediates into the board's ring ══▶   drained into the slots
 *        ◀─ REVOKED, once the key is closed ────
 *        ── DROPPED, once it is unmapped ──────▶
 *
 * Everything here belongs to who is at the engine's helm. The other end is a kvferry of the same user. */
#ifndef KF_LOCAL_H
#define KF_LOCAL_H

#include "internal.h"

#define KF_SEAT_PREFIX "kvferry-"
#define KF_RING 4096            /* immediates in a ring: a power of two */
#define KF_GRANTS 64            /* regions that one sender may have mapped */
#define KF_PIECE (256u << 10)   /* bytes copied between two looks at whether the key still holds */

/* ---- local_board.c: the memory that the two ends of a link share; the sender makes it ---- */
typedef struct {
  _Alignas(KF_CACHE_LINE) _Atomic uint32_t put;     /* sender: immediates so far */
  _Alignas(KF_CACHE_LINE) _Atomic uint32_t taken;   /* receiver: the same */
  _Alignas(KF_CACHE_LINE) _Atomic uint32_t asleep;  /* receiver: its bell must be rung */
  _Alignas(KF_CACHE_LINE) _Atomic uint32_t copying; /* sender: 1 + the grant that it copies under at this moment; 0: none */
  _Alignas(KF_CACHE_LINE) _Atomic uint32_t revoked[KF_GRANTS]; /* receiver */
  _Alignas(KF_CACHE_LINE) uint32_t ring[KF_RING];
} kf_board;

int kf_board_make(kf_board **board, int *fd);
int kf_board_map(int fd, kf_board **board);
void kf_board_unmap(kf_board *board);
bool kf_board_full(const kf_board *board);
void kf_board_put(kf_board *board, uint32_t immediate);
bool kf_board_wakes(kf_board *board);
int kf_board_take(kf_board *board, uint32_t *immediates, uint32_t room);
bool kf_board_empty(const kf_board *board);
bool kf_board_enter(kf_board *board, uint32_t grant);
void kf_board_leave(kf_board *board);
void kf_board_revoke(kf_board *board, uint32_t grant);
bool kf_board_is_in(const kf_board *board, uint32_t grant);

/* ---- local_wire.c: unix sockets, and file descriptors over them ---- */
enum kf_word_kind { KF_HELLO = 1, KF_WELCOME, KF_ASK, KF_GRANT, KF_REFUSE, KF_REVOKED, KF_DROPPED };

typedef struct {
  uint32_t magic;
  uint32_t kind;
  uint64_t key;    /* ASK, GRANT, REFUSE */
  uint64_t offset; /* GRANT: of the region in its memfd */
  uint64_t length; /* GRANT */
  uint32_t grant;  /* GRANT, REVOKED, DROPPED */
  uint32_t zero;
} kf_word;

int kf_wire_listen(char name[KF_SEAT], int *fd);
int kf_wire_call(const char *name, int *fd);
int kf_wire_accept(int listener, int *fd);
int kf_wire_send(int fd, kf_word word, int passed);
int kf_wire_take(int fd, kf_word *word, int *passed);

/* ---- local.c ---- */
typedef enum { KF_END_SEAT, KF_END_GUEST, KF_END_LINK } kf_end_kind;

/* A socket that epoll tells about. */
typedef struct {
  kf_end_kind kind;
  int fd; /* -1: closed */
} kf_end;

struct kf_local {
  kf_end seat;
  int epoll;
  int spare;       /* given up to turn callers away when there is no other fd left; -1: there was none to be had */
  bool look;       /* at the sockets, in the next round */
  uint32_t rounds; /* since the last look at them */
  struct kf_guest *guests;
  kf_link *links;
};

int kf_local_watch(kf_local *local, kf_end *end);
void kf_local_forget(kf_end *end);
void kf_local_drop_fd(int fd);

/* ---- local_guest.c: senders that write to us ---- */
typedef struct kf_guest {
  kf_end end;
  struct kf_guest *next;
  kf_board *board; /* NULL: it has not said HELLO */
  bool deaf;       /* its ring makes no sense: it is not read any more */
  struct {
    bool used; /* until it says DROPPED, so that its map never goes by the number of another region */
    kf_region *region;
  } grants[KF_GRANTS];
} kf_guest;

int kf_guest_admit(kf_engine *engine);
bool kf_guest_serve(kf_engine *engine, kf_guest *guest);
bool kf_guest_drain(kf_engine *engine, kf_guest *guest);
bool kf_guest_revoke(kf_guest *guest, const kf_region *region);
void kf_guest_free(kf_guest *guest);

/* ---- local_link.c: receivers that we write to ---- */
typedef struct kf_map {
  struct kf_map *next;
  uint64_t key;
  bool granted; /* otherwise it has been asked for */
  bool refused;
  uint32_t grant;
  void *mapping;
  size_t mapped;
  unsigned char *start; /* of the region, `length` bytes */
  uint64_t length;
} kf_map;

struct kf_link {
  kf_end end; /* closed: the receiver is gone */
  kf_link *next;
  char name[KF_SEAT];
  uint32_t users; /* peers */
  kf_board *board;
  int bell; /* -1: it has not said WELCOME */
  kf_map *maps;
};

bool kf_link_serve(kf_engine *engine, kf_link *link);
void kf_link_lose(kf_engine *engine, kf_link *link);
void kf_link_free(kf_link *link);
int kf_link_map(kf_link *link, uint64_t key, kf_map **map);
void kf_link_ring(kf_engine *engine, kf_link *link);

/* ---- local_copy.c ---- */
void kf_copy(void *to, const void *from, size_t bytes);
void kf_copy_end(void); /* all that was copied is there before anything that is stored from now on */

#endif
