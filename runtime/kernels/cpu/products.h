/* Activations times quantised rows in floats: y[row][out] = sum over k of x[row][k] * w[out][k].
 *
 * Invariant: lane l of a sum adds the products with k % 16 == l in the order of k, starting from zero,
 * by fused multiply-add; v_sum adds the lanes. Every path does so; therefore the bits of a row do not
 * depend on the number of other rows. */
#ifndef CARAVAN_PRODUCTS_H
#define CARAVAN_PRODUCTS_H

#include "blocks.h"
#include "jobs.h"

#define FEW 8          /* most rows computed directly from the blocks in one pass */
#define FEW_OUTS 4     /* most weight rows read in parallel */
#define FEW_CHUNK 60   /* outputs that a thread computes at a time; divisible by 4, 3, 2 and 1 */
#define TILE_OUTS 24   /* weight rows expanded at a time */
#define TILE_ROWS 128  /* activation rows that use them */
#define TILE_K 512     /* elements of a row expanded at a time */
#define W_STRIDE (TILE_K + 16)

/* Rows computed directly from the blocks in one pass; long blocks need more registers. */
INLINE int few_at_once(const int type) { return block_parts(type) == 1 ? FEW : FEW / 2; }

/* The most rows, over all passes; with more, expanding into a buffer is faster, as measured. */
INLINE int few_at_most(const int type) { return block_parts(type) == 1 ? 24 : 8; }

/* The number of weight rows whose sums fit into registers. */
INLINE int few_outs(const int rows) {
    const int outs = ROWS_TILE * OUTS_TILE / rows;
    return outs > FEW_OUTS ? FEW_OUTS : outs ? outs : 1;
}

/* `outs` outs from `out` on, `rows` rows of x from `row` on; type, rows and outs are constants here. */
INLINE void few_tile(const int type, const int rows, const int outs, const job *j, int row, int out) {
    const float *x = (const float *)j->x + row * j->x_stride;
    const ptrdiff_t x_stride = j->x_stride;
    const int vectors = block_vectors(type), bytes = block_bytes(type);
    const int blocks = j->elements / (16 * vectors), tail = j->elements % (16 * vectors);
    const uint8_t *w = j->weight + out * j->row_bytes;
    v16 sum[FEW_OUTS][FEW];
    UNROLL(4)
    for (int o = 0; o < outs; o++)
        UNROLL(8)
        for (int r = 0; r < rows; r++) sum[o][r] = v_zero();
    for (int b = 0; b < blocks; b++) {
        float scales[FEW_OUTS][SCALES];
        UNROLL(4)
        for (int o = 0; o < outs; o++) {
            const uint8_t *p = w + o * j->row_bytes + (ptrdiff_t)b * bytes;
            for (int line = 0; line < bytes; line += 64)
                __builtin_prefetch(p + outs * j->row_bytes + line, 0, 2);
            block_scales(type, p, scales[o]);
        }
        /* Part by part, so that the addition chains of several outputs overlap. */
        UNROLL(4)
        for (int part = 0; part < block_parts(type); part++) {
            const float *at = x + (b * vectors + part * part_vectors(type)) * 16;
            UNROLL(4)
            for (int o = 0; o < outs; o++) {
                v16 expanded[4];
                expand_part(type, w + o * j->row_bytes + (ptrdiff_t)b * bytes, scales[o], part, expanded);
                UNROLL(4)
                for (int i = 0; i < part_vectors(type); i++)
                    UNROLL(8)
                    for (int r = 0; r < rows; r++)
                        sum[o][r] = v_fma(v_load(at + r * x_stride + 16 * i), expanded[i], sum[o][r]);
            }
        }
    }
    if (vectors == 1 && tail)
        UNROLL(4)
        for (int o = 0; o < outs; o++) {
            const v16 last = expand_tail(type, w + o * j->row_bytes + (ptrdiff_t)blocks * bytes, tail);
            UNROLL(8)
            for (int r = 0; r < rows; r++)
                sum[o][r] = v_fma(v_load(x + r * x_stride + 16 * blocks), last, sum[o][r]);
        }
    UNROLL(8)
    for (int r = 0; r < rows; r++) {
        float *const y = results_of(j, row + r) + out;
        UNROLL(4)
        for (int o = 0; o < outs; o++) y[o] = v_sum(sum[o][r]);
    }
}

/* One chunk of outs for rows row .. row + rows - 1. */
INLINE void few_rows(const int type, const int rows, const job *j, int row, int chunk) {
    const int outs = few_outs(rows);
    if (rows > few_at_once(type)) return;
    int out = chunk * FEW_CHUNK, end = out + FEW_CHUNK < j->outs ? out + FEW_CHUNK : j->outs;
    for (; out + outs <= end; out += outs) few_tile(type, rows, outs, j, row, out);
    for (; out < end; out++) few_tile(type, rows, 1, j, row, out);
}

typedef void (*few_part)(const job *, int row, int chunk);

/* One chunk of outputs for all rows: the first pass reads the weights into the cache. */
INLINE void few(const int type, const few_part *passes, const job *j, int chunk) {
    for (int row = 0; row < j->rows;) {
        const int left = j->rows - row, most = few_at_once(type);
        const int rows = left >= most ? most : left >= 4 ? 4 : left;
        passes[rows](j, row, chunk);
        row += rows;
    }
}

