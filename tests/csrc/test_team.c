/* A team's threads: every piece of every phase is taken once, and what one phase wrote the next one sees. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "team.h"

#define PIECES 100
#define PHASES 2000

static KvTeam team;
static int values[2][PIECES];

static void *work(void *unused) {
  (void)unused;
  for (int phase = 1; phase <= PHASES; phase++) {
    const int *before = values[(phase + 1) % 2];
    /* Of some phases there is but one piece: all but one thread come early, and many of those sleep. */
    const int64_t count = phase % 5 ? PIECES : 1;
    for (int64_t at, end; kv_take(&team, count, &at, &end);)
      for (; at < end; at++)
        for (int64_t i = count == 1 ? 0 : at; i < (count == 1 ? PIECES : at + 1); i++)
          values[phase % 2][i] = before[(i + 1) % PIECES] + 1;
    kv_meet(&team);
  }
  return NULL;
}

int main(int count, char **arguments) {
  pthread_t threads[16];
  team.threads = count > 1 ? atoi(arguments[1]) : 2;
  if (team.threads > 16) return 2;
  for (int t = 0; t < team.threads; t++)
    if (pthread_create(threads + t, NULL, work, NULL)) return 2;
  for (int t = 0; t < team.threads; t++)
    if (pthread_join(threads[t], NULL)) return 2;
  for (int i = 0; i < PIECES; i++)
    if (values[PHASES % 2][i] != PHASES) return fprintf(stderr, "piece %d has %d\n", i, values[PHASES % 2][i]), 1;
  return 0;
}
