/* Other threads never call libfabric: they hand the engine's thread a command, and wait for its reply if they need one. */
#include "internal.h"

#include <stdlib.h>
#include <unistd.h>

void kf_wake(kf_engine *engine) {
  if (!atomic_load(&engine->sleeping) || !atomic_exchange(&engine->sleeping, false)) return;
  uint64_t one = 1;
  ssize_t n;
  do n = write(engine->wake_fd, &one, sizeof one);
  while (n < 0 && errno == EINTR);
}

static bool enqueue(kf_engine *engine, kf_command *command) {
  if (!engine->commands_open) return false;
  command->next = NULL;
  if (engine->command_tail)
    engine->command_tail->next = command;
  else
    engine->command_head = command;
  engine->command_tail = command;
  atomic_fetch_add(&engine->command_count, 1);
  kf_wake(engine);
  return true;
}

int kf_command_call(kf_engine *engine, kf_command *command) {
  command->waited_for = true;
  pthread_mutex_lock(&engine->command_lock);
  bool taken = enqueue(engine, command);
  while (taken && !command->done) pthread_cond_wait(&engine->command_done, &engine->command_lock);
  pthread_mutex_unlock(&engine->command_lock);
  return taken ? command->result : kf_fail(command->error, -ESHUTDOWN, "the transfer engine is closed");
}

int kf_command_send(kf_engine *engine, kf_command *command) {
  pthread_mutex_lock(&engine->command_lock);
  bool taken = enqueue(engine, command);
  pthread_mutex_unlock(&engine->command_lock);
  return taken ? 0 : kf_fail(command->error, -ESHUTDOWN, "the transfer engine is closed");
}

static kf_command *dequeue(kf_engine *engine) {
  pthread_mutex_lock(&engine->command_lock);
  kf_command *command = engine->command_head;
  if (command) {
    engine->command_head = command->next;
    if (!engine->command_head) engine->command_tail = NULL;
    atomic_fetch_sub(&engine->command_count, 1);
  }
  pthread_mutex_unlock(&engine->command_lock);
  return command;
}

static void finish(kf_engine *engine, kf_command *command) {
  if (!command->waited_for) {
    free(command);
    return;
  }
  pthread_mutex_lock(&engine->command_lock);
  command->done = true;
  pthread_cond_broadcast(&engine->command_done);
  pthread_mutex_unlock(&engine->command_lock);
}

bool kf_command_waiting(kf_engine *engine) { return atomic_load(&engine->command_count) != 0; }

bool kf_command_round(kf_engine *engine) {
  bool any = false;
  while (kf_command_waiting(engine)) {
    kf_command *command = dequeue(engine);
    if (!command) break;
    command->run(engine, command);
    finish(engine, command);
    any = true;
  }
  return any;
}

/* Last act of the thread: nothing is taken any more, and who waits is told so. */
void kf_command_refuse_all(kf_engine *engine) {
  pthread_mutex_lock(&engine->command_lock);
  engine->commands_open = false;
  pthread_mutex_unlock(&engine->command_lock);
  for (kf_command *command = dequeue(engine); command; command = dequeue(engine)) {
    command->result = kf_fail(command->error, -ESHUTDOWN, "the transfer engine was closed");
    finish(engine, command);
  }
}
