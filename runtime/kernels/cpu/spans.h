/* What kernels of recurrent layers share: the rows of the sequences of a step, and softplus. */
#ifndef CARAVAN_SPANS_H
#define CARAVAN_SPANS_H

#include "simd.h"

/* begins, ends [spans]: rows [begin, end); NULL: each span is one row, in order. */
INLINE int begin_of(const int32_t *begins, int span) { return begins ? begins[span] : span; }
INLINE int end_of(const int32_t *ends, int span) { return ends ? ends[span] : span + 1; }

/* log(1 + e^x) */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

#endif
