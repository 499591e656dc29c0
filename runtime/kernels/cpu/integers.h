/* Activations of 8 or 15 bits times quantised rows, by integer products.
 *
 * Each group of 32 activations of a row becomes integers and one scale. Integers of 15 bits are two
 * planes of bytes: high * 128 + low. Invariant: the result of an output adds its groups in the order of
 * add_tile by float operations that do not depend on other rows or outputs, and all other sums are exact;
 * so the bits of a row depend on nothing else, not even on the instruction set. */
#ifndef CARAVAN_INTEGERS_H
#define CARAVAN_INTEGERS_H

#include "jobs.h"
#include "tiles.h"

#ifdef LANES

#define AHEAD 256 /* bytes of a row */
#define FETCHES (LANES < 8 ? LANES : 8) /* of a block */
#define ROWS_AT_ONCE 128 /* rows of activations that share unpacked weights */

/* A group of activations: `planes` times 32 bytes, a float scale, then for each half the sum of its integers
 * as needed by the type: times minus the offset as an integer, or as a float; for types with one scale per
 * group, the first is the sum of both. Groups are ordered [rows / ROWS_AT_ONCE][group][row]. */
INLINE int group_bytes(const int planes) { return planes * GROUP + 16; }

typedef struct {
    const uint8_t *x; /* [group][row] */
    int rows;
    float *y;         /* [row][LANES] */
} tile_rows;

INLINE void add_row(const int type, const int planes, const group *g, const uint8_t *x, float *y) {
    const int halves = group_scales(type), n = 8 / halves;
    const uint8_t *const numbers = x + planes * GROUP;
    floats t;
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
        const int8_t *const at = (const int8_t *)x + 16 * h;
        const ints start = i_all(code_offset(type) ? int_at(numbers + 4 + 4 * h) : 0);
        ints sum = dots(largest_code(type), g->w + n * h, at + (planes - 1) * GROUP, n, start);
        if (planes == 2) sum += dots(largest_code(type), g->w + n * h, at, n, i_all(0)) << 7;
        t = h ? f_fma(f_from(sum), g->scale[h], t) : f_from(sum) * g->scale[h];
        if (has_base(type)) t = f_fma(f_all(float_at(numbers + 4 + 4 * h)), g->base[h], t);
    }
    f_store(y, f_fma(t, f_all(float_at(numbers)), f_load(y)));
}

INLINE void add_group(const int type, const int planes, const group *g, int index, const tile_rows *to) {
    const uint8_t *x = to->x + (ptrdiff_t)index * to->rows * group_bytes(planes);
    float *y = to->y;
    for (int r = 0; r < to->rows; r++, x += group_bytes(planes), y += LANES)
        add_row(type, planes, g, x, y);
}

/* Begins to load so many bytes, some of which may be behind the end of the weights. */
INLINE void fetch(const uint8_t *p, const int bytes_count) {
    UNROLL(16)
    for (int line = 0; line < bytes_count; line += 64) __builtin_prefetch(p + line, 0, 0);
}

/* What is loaded while a tile is computed: the next tile, `next`, in order; and the first tile of a part,
 * which no other has loaded, some bytes ahead in each row. The hardware does not foresee rows of tiles. */
typedef struct { const uint8_t *next; int first; } foresight;

INLINE void foresee(foresight *f, const uint8_t *p, ptrdiff_t stride, const int rows, const int row_bytes) {
    fetch(f->next, rows * row_bytes);
    f->next += rows * row_bytes;
    if (f->first)
        for (int l = 0; l < rows; l++) fetch(p + l * stride + AHEAD, row_bytes);
}

