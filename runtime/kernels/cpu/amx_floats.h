/* Rows of activations times BF16 weights in the tile registers of AMX.
 *
 * An activation is rounded to one bfloat16 (FAST), or to the sum of two, which has 16 bits (FINE). Invariant: a result
 * adds, for each group of 32 elements in order and for each plane of activations, what TDPBF16PS adds: the fused sum of
 * the products of even elements and that of odd ones, with subnormal numbers as zero. So its bits depend neither on
 * other rows nor on other outputs.
 *
 * Tiles of weights are rows of the matrix as they are in memory; sums are [output][row]. */
#ifndef CARAVAN_AMX_FLOATS_H
#define CARAVAN_AMX_FLOATS_H

#include "amx.h"
#include "jobs.h"

#if HAS_AMX

#define AMX_OUTS 16            /* of a tile */
#define AMX_TILES 4            /* of outputs that are computed together */
#define AMX_STEPS 8            /* groups whose weights stay in the innermost cache */
#define AMX_KEPT_ROWS 256      /* rows whose sums are kept meanwhile; divisible by AMX_ROWS */
#define AMX_PART 256           /* outputs of a part, at most */
#define AMX_PARTS_PER_THREAD 8 /* at least, if there are enough outputs */

typedef float amx_tile[AMX_OUTS][AMX_ROWS] __attribute__((aligned(64)));

/* Tiles of weights: group s of tile t begins at `at[t]` + s * step. With each group begin the loads of as many lines of
 * the weights that are used afterwards, line l at `next` + s * next_step + l * next_stride. */
typedef struct {
    const uint8_t *at[AMX_TILES], *next;
    ptrdiff_t stride, step, next_stride, next_step;
} amx_weights;

/* Copies of such tiles: rows that are far apart share few places of the innermost cache. */
typedef __m512i amx_copies[AMX_STEPS][AMX_TILES][AMX_OUTS];

/* Registers 0 to 3 are the sums of the tiles, 4 and 5 weights, 6 and 7 the planes of `rows` rows:
 * [pair of elements][row][2]. */
INLINE void begin_amx_floats(int rows) {
    tile_shapes all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.rows[i] = 16, all.row_bytes[i] = i == 4 || i == 5 ? 64 : (uint16_t)(4 * rows);
    __asm__ volatile("ldtilecfg %0" : : "m"(all));
}

#define MULTIPLY_TILE(tile, weights)                                  \
    do {                                                              \
        LOAD_TILE(weights, w->at[tile] + s * w->step, w->stride);     \
        _tile_dpbf16ps(tile, weights, 6);                             \
        if (planes == 2) _tile_dpbf16ps(tile, weights, 7);            \
    } while (0)
#define EACH_TILE(do_one, from) \
    do {                        \
        do_one(0, from[0], 64); \
        do_one(1, from[1], 64); \
        do_one(2, from[2], 64); \
        do_one(3, from[3], 64); \
    } while (0)

/* Begins, or continues, the sums of a tile of `rows` rows, packed at x, over `steps` groups. */
INLINE void add_amx_steps(const int planes, const amx_weights *w, const uint8_t *x, int rows, int steps, int begin,
                          amx_tile *sums) {
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        EACH_TILE(LOAD_TILE, sums);
    }
    for (int s = 0; s < steps; s++, x += planes * rows * AMX_PLANE) {
        LOAD_TILE(6, x, 4 * rows);
        if (planes == 2) LOAD_TILE(7, x + rows * AMX_PLANE, 4 * rows);
        MULTIPLY_TILE(0, 4);
        MULTIPLY_TILE(1, 5);
        MULTIPLY_TILE(2, 4);
        MULTIPLY_TILE(3, 5);
        UNROLL(4)
        for (int l = 0; l < AMX_TILES * AMX_OUTS; l++)
            prefetch_once(w->next + s * w->next_step + l * w->next_stride);
    }
    EACH_TILE(_tile_stored, sums);
}

static __attribute__((noinline)) void add_amx_steps_1(const amx_weights *w, const uint8_t *x, int rows, int steps,
                                                      int begin, amx_tile *sums) {
    add_amx_steps(1, w, x, rows, steps, begin, sums);
}

static __attribute__((noinline)) void add_amx_steps_2(const amx_weights *w, const uint8_t *x, int rows, int steps,
                                                      int begin, amx_tile *sums) {
    add_amx_steps(2, w, x, rows, steps, begin, sums);
}

/* Copies the last `elements` elements of `steps` groups, padded by zeros. Returns where the copies are. */
INLINE amx_weights copy_weights(const amx_weights *w, int steps, int elements, amx_copies to) {
    for (int s = 0; s < steps; s++) {
        const int left = elements - GROUP * s;
        const __mmask32 some = left >= GROUP ? ~0u : (1u << left) - 1;
        for (int t = 0; t < AMX_TILES; t++)
            UNROLL(4)
            for (int o = 0; o < AMX_OUTS; o++)
                to[s][t][o] = _mm512_maskz_loadu_epi16(some, w->at[t] + o * w->stride + s * w->step);
    }
    amx_weights copied = *w;
    copied.stride = 64, copied.step = sizeof to[0];
    for (int t = 0; t < AMX_TILES; t++) copied.at[t] = (const uint8_t *)to[0][t];
    return copied;
}

