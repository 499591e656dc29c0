/* A product of some rows of activations with a matrix, and the methods that compute it. */
#ifndef CARAVAN_JOBS_H
#define CARAVAN_JOBS_H

#include <stddef.h>
#include <stdint.h>

#include "simd.h"

#define WORTH_SHARING (1 << 17) /* products; with fewer, threads do not pay off */

/* How activations enter products: as floats, as integers of 15 bits, or as integers of 8 bits. For BF16: FAST as one
 * bfloat16; FINE, with AMX, as the sum of two. AUTO: FAST for BF16 where the processor multiplies bfloat16 but has no
 * AMX, else FINE. For Q16_0 all but EXACT: as integers of 14 bits. */
enum { EXACT = 0, FINE = 1, FAST = 2, AUTO = 3 };

typedef struct {
    const uint8_t *weight;
    ptrdiff_t row_bytes;
    int rows, outs, elements, outs_at_once;
    const void *x;         /* [rows] as packed by the method */
    ptrdiff_t x_stride;    /* in floats; only for rows of floats */
    float *y;              /* [rows], y_stride apart: [outs] */
    ptrdiff_t y_stride;
    const int32_t *y_rows; /* the output row of each row; NULL: in order */
} job;

INLINE float *results_of(const job *j, int row) {
    return j->y + (j->y_rows ? j->y_rows[row] : row) * j->y_stride;
}

/* Computes outputs from index * outs_at_once on. `next`: the index that this thread computes afterwards, or -1 if
 * that is not known; `foreseen`: this one was `next` before. */
typedef void (*part)(const job *, int index, int next, int foreseen);

/* `run` is for jobs with this outs_at_once; `pack` copies a row of x, times a factor, to its place among
 * `rows` packed rows. `together`: rows that one thread packs in order, beginning at a multiple of it; 0: any. */
typedef struct {
    part run;
    int outs_at_once;
    void (*pack)(int type, const float *x, float factor, int elements, int rows, int row, void *packed);
    int together;
} method;

/* The end of the rows that the thread packs which packs `row`: `row` if that is another thread. */
INLINE int packed_until(const method *how, int row, int rows) {
    if (!how->together) return row + 1;
    if (row % how->together) return row;
    return row + how->together < rows ? row + how->together : rows;
}

/* The method for this number of rows. Threads share the work of `matrices` such products. */
method method_of(int type, int compute, int rows, int outs, int matrices, int threads);

/* Number of elements of a row, rounded up to whole groups of 32. */
INLINE int padded(int elements) { return (elements + 31) / 32 * 32; }

/* Maximum number of bytes of a packed row, for any number of rows: floats, or groups of 32 as two planes for AMX. */
int64_t packed_row_bytes(int type, int compute, int elements);

/* Kernels with integers; `run` is NULL where there are none. */
method integer_method(int type, int compute, int rows, int outs, int matrices, int threads);

#endif