/* The eight groups of blocks of 256 elements, from group `index` on. */
INLINE void add_large_block(const int type, const int planes, const uint8_t *p, ptrdiff_t stride, int index,
                            const tile_rows *to, foresight *f) {
    floats scale[16], base[16];
    bytes q[8], bits[8];
    group g;
    switch (type) {
    case Q4_K: k_scales_tile(p, stride, scale, base); break;
    case Q5_K: k_scales_tile(p, stride, scale, base); break;
    case Q2_K: q2_k_scales_tile(p, stride, scale, base); break;
    case Q3_K: q3_k_scales_tile(p, stride, scale); break;
    case Q6_K: q6_k_scales_tile(p, stride, scale); break;
    default: iq4_xs_scales_tile(p, stride, scale);
    }
    if (type == Q5_K || type == Q3_K) {
        const int at = type == Q5_K ? 16 : 0;
        transpose(p + at, stride, bits);
        transpose(p + at + 16, stride, bits + 4);
    }
    UNROLL(8)
    for (int k = 0; k < 8; k++) {
        /* Q6_K stores groups 0 and 2 of a half in the same bytes. */
        const int i = type == Q6_K ? k / 4 * 4 + k % 4 / 2 + k % 2 * 2 : k;
        const int quarter = i % 4;
        /* A share of the block's rows with each group, as many loads at once delay those behind them. */
        if (k % (8 / FETCHES) == 0)
            foresee(f, p + k / (8 / FETCHES) * (LANES / FETCHES) * stride, stride, LANES / FETCHES, block_bytes(type));
        switch (type) {
        case Q4_K: case Q5_K:
            if (i % 2 == 0) {
                const uint8_t *const at = p + (type == Q4_K ? 16 : 48) + 16 * i;
                transpose(at, stride, q);
                transpose(at + 16, stride, q + 4);
            }
            UNROLL(8)
            for (int n = 0; n < 8; n++) {
                g.w[n] = (i % 2 ? right(q[n], 4) : q[n]) & 15;
                if (type == Q5_K) g.w[n] |= (i < 4 ? left(bits[n], 4 - i) : right(bits[n], i - 4)) & 16;
            }
            break;
        case Q2_K: case Q3_K:
            if (quarter == 0) {
                const uint8_t *const at = p + (type == Q2_K ? 16 : 32) + 8 * i;
                transpose(at, stride, q);
                transpose(at + 16, stride, q + 4);
            }
            UNROLL(8)
            for (int n = 0; n < 8; n++) {
                g.w[n] = right(q[n], 2 * quarter) & 3;
                if (type == Q3_K) g.w[n] |= (i < 2 ? left(bits[n], 2 - i) : right(bits[n], i - 2)) & 4;
            }
            break;
        case Q6_K:
            if (k % 4 == 0) {
                transpose(p + 128 + 8 * i, stride, bits);
                transpose(p + 144 + 8 * i, stride, bits + 4);
            }
            if (k % 2 == 0) {
                transpose(p + 64 * (i / 4) + 32 * (i % 2), stride, q);
                transpose(p + 64 * (i / 4) + 32 * (i % 2) + 16, stride, q + 4);
            }
            UNROLL(8)
            for (int n = 0; n < 8; n++) {
                const bytes upper = quarter < 2 ? left(bits[n], 4 - 2 * quarter)
                                                : right(bits[n], 2 * quarter - 4);
                g.w[n] = ((quarter < 2 ? q[n] : right(q[n], 4)) & 15) | (upper & 48);
            }
            break;
        default: codes_tile(NONLINEAR, SIGNED_OFFSET, p + 8 + 16 * i, stride, g.w);
        }
        UNROLL(2)
        for (int h = 0; h < group_scales(type); h++) {
            g.scale[h] = scale[group_scales(type) * i + h];
            if (has_base(type)) g.base[h] = base[group_scales(type) * i + h];
        }
        add_group(type, planes, &g, index + i, to);
    }
}

/* LANES outputs, from rows `stride` apart at p on. */
INLINE void add_tile(const int type, const int planes, const uint8_t *p, ptrdiff_t stride, int elements,
                     int first, const tile_rows *to) {
    const int groups = elements / GROUP;
    foresight f = {p + LANES * stride, first};
    if (first)
        for (int l = 0; l < LANES; l++) fetch(p + l * stride, AHEAD);
    if (block_vectors(type) == 16) {
        for (int i = 0; i < groups; i += 8, p += block_bytes(type)) {
            add_large_block(type, planes, p, stride, i, to, &f);
        }
        return;
    }
    for (int i = 0; i < groups; i++, p += block_bytes(type)) {
        group g;
        foresee(&f, p, stride, LANES, block_bytes(type));
        simple_group(type, p, stride, &g);
        add_group(type, planes, &g, i, to);
    }
}

/* Outputs from `part` * outs_at_once on, a multiple of LANES; at least LANES in all. */
INLINE void integer_part(const int type, const int planes, const job *j, int part) {
    const int begin = part * j->outs_at_once;
    const int end = begin + j->outs_at_once < j->outs ? begin + j->outs_at_once : j->outs;
    float y[ROWS_AT_ONCE * LANES] __attribute__((aligned(64)));
    for (int row = 0; row < j->rows; row += ROWS_AT_ONCE) {
        const int rows = j->rows - row < ROWS_AT_ONCE ? j->rows - row : ROWS_AT_ONCE;
        const ptrdiff_t row_bytes = (ptrdiff_t)(j->elements / GROUP) * group_bytes(planes);
        const tile_rows to = {(const uint8_t *)j->x + row * row_bytes, rows, y};
        for (int out = begin; out < end; out += LANES) {
            /* The last tile ends with the last output; it stores only those after the other tiles. */
            const int first = out + LANES <= j->outs ? out : j->outs - LANES, skipped = out - first;
            memset(y, 0, (size_t)rows * LANES * sizeof *y);
            add_tile(type, planes, j->weight + first * j->row_bytes, j->row_bytes, j->elements,
                     out == begin, &to);
            for (int r = 0; r < rows; r++)
                memcpy(results_of(j, row + r) + out, y + r * LANES + skipped,
                       (LANES - skipped) * sizeof *y);
        }
    }
}

typedef struct { part fine, fast; } integer_product;

/* The integer kernels of a type; `fine` is NULL if it has none. The second function has those of integers_rarer.c. */
integer_product integer_product_of(int type);
integer_product rarer_integer_product(int type);

#define DEFINE_INTEGER(type)                                                          \
    static void type##_fine(const job *j, int index) { integer_part(type, 2, j, index); } \
    static void type##_fast(const job *j, int index) { integer_part(type, 1, j, index); }
#define INTEGER(type) [type] = {type##_fine, type##_fast}

#endif /* LANES */
#endif
