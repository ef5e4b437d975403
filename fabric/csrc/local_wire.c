/* Abstract unix sockets: reachable from the same host and network namespace alone, and gone with their process. Names
 * are random, so that a name never leads to a later engine. */
#include "local.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAGIC 0x6b766c31u /* raised when a word or the board changes: two versions then refuse each other */
#define BACKLOG 1024

static int address_of(const char *name, struct sockaddr_un *address, socklen_t *length) {
  size_t size = strlen(name);
  if (size == 0 || size + 1 > sizeof address->sun_path) return -EINVAL;
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  memcpy(address->sun_path + 1, name, size); /* a NUL first: no file */
  *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size);
  return 0;
}

static int random_name(char name[KF_SEAT]) {
  uint64_t bits[2];
  if (getrandom(bits, sizeof bits, 0) != (ssize_t)sizeof bits) return -errno;
  snprintf(name, KF_SEAT, KF_SEAT_PREFIX "%016llx%016llx", (unsigned long long)bits[0], (unsigned long long)bits[1]);
  return 0;
}

static int open_socket(int *fd) {
  *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  return *fd < 0 ? -errno : 0;
}

static int close_with(int fd, int rc) {
  (void)close(fd);
  return rc;
}

int kf_wire_listen(char name[KF_SEAT], int *fd) {
  struct sockaddr_un address;
  socklen_t length;
  int rc = random_name(name);
  if (rc == 0) rc = address_of(name, &address, &length);
  if (rc == 0) rc = open_socket(fd);
  if (rc) return rc;
  if (bind(*fd, (struct sockaddr *)&address, length) || listen(*fd, BACKLOG)) return close_with(*fd, -errno);
  return 0;
}

/* Memory is shared with the same user alone. */
static int check_user(int fd) {
  struct ucred other;
  socklen_t length = sizeof other;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &length)) return -errno;
  return other.uid == geteuid() ? 0 : -EPERM;
}

int kf_wire_call(const char *name, int *fd) {
  struct sockaddr_un address;
  socklen_t length;
  int rc = address_of(name, &address, &length);
  if (rc == 0) rc = open_socket(fd);
  if (rc) return rc;
  if (connect(*fd, (struct sockaddr *)&address, length)) return close_with(*fd, -errno);
  rc = check_user(*fd);
  return rc ? close_with(*fd, rc) : 0;
}

int kf_wire_accept(int listener, int *fd) {
  *fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (*fd < 0) return -errno;
  int rc = check_user(*fd);
  return rc ? close_with(*fd, rc) : 0;
}

typedef union {
  char bytes[CMSG_SPACE(sizeof(int))];
  struct cmsghdr align;
} passing;

/* `passed`: a file descriptor that goes with the word, or -1. */
int kf_wire_send(int fd, kf_word word, int passed) {
  word.magic = MAGIC;
  struct iovec part = {&word, sizeof word};
  passing room = {{0}};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  if (passed >= 0) {
    message.msg_control = room.bytes;
    message.msg_controllen = sizeof room.bytes;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof passed), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &passed, sizeof passed);
  }
  ssize_t n;
  do n = sendmsg(fd, &message, MSG_NOSIGNAL);
  while (n < 0 && errno == EINTR);
  return n < 0 ? -errno : 0;
}

/* One at most; the room, rounded up, may hold two, of which the second is a stranger's. */
static int passed_in(struct msghdr *message) {
  int fds[2] = {-1, -1};
  struct cmsghdr *header = CMSG_FIRSTHDR(message);
  if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return -1;
  size_t bytes = header->cmsg_len - CMSG_LEN(0);
  memcpy(fds, CMSG_DATA(header), bytes < sizeof fds ? bytes : sizeof fds);
  kf_local_drop_fd(fds[1]);
  return fds[0];
}

/* 1: a word came, with `passed` to be closed or -1; 0: none has; negative: the other end is gone, or no kvferry. */
int kf_wire_take(int fd, kf_word *word, int *passed) {
  struct iovec part = {word, sizeof *word};
  passing room = {{0}};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room.bytes, .msg_controllen = sizeof room.bytes};
  ssize_t n;
  do n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  *passed = n < 0 ? -1 : passed_in(&message);
  if (n < 0) return errno == EAGAIN ? 0 : -errno;
  if (n == (ssize_t)sizeof *word && word->magic == MAGIC) return 1;
  kf_local_drop_fd(*passed);
  return n == 0 ? -ECONNRESET : -EPROTO;
}
