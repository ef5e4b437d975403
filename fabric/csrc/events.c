/* Events wait in a ring of nodes that belong to the transfers and slots they tell of. */
#include "internal.h"

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int kf_events_open(kf_events *events) {
  memset(events, 0, sizeof *events);
  events->head.next = events->head.previous = &events->head;
  events->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (events->fd < 0) return -errno;
  return -pthread_mutex_init(&events->lock, NULL);
}

void kf_events_close(kf_events *events) {
  (void)close(events->fd);
  (void)pthread_mutex_destroy(&events->lock);
}

/* Makes an eventfd readable. */
void kf_signal(int fd) {
  uint64_t one = 1;
  ssize_t n;
  do n = write(fd, &one, sizeof one);
  while (n < 0 && errno == EINTR); /* EAGAIN: it is readable already */
}

static void clear_fd(int fd) {
  uint64_t count;
  ssize_t n;
  do n = read(fd, &count, sizeof count);
  while (n < 0 && errno == EINTR);
}

void kf_events_push(kf_events *events, kf_event_node *node) {
  pthread_mutex_lock(&events->lock);
  bool was_empty = events->head.next == &events->head;
  node->previous = events->head.previous;
  node->next = &events->head;
  node->previous->next = node;
  events->head.previous = node;
  node->queued = true;
  if (was_empty) kf_signal(events->fd);
  pthread_mutex_unlock(&events->lock);
}

static void unlink_node(kf_event_node *node) {
  node->previous->next = node->next;
  node->next->previous = node->previous;
  node->queued = false;
}

void kf_events_remove(kf_events *events, kf_event_node *node) {
  pthread_mutex_lock(&events->lock);
  if (node->queued) unlink_node(node);
  if (events->head.next == &events->head) clear_fd(events->fd);
  pthread_mutex_unlock(&events->lock);
}

int kf_events_take(kf_events *events, kf_event *out, int room) {
  int taken = 0;
  pthread_mutex_lock(&events->lock);
  while (taken < room && events->head.next != &events->head) {
    out[taken++] = events->head.next->event;
    unlink_node(events->head.next);
  }
  if (events->head.next == &events->head) clear_fd(events->fd);
  pthread_mutex_unlock(&events->lock);
  return taken;
}
