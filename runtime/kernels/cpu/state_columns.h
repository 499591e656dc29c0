/* Recurrent states of heads, whose columns are independent: threads compute some columns of a head each,
 * over all rows of a span. */
#ifndef CARAVAN_STATE_COLUMNS_H
#define CARAVAN_STATE_COLUMNS_H

#include "spans.h"
#include "thread_team.h"

#define COLUMNS 64 /* columns of a state that one thread computes at once */
#define LANES (COLUMNS / 16)

/* Computes the columns from `first` on, at most COLUMNS, of one head's state, over all rows of one span. */
typedef void (*columns_kernel)(const void *job, int span, int head, int first);

typedef struct {
    columns_kernel compute;
    const void *job;
    int heads, parts; /* parts of a head: of COLUMNS columns each, the last one perhaps of fewer */
} columns_work;

static void compute_parts(const void *argument, const items *mine) {
    const columns_work *work = argument;
    const int per_span = work->heads * work->parts;
    for (int64_t item = mine->begin; item < mine->end; item++) {
        const int part = (int)(item % per_span);
        work->compute(work->job, (int)(item / per_span), part / work->parts, part % work->parts * COLUMNS);
    }
}

/* Calls `compute` for all columns of all heads of all spans; `size`: columns of a head. */
static void share_columns(int threads, columns_kernel compute, const void *job, int spans, int heads, int size) {
    const columns_work work = {compute, job, heads, (size + COLUMNS - 1) / COLUMNS};
    share(threads, 1, (division){(int64_t)spans * heads * work.parts, 1, 0}, compute_parts, &work);
}

#endif
