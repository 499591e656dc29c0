/* Rows of cached keys and values: floats, or blocks of 32 elements, the last one padded with zeros.
 *
 * Blocks are those of GGUF's Q8_0 and Q4_0. */
#ifndef CARAVAN_CACHE_ROWS_H
#define CARAVAN_CACHE_ROWS_H

#include "curves.h"

enum { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_Q8_0 = 3, CACHE_Q4_0 = 4 };
enum { Q8_0_BYTES = 34, Q4_0_BYTES = 18, HALF_BYTES = 2 };

INLINE int64_t row_bytes(const int type, int dim) {
    const int64_t blocks = (dim + 31) / 32;
    return type == CACHE_F32    ? dim * 4ll
           : type == CACHE_Q8_0 ? blocks * Q8_0_BYTES
           : type == CACHE_Q4_0 ? blocks * Q4_0_BYTES
                                : dim * 2ll;
}

/* Elements d .. d + 15 of 32, d is 0 or 16. */
INLINE v16 elements_of(const int type, const char *block, const int d) {
    if (type == CACHE_F32) return v_load((const float *)block + d);
    if (type == CACHE_F16) return v_half(block + d * HALF_BYTES);
    if (type == CACHE_BF16) return v_bfloat(block + d * HALF_BYTES);
    if (type == CACHE_Q8_0) return v_mul(v_i8(b_load(block + HALF_BYTES + d)), v_all_half(block));
    const nibbles values = signed_nibbles_of(block);
    const b16 packed = b_load(block + HALF_BYTES);
    return d ? nibbles_high(values, packed) : nibbles_low(values, packed);
}

INLINE void decode_as(const int type, const char *row, int dim, float *to) {
    const int quantised = type == CACHE_Q8_0 || type == CACHE_Q4_0;
    const int whole = quantised ? (dim + 31) / 32 * 32 : dim / 32 * 32;
    const int64_t block = row_bytes(type, 32);
    for (int d = 0; d < whole; d += 32, row += block) {
        v_store(to + d, elements_of(type, row, 0));
        v_store(to + d + 16, elements_of(type, row, 16));
    }
    if (whole < dim) {
        char last[128] = {0};
        memcpy(last, row, row_bytes(type, dim - whole));
        v_store(to + whole, elements_of(type, last, 0));
        v_store(to + whole + 16, elements_of(type, last, 16));
    }
}

/* A row as floats, up to the next multiple of 32. */
INLINE void decode_row(int type, const char *row, int dim, float *to) {
    switch (type) {
    case CACHE_F32: decode_as(CACHE_F32, row, dim, to); break;
    case CACHE_F16: decode_as(CACHE_F16, row, dim, to); break;
    case CACHE_BF16: decode_as(CACHE_BF16, row, dim, to); break;
    case CACHE_Q8_0: decode_as(CACHE_Q8_0, row, dim, to); break;
    default: decode_as(CACHE_Q4_0, row, dim, to);
    }
}

#endif
