/* How the engine's thread is asked to do something, and how it waits. */
#ifndef KF_WAITING_H
#define KF_WAITING_H

#include "peers.h"

/* ---- command.c: how other threads ask the engine's thread to do something; small.c: how they do it themselves ---- */
typedef struct kf_command {
  void (*run)(kf_engine *engine, struct kf_command *command);
  void *subject;
  const kf_address_bytes *addresses;
  uint32_t count;
  const char *seat;
  uint64_t id;
  int result;
  kf_error *error;
  bool waited_for; /* the caller owns it and waits for `done`; otherwise the thread frees it */
  bool done;
  struct kf_command *next;
} kf_command;

int kf_command_call(kf_engine *engine, kf_command *command);
int kf_command_send(kf_engine *engine, kf_command *command);
bool kf_command_round(kf_engine *engine);
bool kf_command_waiting(kf_engine *engine);
void kf_command_refuse_all(kf_engine *engine);
bool kf_small_begin(kf_engine *engine, kf_transfer *transfer);

/* ---- pace.c ---- */
typedef struct {
  uint64_t spin_ns;
  uint64_t since_ns;   /* last progress or arming */
  uint64_t step_ns;    /* from progress to progress, as it has been lately */
  uint64_t arrival_ns; /* from a slot's arming to progress */
  uint64_t crowded_until_ns;
  uint64_t crowded_for_ns; /* the next time */
  bool layers; /* of a forward pass will be posted */
  bool armed;  /* `since_ns` is the time of an arming */
} kf_pace;

void kf_pace_progress(kf_pace *pace, uint64_t now);
void kf_pace_armed(kf_pace *pace, uint64_t when);
void kf_pace_in_vain(kf_pace *pace);
bool kf_pace_awake(const kf_pace *pace, uint64_t now, uint64_t least_ns);
void kf_pace_yield(kf_pace *pace, uint64_t now);

#endif
