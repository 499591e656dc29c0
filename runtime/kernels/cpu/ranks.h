/* Values in order of size, equal ones in order of their ids. */
#ifndef CARAVAN_RANKS_H
#define CARAVAN_RANKS_H

#include <stdint.h>
#include <string.h>

#include "simd.h"

/* Numbers in the order of (value, smaller id first), NaN above all; minus zero equals zero. */
INLINE int64_t rank_of(float value, int64_t id) {
    const float sum = value + 0.0f;
    int32_t bits;
    memcpy(&bits, &sum, 4);
    const int64_t ordered = value != value ? 0x7fffffff : bits < 0 ? bits ^ 0x7fffffff : bits;
    return ordered * ((int64_t)1 << 32) + (0xffffffff - id);
}

INLINE int64_t id_of(int64_t rank) { return 0xffffffff - (rank & 0xffffffff); }

/* Restores the heap, whose smallest rank comes first, below `at`. */
INLINE void sift(int64_t *heap, int count, int at) {
    const int64_t moved = heap[at];
    for (int child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (heap[child] >= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* For `qsort`: the highest rank first. */
INLINE int descending(const void *a, const void *b) {
    const int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first < second) - (first > second);
}

#endif
