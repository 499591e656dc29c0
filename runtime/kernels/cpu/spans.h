/* What kernels of recurrent layers share: the rows of the sequences of a step, copies of states, softplus. */
#ifndef CARAVAN_SPANS_H
#define CARAVAN_SPANS_H

#include "simd.h"

/* begins, ends [spans]: rows [begin, end); NULL: each span is one row, in order. */
INLINE int begin_of(const int32_t *begins, int span) { return begins ? begins[span] : span; }
INLINE int end_of(const int32_t *ends, int span) { return ends ? ends[span] : span + 1; }

/* The first `width` numbers of `rows` rows, which begin so many numbers apart. */
INLINE void copy_rows(float *to, ptrdiff_t to_row, const float *from, ptrdiff_t from_row, int rows, int width) {
    for (int r = 0; r < rows; r++) memcpy(to + r * to_row, from + r * from_row, width * sizeof(float));
}

/* log(1 + e^x) */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

#endif
