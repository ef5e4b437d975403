/* Layer counters: one 64-bit word that the model's thread raises after each layer, or a GPU, in memory of the caller's. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static void run_new(kf_engine *engine, kf_command *command) {
  kf_counter *counter = aligned_alloc(KF_CACHE_LINE, sizeof *counter);
  if (!counter) {
    command->result = kf_fail(command->error, -ENOMEM, "out of memory for a layer counter");
    return;
  }
  memset(counter, 0, sizeof *counter);
  counter->word = command->subject ? command->subject : &counter->value;
  counter->engine = engine;
  counter->next = engine->counter_list;
  engine->counter_list = counter;
  command->subject = counter;
  atomic_fetch_add(&engine->counters, 1);
}

kf_counter *kf_counter_over(kf_engine *engine, uint64_t *word, kf_error *error) {
  if ((uintptr_t)word % sizeof *word) {
    kf_fail(error, -EINVAL, "a layer counter's word must be aligned to its 8 bytes");
    return NULL;
  }
  kf_command command = {.run = run_new, .subject = word, .error = error};
  return kf_command_call(engine, &command) == 0 ? command.subject : NULL;
}

kf_counter *kf_counter_new(kf_engine *engine, kf_error *error) { return kf_counter_over(engine, NULL, error); }

/* Whether a counter is followed that moves without waking us. */
bool kf_counters_silent(const kf_engine *engine) {
  for (const kf_counter *counter = engine->counter_list; counter; counter = counter->next)
    if (counter->word != &counter->value && atomic_load(&counter->waiters)) return true;
  return false;
}

static void free_counter(kf_engine *engine, kf_counter *counter) {
  kf_counter **link = &engine->counter_list;
  while (*link != counter) link = &(*link)->next;
  *link = counter->next;
  free(counter);
  atomic_fetch_sub(&engine->counters, 1);
}

static void run_free(kf_engine *engine, kf_command *command) {
  kf_counter *counter = command->subject;
  if (counter->waiters)
    command->result = kf_fail(command->error, -EBUSY, "%u transfers still follow this layer counter",
                              atomic_load(&counter->waiters));
  else
    free_counter(engine, counter);
}

void kf_counters_close(kf_engine *engine) {
  while (engine->counter_list) free_counter(engine, engine->counter_list);
}

int kf_counter_free(kf_counter *counter, kf_error *error) {
  kf_command command = {.run = run_free, .subject = counter, .error = error};
  return kf_command_call(counter->engine, &command);
}

uint64_t kf_counter_address(kf_counter *counter) { return (uint64_t)(uintptr_t)counter->word; }

uint64_t kf_counter_value(kf_counter *counter) { return atomic_load_explicit(counter->word, memory_order_acquire); }

/* Sequentially consistent: the add must be visible before `waiters` and `sleeping` are read, as the thread sets them
 * before it looks at the counter for the last time. */
void kf_counter_bump(kf_counter *counter, uint64_t n) {
  atomic_fetch_add(counter->word, n);
  if (atomic_load(&counter->waiters)) kf_wake(counter->engine);
}
