/* Writes keys and values to their cells. Values beyond the range of a type become its largest ones. */
#include "cache_rows.h"
#include "thread_team.h"

#define HALF_MOST 65504.0f

typedef struct {
    const float *rows; /* [count][heads][dim], row_stride elements apart */
    char *cells; /* [cells][heads] rows of dim elements */
    int64_t row_stride;
    int32_t dim;
} part;

typedef struct {
    part keys, values; /* values without cells are the beginnings of keys */
    const int64_t *cell; /* [count] */
    int64_t cells;
    int32_t type, count, heads, threads;
} caravan_write_job;

/* Rounds to the nearest, ties to even, as torch does. */
INLINE uint16_t bfloat_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float within(float f, float most) { return f > most ? most : f < -most ? -most : f; }

static void encode_halves(const float *from, int dim, char *to) {
    int d = 0;
    for (; d + 16 <= dim; d += 16) v_store_half(to + d * HALF_BYTES, v_clamp(v_load(from + d), HALF_MOST));
    for (; d < dim; d++) {
        const uint16_t half = half_of(within(from[d], HALF_MOST));
        memcpy(to + d * HALF_BYTES, &half, HALF_BYTES);
    }
}

static void encode_bfloats(const float *from, int dim, char *to) {
    for (int d = 0; d < dim; d++) {
        const uint16_t bfloat = bfloat_of(from[d]);
        memcpy(to + d * HALF_BYTES, &bfloat, HALF_BYTES);
    }
}

/* 32 elements within the range that `levels` times the largest half allows; NaN stays NaN.
 * Returns the largest distance from 0, or NaN if there is one. */
static float load_block(const float *from, int count, int levels, float *block) {
    float last[32] = {0};
    if (count < 32) from = memcpy(last, from, count * sizeof(float));
    const v16 a = v_clamp(v_load(from), levels * HALF_MOST), b = v_clamp(v_load(from + 16), levels * HALF_MOST);
    v_store(block, a);
    v_store(block + 16, b);
    const float nans = v_sum(v_add(v_mul(a, v_zero()), v_mul(b, v_zero())));
    return nans + v_top(v_max(v_max(v_negative(a), a), v_max(v_negative(b), b)));
}

static void store_scale(float scale, char *to) {
    const uint16_t half = scale == scale ? half_of(scale) : 0x7e00;
    memcpy(to, &half, HALF_BYTES);
}

/* 1 / scale; 0 for a block of zeros and for one with a NaN, whose scale is NaN. */
INLINE float inverse(float scale) { return scale < 0.0f || scale > 0.0f ? 1.0f / scale : 0.0f; }

static void encode_q8_0(const float *from, int dim, char *to) {
    for (int d = 0; d < dim; d += 32, to += Q8_0_BYTES) {
        float block[32];
        const float scale = load_block(from + d, dim - d, 127, block) / 127.0f, factor = inverse(scale);
        store_scale(scale, to);
        for (int i = 0; i < 32; i++) { /* halves are rounded away from 0 */
            const float value = factor == 0.0f ? 0.0f : within(block[i] * factor, 127.0f);
            const int whole = (int)value;
            to[HALF_BYTES + i] = (char)(whole + (int)((value - (float)whole) * 2.0f));
        }
    }
}

/* The element furthest from 0 becomes -8; 8 is added to all. */
static void encode_q4_0(const float *from, int dim, char *to) {
    for (int d = 0; d < dim; d += 32, to += Q4_0_BYTES) {
        float block[32];
        uint8_t codes[32];
        const float furthest = load_block(from + d, dim - d, 8, block);
        int first = 0;
        while (first < 31 && fabsf(block[first]) != furthest) first++;
        const float scale = (furthest == furthest ? block[first] : furthest) / -8.0f, factor = inverse(scale);
        store_scale(scale, to);
        for (int i = 0; i < 32; i++) {
            const float value = factor == 0.0f ? 0.0f : within(block[i] * factor, 8.0f);
            const int code = (int)(value + 8.5f);
            codes[i] = (uint8_t)(code < 15 ? code : 15);
        }
        for (int i = 0; i < 16; i++) to[HALF_BYTES + i] = (char)(codes[i] | codes[i + 16] << 4);
    }
}

static void write_row(const caravan_write_job *j, const part *p, int row, int head) {
    const float *from = p->rows + row * p->row_stride + (int64_t)head * p->dim;
    char *to = p->cells + (j->cell[row] * j->heads + head) * row_bytes(j->type, p->dim);
    switch (j->type) {
    case CACHE_F32: memcpy(to, from, p->dim * sizeof(float)); break;
    case CACHE_F16: encode_halves(from, p->dim, to); break;
    case CACHE_BF16: encode_bfloats(from, p->dim, to); break;
    case CACHE_Q8_0: encode_q8_0(from, p->dim, to); break;
    default: encode_q4_0(from, p->dim, to);
    }
}

static void write_rows(const void *argument, const items *mine) {
    const caravan_write_job *j = argument;
    for (int row = (int)mine->begin; row < (int)mine->end; row++)
        for (int head = 0; head < j->heads; head++) {
            write_row(j, &j->keys, row, head);
            if (j->values.cells) write_row(j, &j->values, row, head);
        }
}

/* Returns 0, or 1 without writing anything if a cell is out of range. */
EXPORT int caravan_write_cache(const caravan_write_job *j) {
    for (int row = 0; row < j->count; row++)
        if (j->cell[row] < 0 || j->cell[row] >= j->cells) return 1;
    share(j->threads, j->count >= 4 * j->threads, even(j->count, j->threads), write_rows, j);
    return 0;
}
