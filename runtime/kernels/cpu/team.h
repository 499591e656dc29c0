/* Threads that compute one kernel after the other, without a parallel region for each of them.
 *
 * One of them, the leader, calls the kernels; the others wait for the work that `share` offers. The leader
 * waits for work that another thread has begun, never for a thread that has begun none: one that sleeps,
 * or that the system runs something else in place of, delays nothing. */
#ifndef CARAVAN_TEAM_H
#define CARAVAN_TEAM_H

#include <stdint.h>

/* Items [begin, end) of a job, for one thread. `next`: the first of the items that it computes afterwards;
 * -1 if there are none, or if that is not known. `foreseen`: these were `next` before. */
typedef struct { int64_t begin, end, next; int foreseen; } items;

typedef void (*work)(const void *job, const items *mine);

/* How the items of a job are divided: so many at a time; `foreseen`: each thread takes its next items
 * before it computes these ones. */
typedef struct { int64_t count, at_once; int foreseen; } division;

/* Computes all items: on the threads of the team that the caller leads, or of one of `threads` threads
 * for this job alone, or by itself if it is not `worth` that. */
void share(int threads, int worth, division how, work run, const void *job);

/* As many parts for each thread as balance the load of equal items. */
division even(int64_t count, int threads);

/* Calls lead(argument) in a thread that leads a team of so many. */
void with_team(int threads, void (*lead)(void *), void *argument);

#endif
