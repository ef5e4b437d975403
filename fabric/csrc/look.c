/* How other threads see what a transfer does, and how they wait for its end. */
#include "internal.h"

/* The caller holds the registry's lock, or the transfer cannot change or be freed meanwhile. */
static int copy(const kf_transfer *transfer, kf_event *event) {
  *event = transfer->node.event;
  return (int)transfer->state;
}

static void run_look(kf_engine *engine, kf_command *command) {
  pthread_mutex_lock(&engine->registry.lock);
  const kf_transfer *transfer = kf_registry_get(&engine->registry, command->id);
  command->result = transfer ? copy(transfer, command->subject) : -ENOENT;
  pthread_mutex_unlock(&engine->registry.lock);
}

/* While it lives, its numbers are the engine's thread's: that is asked, and takes a look between two writes. */
int kf_look(kf_engine *engine, uint64_t id, kf_event *event) {
  pthread_mutex_lock(&engine->registry.lock);
  const kf_transfer *transfer = kf_registry_get(&engine->registry, id);
  bool lives = transfer && !transfer->ended;
  int state = lives || !transfer ? -ENOENT : copy(transfer, event);
  pthread_mutex_unlock(&engine->registry.lock);
  if (!lives) return state;
  kf_command command = {.run = run_look, .subject = event, .id = id};
  return kf_command_call(engine, &command);
}

int kf_notify(kf_engine *engine, uint64_t id, int fd) {
  pthread_mutex_lock(&engine->registry.lock);
  kf_transfer *transfer = kf_registry_get(&engine->registry, id);
  int rc = !transfer ? -ENOENT : transfer->ended ? 1 : 0;
  if (rc == 0) transfer->notify_fd = fd;
  pthread_mutex_unlock(&engine->registry.lock);
  return rc;
}