/* The first output of tile `t` of those from `out` on; the last tile ends with the last output. */
INLINE int tile_begin(const job *j, int out, int t) {
    const int begin = out + t * AMX_OUTS, last = j->outs - AMX_OUTS;
    return begin < last ? begin : last;
}

/* Writes the results of outputs from `out` on, but those before `begin`. */
INLINE void store_amx_tile(const job *j, amx_tile sums, int row, int rows, int out, int begin) {
    const __mmask16 own = (__mmask16)(0xffff << (begin - out));
    for (int r = 0; r < rows; r += 4) {
        bytes four[4];
        transpose((const uint8_t *)&sums[0][r], sizeof sums[0], four);
        for (int i = 0; i < 4 && r + i < rows; i++)
            _mm512_mask_storeu_ps(results_of(j, row + r + i) + out, own, (__m512)four[i]);
    }
}

/* Multiplies `rows` rows, packed at x, from group `group` on with AMX_TILES tiles: those of outputs `out` and on.
 * `sums`: [tile of rows][tile of outputs]; `ahead`: what of the weights is loaded meanwhile. */
static void add_amx_groups_of(int planes, const job *j, int out, int group, int steps, amx_weights ahead,
                              const uint8_t *x, int rows, amx_tile (*sums)[AMX_TILES]) {
    const int groups = padded(j->elements) / GROUP, ends_in_group = (group + steps) * GROUP > j->elements;
    amx_weights w = ahead;
    amx_copies copies;
    int shape = 0;
    w.stride = j->row_bytes, w.step = 2 * GROUP;
    for (int t = 0; t < AMX_TILES; t++) w.at[t] = j->weight + tile_begin(j, out, t) * j->row_bytes + group * 2 * GROUP;
    for (int r = 0; r < rows; r += AMX_ROWS) {
        const int some = rows - r < AMX_ROWS ? rows - r : AMX_ROWS;
        const uint8_t *const at = x + ((ptrdiff_t)r * groups + group * some) * planes * AMX_PLANE;
        if (r ? r == AMX_ROWS : ends_in_group) w = copy_weights(&w, steps, j->elements - group * GROUP, copies);
        if (some != shape) begin_amx_floats(some), shape = some;
        if (planes == 2) add_amx_steps_2(&w, at, some, steps, !group, sums[r / AMX_ROWS]);
        else add_amx_steps_1(&w, at, some, steps, !group, sums[r / AMX_ROWS]);
    }
}

/* The number of groups from `group` on whose sums are computed without storing them: with one tile of rows, whose
 * weights are not copied, all but a last one of fewer elements. */
INLINE int amx_steps(int rows, int group, int elements) {
    const int whole = elements / GROUP - group, left = padded(elements) / GROUP - group;
    if (rows <= AMX_ROWS) return whole ? whole : 1;
    return left < AMX_STEPS ? left : AMX_STEPS;
}

/* Outputs begin .. end - 1 with rows from `row` on. `next`: the output that is computed afterwards. */
INLINE void add_amx_float_outs(const int planes, const job *j, int begin, int end, int row, int rows, int next) {
    const int groups = padded(j->elements) / GROUP, width = AMX_TILES * AMX_OUTS;
    const uint8_t *const x = (const uint8_t *)j->x + (ptrdiff_t)row * groups * planes * AMX_PLANE;
    amx_tile sums[AMX_PART / (AMX_TILES * AMX_OUTS)][AMX_KEPT_ROWS / AMX_ROWS][AMX_TILES];
    for (int group = 0, steps; group < groups; group += steps) {
        steps = amx_steps(rows, group, j->elements);
        for (int out = begin; out < end; out += width) {
            const int last = out + width >= end, more = group + steps < groups;
            const int then = !last ? out + width : more ? begin : next;
            const int from = 2 * GROUP * (!last ? group : more ? group + steps : 0);
            const uint8_t *const rows_ahead = j->weight + then * j->row_bytes + from;
            const uint8_t *const in_order = j->weight + next * j->row_bytes + width * 2 * GROUP * group;
            const amx_weights ahead =
                begin + width < end
                    ? (amx_weights){.next = rows_ahead, .next_stride = j->row_bytes, .next_step = 2 * GROUP}
                    : (amx_weights){.next = in_order, .next_stride = 2 * GROUP, .next_step = width * 2 * GROUP};
            add_amx_groups_of(planes, j, out, group, steps, ahead, x, rows, sums[(out - begin) / width]);
        }
    }
    for (int r = 0; r < rows; r += AMX_ROWS)
        for (int out = begin; out < end; out += AMX_OUTS)
            store_amx_tile(j, sums[(out - begin) / width][r / AMX_ROWS][(out - begin) / AMX_OUTS % AMX_TILES], row + r,
                           rows - r < AMX_ROWS ? rows - r : AMX_ROWS, tile_begin(j, out, 0), out);
}

/* With many rows, some groups of all outputs of a part at a time, so that those of the activations stay in the second
 * cache; else weights are read in order. */
