/* Threads that compute consecutive kernels without a parallel region for each of them.
 *
 * One thread, the leader, calls the kernels; the others wait for work that `share` offers. The leader waits
 * only for work that another thread has begun. A thread that sleeps, or that is not scheduled, takes no
 * work and so delays nothing. */
#ifndef CARAVAN_TEAM_H
#define CARAVAN_TEAM_H

#include <stdint.h>

/* Items [begin, end) of a job, for one thread. `next`: the first of the items that it computes afterwards;
 * -1 if there are none, or if that is not known. `foreseen`: these were `next` before. */
typedef struct { int64_t begin, end, next; int foreseen; } items;

typedef void (*work)(const void *job, const items *mine);

/* How the items of a job are divided: `at_once` at a time; `foreseen`: each thread takes its next items
 * before it computes these ones. */
typedef struct { int64_t count, at_once; int foreseen; } division;

/* Computes all items: on the team that the caller leads; else on a team of `threads` threads for this job
 * only; or on the calling thread if the job is not `worth` sharing. */
void share(int threads, int worth, division how, work run, const void *job);

/* A division into parts that balance the load of equal items. */
division even(int64_t count, int threads);

/* Calls lead(argument) in a thread that leads a team of `threads` threads. */
void with_team(int threads, void (*lead)(void *), void *argument);

#endif
