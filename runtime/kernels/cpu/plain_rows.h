/* Products of many rows with weights of a plain type, which are expanded in registers for each panel of rows.
 *
 * Packed activations are [panel of ROWS_TILE rows][vector][row]. panels.h stores expanded weights and uses them for all
 * rows instead, which is slower where storing a vector takes as long as two products, as on Zen 4. */
#ifndef CARAVAN_PLAIN_ROWS_H
#define CARAVAN_PLAIN_ROWS_H

#include "panels.h"

/* Prefetches of a block: all weights are loaded while the first three panels of the part before are computed. */
INLINE int block_prefetches(const int type) { return block_bytes(type) / 32; }

/* Weights to prefetch. */
typedef struct { const uint8_t *at, *end; } upcoming;

INLINE void multiply_block(const int type, const int rows, const v16 *expanded, const float *x, int o,
                           v16 (*sum)[OUTS_TILE]) {
    UNROLL(2)
    for (int i = 0; i < block_vectors(type); i++)
        UNROLL(4)
        for (int r = 0; r < rows; r++)
            sum[r][o] = v_multiply(type, v_load(x + (i * rows + r) * 16), expanded[i], sum[r][o]);
}

/* sum[row][out] of x [vector][row] with OUTS_TILE rows of weights at w. */
INLINE void plain_tile(const int type, const int rows, const job *j, const float *x, const uint8_t *const *w,
                       upcoming *next, v16 (*sum)[OUTS_TILE]) {
    const int bytes = block_bytes(type), blocks = j->elements / block_elements(type);
    const int tail = j->elements % block_elements(type), floats = 16 * rows * block_vectors(type);
    const uint8_t *at = next->at;
    UNROLL(4)
    for (int r = 0; r < rows; r++)
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++) sum[r][o] = v_zero();
    for (ptrdiff_t b = 0; b < blocks; b++, x += floats) {
        UNROLL(2)
        for (int i = 0; i < block_prefetches(type); i++) prefetch_once(at + 64 * i);
        at = at < next->end ? at + 64 * block_prefetches(type) : at;
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++) {
            v16 expanded[4];
            expand_part(type, w[o] + b * bytes, NULL, 0, expanded);
            multiply_block(type, rows, expanded, x, o, sum);
        }
    }
    next->at = at;
    if (!tail) return;
    UNROLL(6)
    for (int o = 0; o < OUTS_TILE; o++) {
        v16 expanded[4];
        expand_tail(type, w[o] + (ptrdiff_t)blocks * bytes, tail, expanded);
        multiply_block(type, rows, expanded, x, o, sum);
    }
}

/* Outputs begin .. end - 1, at most OUTS_TILE, of `rows` rows from `row` on. */
INLINE void plain_outs(const int type, const int rows, const job *j, int row, int begin, int end, upcoming *next) {
    const float *const x = (const float *)j->x + (ptrdiff_t)row * 16 * row_vectors(type, j->elements);
    const uint8_t *w[OUTS_TILE];
    v16 sum[ROWS_TILE][OUTS_TILE];
    if (rows > ROWS_TILE) return;
    for (int o = 0; o < OUTS_TILE; o++)
        w[o] = j->weight + (begin + o < end ? begin + o : end - 1) * j->row_bytes;
    plain_tile(type, rows, j, x, w, next, sum);
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        float *const y = results_of(j, row + r);
        UNROLL(6)
        for (int o = 0; o < OUTS_TILE; o++)
            if (begin + o < end) y[begin + o] = v_sum(sum[r][o]);
    }
}

INLINE void plain_rows(const int type, const job *j, int index, int next) {
    const int begin = index * TILE_OUTS, end = begin + TILE_OUTS < j->outs ? begin + TILE_OUTS : j->outs;
    const int then = (next < 0 ? index : next) * TILE_OUTS, left = j->outs - then;
    const uint8_t *const at = j->weight + then * j->row_bytes;
    upcoming weights = {at, next < 0 ? at : at + (left < TILE_OUTS ? left : TILE_OUTS) * j->row_bytes};
    for (int row = 0; row < j->rows; row += ROWS_TILE) {
        const int rows = j->rows - row < ROWS_TILE ? j->rows - row : ROWS_TILE;
        for (int out = begin; out < end; out += OUTS_TILE)
            switch (rows) {
            case 1: plain_outs(type, 1, j, row, out, end, &weights); break;
            case 2: plain_outs(type, 2, j, row, out, end, &weights); break;
            case 3: plain_outs(type, 3, j, row, out, end, &weights); break;
            default: plain_outs(type, ROWS_TILE, j, row, out, end, &weights);
            }
    }
}

#endif