INLINE void amx_float_part(const int planes, const job *j, int index, int next) {
    const int begin = index * j->outs_at_once, left = j->outs - begin;
    const int end = begin + (left < j->outs_at_once ? left : j->outs_at_once);
    const int at_once = j->rows > AMX_ROWS ? AMX_PART : AMX_TILES * AMX_OUTS;
    for (int row = 0; row < j->rows; row += AMX_KEPT_ROWS) {
        const int rows = j->rows - row < AMX_KEPT_ROWS ? j->rows - row : AMX_KEPT_ROWS;
        const int behind = row + rows < j->rows || next < 0 ? begin : next * j->outs_at_once;
        for (int out = begin; out < end; out += at_once) {
            const int then = out + at_once < end ? out + at_once : behind;
            add_amx_float_outs(planes, j, out, out + at_once < end ? then : end, row, rows, then);
        }
    }
    end_amx();
}

static void amx_fine_part(const job *j, int index, int next, int foreseen) {
    (void)foreseen;
    amx_float_part(2, j, index, next);
}

static void amx_fast_part(const job *j, int index, int next, int foreseen) {
    (void)foreseen;
    amx_float_part(1, j, index, next);
}

/* 32 floats as the nearest bfloat16, ties to even. */
INLINE __m512i bfloats_of(const __m512 *f) { return (__m512i)_mm512_cvtne2ps_pbh(f[1], f[0]); }
INLINE __m512 bfloats_at(__m512i b, const int half) {
    const __m256i words = half ? _mm512_extracti64x4_epi64(b, 1) : _mm512_castsi512_si256(b);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* Elements of a tile of rows, [row][pair of elements], in the order [pair of elements][row]. */
INLINE void transpose_pairs(uint8_t *tile, int rows) {
    const __mmask16 own = (__mmask16)((1 << rows) - 1);
    uint8_t copy[AMX_ROWS * AMX_PLANE] __attribute__((aligned(64)));
    memcpy(copy, tile, rows * AMX_PLANE);
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        bytes four[4];
        transpose(copy + 16 * i, AMX_PLANE, four);
        UNROLL(4)
        for (int k = 0; k < 4; k++, tile += 4 * rows) _mm512_mask_storeu_epi32(tile, own, (__m512i)four[k]);
    }
}

/* A row of activations as planes: [rows / AMX_ROWS][group][plane][pair of elements][row][2]. Until the last row of a
 * tile is packed, it is [row][pair of elements][2]. */
INLINE void pack_amx_floats(const int planes, const float *x, float factor, int elements, int rows, int row,
                            void *packed) {
    const int groups = padded(elements) / GROUP, first = row / AMX_ROWS * AMX_ROWS;
    const int some = rows - first < AMX_ROWS ? rows - first : AMX_ROWS, tile_bytes = some * AMX_PLANE;
    uint8_t *const tiles = (uint8_t *)packed + (ptrdiff_t)first * groups * planes * AMX_PLANE;
    uint8_t *to = tiles + (row - first) * AMX_PLANE;
    for (int k = 0; k < elements; k += GROUP) {
        const __mmask32 present = elements - k >= GROUP ? ~0u : (1u << (elements - k)) - 1;
        __m512 rest[2];
        UNROLL(2)
        for (int i = 0; i < 2; i++)
            rest[i] = _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)(present >> 16 * i), x + k + 16 * i),
                                    _mm512_set1_ps(factor));
        UNROLL(2)
        for (int p = 0; p < planes; p++, to += tile_bytes) {
            const __m512i rounded = bfloats_of(rest);
            _mm512_storeu_si512(to, rounded);
            UNROLL(2)
            for (int i = 0; i < 2; i++) rest[i] = _mm512_sub_ps(rest[i], bfloats_at(rounded, i));
        }
    }
    if (some == 1 || row + 1 < first + some) return;
    for (int i = 0; i < groups * planes; i++) transpose_pairs(tiles + i * tile_bytes, some);
}

static void pack_amx_fine(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    (void)type;
    pack_amx_floats(2, x, factor, elements, rows, row, packed);
}

static void pack_amx_fast(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    (void)type;
    pack_amx_floats(1, x, factor, elements, rows, row, packed);
}

#endif

/* The method for a type without integer kernels; `run` is NULL if the tile registers do not multiply it. */
INLINE method amx_float_method(int type, int compute, int outs, int matrices, int threads) {
#if HAS_AMX
    const int width = AMX_TILES * AMX_OUTS, each = outs * matrices / (width * AMX_PARTS_PER_THREAD * threads);
    const int at_once = width * (each < 1 ? 1 : each > AMX_PART / width ? AMX_PART / width : each);
    if (outs >= AMX_OUTS && type == BF16 && compute == FINE)
        return (method){amx_fine_part, at_once, pack_amx_fine, AMX_ROWS};
    if (outs >= AMX_OUTS && type == BF16 && compute == FAST)
        return (method){amx_fast_part, at_once, pack_amx_fast, AMX_ROWS};
#endif
    (void)type, (void)compute, (void)outs, (void)matrices, (void)threads;
    return (method){0};
}

#endif