/* `elements` of a row from p, the start of a block, into w; the rest of a vector becomes zero. */
INLINE void expand_row(const int type, const uint8_t *p, int elements, float *w) {
    const int vectors = block_vectors(type), bytes = block_bytes(type);
    const int blocks = elements / (16 * vectors), tail = elements % (16 * vectors);
    for (int b = 0; b < blocks; b++, p += bytes) {
        float scales[SCALES];
        block_scales(type, p, scales);
        UNROLL(4)
        for (int part = 0; part < block_parts(type); part++, w += 16 * part_vectors(type)) {
            v16 expanded[4];
            expand_part(type, p, scales, part, expanded);
            UNROLL(4)
            for (int i = 0; i < part_vectors(type); i++) v_store(w + 16 * i, expanded[i]);
        }
    }
    if (vectors == 1 && tail) v_store(w, expand_tail(type, p, tail));
}

/* Continues rows x OUTS_TILE sums over `steps` vectors; rows of x are TILE_K apart. */
INLINE void micro(const int rows, const float *x, const float *w, float *sums, int steps) {
    v16 sum[ROWS_TILE][OUTS_TILE];
    UNROLL(4)
    for (int r = 0; r < rows; r++)
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++) sum[r][o] = v_load(sums + (r * TILE_OUTS + o) * 16);
    for (int s = 0; s < steps; s++) {
        v16 at[ROWS_TILE];
        UNROLL(4)
        for (int r = 0; r < rows; r++) at[r] = v_load(x + r * TILE_K + 16 * s);
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++) {
            const v16 weight = v_load(w + o * W_STRIDE + 16 * s);
            UNROLL(4)
            for (int r = 0; r < rows; r++) sum[r][o] = v_fma(at[r], weight, sum[r][o]);
        }
    }
    UNROLL(4)
    for (int r = 0; r < rows; r++)
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++) v_store(sums + (r * TILE_OUTS + o) * 16, sum[r][o]);
}

static void micro_tiles(const float *x, const float *w, float *sums, int rows, int outs, int steps) {
    for (int o = 0; o < outs; o += OUTS_TILE) {
        const float *at = w + o * W_STRIDE;
        float *to = sums + o * 16;
        int r = 0;
        for (; r + ROWS_TILE <= rows; r += ROWS_TILE)
            micro(ROWS_TILE, x + r * TILE_K, at, to + r * TILE_OUTS * 16, steps);
        for (; r < rows; r++) micro(1, x + r * TILE_K, at, to + r * TILE_OUTS * 16, steps);
    }
}

INLINE void many_rows(const int type, const job *j, int tile) {
    const int vectors = block_vectors(type), out = tile * TILE_OUTS;
    const int outs = j->outs - out < TILE_OUTS ? j->outs - out : TILE_OUTS;
    float w[TILE_OUTS * W_STRIDE] __attribute__((aligned(64)));
    float sums[TILE_ROWS * TILE_OUTS * 16] __attribute__((aligned(64)));
    if (outs < TILE_OUTS) memset(w, 0, sizeof w);
    for (int row = 0; row < j->rows; row += TILE_ROWS) {
        const int rows = j->rows - row < TILE_ROWS ? j->rows - row : TILE_ROWS;
        memset(sums, 0, (size_t)rows * TILE_OUTS * 64);
        for (int k = 0; k < j->elements; k += TILE_K) {
            const int some = j->elements - k < TILE_K ? j->elements - k : TILE_K;
            const ptrdiff_t begin = (ptrdiff_t)(k / (16 * vectors)) * block_bytes(type);
            for (int o = 0; o < outs; o++)
                expand_row(type, j->weight + (out + o) * j->row_bytes + begin, some, w + o * W_STRIDE);
            const float *panel = (const float *)j->x + ((ptrdiff_t)(k / TILE_K) * j->rows + row) * TILE_K;
            micro_tiles(panel, w, sums, rows, outs, (some + 15) / 16);
        }
        for (int r = 0; r < rows; r++) {
            float *const y = results_of(j, row + r) + out;
            for (int o = 0; o < outs; o++) y[o] = v_sum(v_load(sums + (r * TILE_OUTS + o) * 16));
        }
    }
}

typedef struct { part few, many; } product;

/* The float kernels of a type; NULL if it has none. The second function has only those of rarer.c. */
const product *product_of(int type);
const product *rarer_product(int type);

#define PASS(type, rows)                                          \
    static void type##_##rows(const job *j, int row, int chunk) { \
        few_rows(type, rows, j, row, chunk);                      \
    }
#define DEFINE(type)                                                            \
    PASS(type, 1)                                                               \
    PASS(type, 2)                                                               \
    PASS(type, 3)                                                               \
    PASS(type, 4)                                                               \
    PASS(type, 8)                                                               \
    static const few_part type##_passes[] = {NULL,     type##_1, type##_2,      \
                                             type##_3, type##_4, [FEW] = type##_8}; \
    static void type##_few(const job *j, int chunk, int next, int foreseen) {   \
        (void)next, (void)foreseen;                                             \
        few(type, type##_passes, j, chunk);                                     \
    }                                                                           \
    DEFINE_MANY(type)
/* For the rarer types, which are expanded for any number of rows. */
#define DEFINE_MANY(type)                                                       \
    static void type##_many(const job *j, int tile, int next, int foreseen) {   \
        (void)next, (void)foreseen;                                             \
        many_rows(type, j, tile);                                               \
    }
#define ENTRY(type) [type] = {type##_few, type##_many}
#define ENTRY_MANY(type) [type] = {NULL, type##_many}

#endif
