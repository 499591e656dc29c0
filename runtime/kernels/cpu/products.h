/* Activations times quantised rows in floats: y[row][out] = sum over k of x[row][k] * w[out][k].
 *
 * Invariant: lane l of a sum adds the products with k % 16 == l in the order of k, starting from zero,
 * by fused multiply-add (in plain C, products are rounded first); v_sum adds the lanes. Every path does
 * so; therefore the bits of a row do not depend on the number of other rows. */
#ifndef CARAVAN_PRODUCTS_H
#define CARAVAN_PRODUCTS_H

#include "plain_rows.h"

#define FEW 4          /* maximum number of rows computed directly from the blocks in one pass */
#define FEW_OUTS 4     /* maximum number of weight rows read in parallel */
#define FEW_CHUNK 60   /* outputs that a thread computes at a time; divisible by 4, 3, 2 and 1 */

/* Maximum number of rows over all passes; for more, expanding into a buffer measured faster. */
INLINE int few_at_most(const int type) { return is_plain(type) || block_parts(type) == 4 ? 8 : 24; }

/* The number of weight rows whose sums fit into registers. */
INLINE int few_outs(const int rows) {
    const int outs = SUMS_AT_ONCE / rows;
    return outs > FEW_OUTS ? FEW_OUTS : outs ? outs : 1;
}

/* `outs` outputs from `out` on, for `rows` rows of x from `row` on; type, rows and outs are constants here. `next`:
 * the weights used afterwards, prefetched here because the hardware prefetcher does not follow so many rows. */
INLINE void few_tile(const int type, const int rows, const int outs, const job *j, int row, int out,
                     const uint8_t *next) {
    const float *x = (const float *)j->x + row * j->x_stride;
    const ptrdiff_t x_stride = j->x_stride;
    const int vectors = block_vectors(type), bytes = block_bytes(type);
    const int blocks = j->elements / block_elements(type), tail = j->elements % block_elements(type);
    const uint8_t *w = j->weight + out * j->row_bytes;
    v16 sum[FEW_OUTS][FEW];
    UNROLL(4)
    for (int o = 0; o < outs; o++)
        UNROLL(4)
        for (int r = 0; r < rows; r++) sum[o][r] = v_zero();
    for (int b = 0; b < blocks; b++) {
        float scales[FEW_OUTS][SCALES];
        UNROLL(4)
        for (int o = 0; o < outs; o++) {
            for (int line = 0; line < bytes; line += 64) prefetch_once(next + o * bytes + line);
            block_scales(type, w + o * j->row_bytes + (ptrdiff_t)b * bytes, scales[o]);
        }
        next += outs * bytes;
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
                    UNROLL(4)
                    for (int r = 0; r < rows; r++)
                        sum[o][r] = v_multiply(type, v_load(at + r * x_stride + 16 * i), expanded[i], sum[o][r]);
            }
        }
    }
    if (is_plain(type) && tail)
        UNROLL(4)
        for (int o = 0; o < outs; o++) {
            v16 last[2];
            expand_tail(type, w + o * j->row_bytes + (ptrdiff_t)blocks * bytes, tail, last);
            UNROLL(2)
            for (int i = 0; i < vectors; i++)
                UNROLL(4)
                for (int r = 0; r < rows; r++) {
                    const v16 at = v_load(x + r * x_stride + (blocks * vectors + i) * 16);
                    sum[o][r] = v_multiply(type, at, last[i], sum[o][r]);
                }
        }
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        float *const y = results_of(j, row + r) + out;
        UNROLL(4)
        for (int o = 0; o < outs; o++) y[o] = v_sum(sum[o][r]);
    }
}

/* One chunk of outputs for rows row .. row + rows - 1; `then`: the weights used after it. */
INLINE void few_rows(const int type, const int rows, const job *j, int row, int chunk, int then) {
    const int outs = few_outs(rows);
    int out = chunk * FEW_CHUNK, end = out + FEW_CHUNK < j->outs ? out + FEW_CHUNK : j->outs;
    for (; out + outs <= end; out += outs) {
        const int after = out + outs < end ? out + outs : then;
        few_tile(type, rows, outs, j, row, out, j->weight + after * j->row_bytes);
    }
    for (; out < end; out++) few_tile(type, rows, 1, j, row, out, j->weight + then * j->row_bytes);
}

typedef void (*few_part)(const job *, int row, int chunk, int then);

/* One chunk of outputs for all rows: the first pass reads the weights into the cache. */
INLINE void few(const few_part *passes, const job *j, int chunk, int next) {
    for (int row = 0; row < j->rows; row += FEW) {
        const int rows = j->rows - row < FEW ? j->rows - row : FEW;
        passes[rows](j, row, chunk, (row + rows < j->rows || next < 0 ? chunk : next) * FEW_CHUNK);
    }
}

/* `registers`: for many rows too, of the plain types. */
typedef struct { part few, many, registers; } product;

/* The float kernels of a type; NULL if it has none. The second function has only those of rare_types.c. */
const product *product_of(int type);
const product *rare_product(int type);

#define PASS(type, rows)                                                    \
    static void type##_##rows(const job *j, int row, int chunk, int then) { \
        few_rows(type, rows, j, row, chunk, then);                          \
    }
#define DEFINE(type)                                                            \
    PASS(type, 1)                                                               \
    PASS(type, 2)                                                               \
    PASS(type, 3)                                                               \
    PASS(type, 4)                                                               \
    static const few_part type##_passes[] = {NULL,     type##_1, type##_2,      \
                                             type##_3, type##_4};               \
    static void type##_few(const job *j, int chunk, int next, int foreseen) {   \
        (void)foreseen;                                                         \
        few(type##_passes, j, chunk, next);                                     \
    }                                                                           \
    DEFINE_MANY(type)
/* The methods of the rare types, which are expanded for any number of rows. */
#define DEFINE_MANY(type)                                                       \
    static void type##_many(const job *j, int tile, int next, int foreseen) {   \
        (void)foreseen;                                                         \
        many_rows(type, j, tile, next);                                         \
    }
#define DEFINE_PLAIN(type)                                                          \
    DEFINE(type)                                                                    \
    static void type##_registers(const job *j, int tile, int next, int foreseen) { \
        (void)foreseen;                                                             \
        plain_rows(type, j, tile, next);                                            \
    }
#define ENTRY(type) [type] = {type##_few, type##_many, NULL}
#define ENTRY_PLAIN(type) [type] = {type##_few, type##_many, type##_registers}
#define ENTRY_MANY(type) [type] = {NULL, type##_many, NULL}

#endif
