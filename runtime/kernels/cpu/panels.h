/* Products of many rows: weights are expanded for a panel of outputs and multiplied with each panel of rows.
 *
 * Packed activations are [STEPS vectors][panel of ROWS_TILE rows][vector][row]; each panel is read in order. */
#ifndef CARAVAN_PANELS_H
#define CARAVAN_PANELS_H

#include "blocks.h"
#include "jobs.h"

#define STEPS 32      /* vectors of a row expanded at a time; divisible by those of a block */
#define PANEL_ROWS 128 /* rows that use them; divisible by ROWS_TILE */
#define TILE_OUTS 24  /* outputs of a part; divisible by OUTS_TILE */

/* The number of vectors of a row, with the last block padded. */
INLINE int row_vectors(const int type, int elements) {
    const int each = block_elements(type);
    return (elements + each - 1) / each * block_vectors(type);
}

/* Weights to prefetch: `bytes` of each row, rows `stride` apart; `left` cache lines remain to be loaded. */
typedef struct { const uint8_t *row, *at; ptrdiff_t stride; int bytes, left; } foresight;

INLINE foresight foresee(const uint8_t *p, ptrdiff_t stride, int rows, int bytes) {
    return (foresight){p, p, stride, bytes, rows * ((bytes + 63) / 64)};
}

/* Prefetches some of these lines. */
INLINE void fetch(foresight *f, int lines) {
    if (lines > f->left) lines = f->left;
    f->left -= lines;
    while (lines--) {
        prefetch_once(f->at);
        f->at += 64;
        if (f->at >= f->row + f->bytes) f->at = f->row += f->stride;
    }
}

/* `elements` of a row from p, the start of a block, into vectors OUTS_TILE apart. */
INLINE void expand_row(const int type, const uint8_t *p, int elements, float *w) {
    const int vectors = block_vectors(type), bytes = block_bytes(type), apart = 16 * OUTS_TILE;
    const int blocks = elements / block_elements(type), tail = elements % block_elements(type);
    v16 expanded[4];
    for (int b = 0; b < blocks; b++, p += bytes) {
        float scales[SCALES];
        block_scales(type, p, scales);
        UNROLL(4)
        for (int part = 0; part < block_parts(type); part++, w += apart * part_vectors(type)) {
            expand_part(type, p, scales, part, expanded);
            UNROLL(4)
            for (int i = 0; i < part_vectors(type); i++) v_store(w + apart * i, expanded[i]);
        }
    }
    if (!is_plain(type) || !tail) return;
    expand_tail(type, p, tail, expanded);
    for (int i = 0; i < vectors; i++) v_store(w + apart * i, expanded[i]);
}

INLINE chain multiply(const int paired, chain a, chain b, chain sum) {
#if CHAIN == 16
    if (paired) return v_bfloat_dot(a, b, sum);
#endif
    (void)paired;
    return c_fma(a, b, sum);
}

/* Continues, or begins, rows x OUTS_TILE sums over `steps` vectors: x [vector][row], w [vector][out]. */
INLINE void micro(const int paired, const int rows, const float *x, const float *w, int steps, int begin, float *sums) {
    if (rows > ROWS_TILE) return;
    for (int lane = 0; lane < 16; lane += CHAIN) {
        chain sum[ROWS_TILE][OUTS_TILE];
        UNROLL(4)
        for (int r = 0; r < rows; r++)
            UNROLL(6)
            for (int o = 0; o < OUTS_TILE; o++)
                sum[r][o] = begin ? c_zero() : c_load(sums + (r * OUTS_TILE + o) * 16 + lane);
        for (int s = 0; s < steps; s++) {
            chain weight[OUTS_TILE];
            UNROLL(6)
            for (int o = 0; o < OUTS_TILE; o++) weight[o] = c_load(w + (s * OUTS_TILE + o) * 16 + lane);
            UNROLL(4)
            for (int r = 0; r < rows; r++) {
                const chain at = c_load(x + (s * rows + r) * 16 + lane);
                UNROLL(6)
                for (int o = 0; o < OUTS_TILE; o++) sum[r][o] = multiply(paired, at, weight[o], sum[r][o]);
            }
        }
        UNROLL(4)
        for (int r = 0; r < rows; r++)
            UNROLL(6)
            for (int o = 0; o < OUTS_TILE; o++) c_store(sums + (r * OUTS_TILE + o) * 16 + lane, sum[r][o]);
    }
}

/* All panels of rows with a panel of outputs. */
INLINE void micro_rows(const int paired, const float *x, const float *w, int rows, int steps, int begin,
                       foresight *next, float *sums) {
    const int lines = next->left * ROWS_TILE / rows + 1;
    int r = 0;
    for (; r + ROWS_TILE <= rows; r += ROWS_TILE, x += ROWS_TILE * steps * 16, sums += ROWS_TILE * OUTS_TILE * 16) {
        fetch(next, lines);
        micro(paired, ROWS_TILE, x, w, steps, begin, sums);
    }
    fetch(next, next->left);
    switch (rows - r) {
    case 1: micro(paired, 1, x, w, steps, begin, sums); break;
    case 2: micro(paired, 2, x, w, steps, begin, sums); break;
    case 3: micro(paired, 3, x, w, steps, begin, sums); break;
    }
}

static void multiply_floats(const float *x, const float *w, int rows, int steps, int begin, foresight *next,
                            float *sums) {
    micro_rows(0, x, w, rows, steps, begin, next, sums);
}

INLINE void multiply_panels(const int type, const float *x, const float *w, int rows, int steps, int begin,
                            foresight *next, float *sums) {
    if (is_paired(type)) micro_rows(1, x, w, rows, steps, begin, next, sums);
    else multiply_floats(x, w, rows, steps, begin, next, sums);
}

/* `vectors` vectors of the weight rows from `out` on; rows after the last output repeat it. */
INLINE void expand_panel(const int type, const job *j, int out, int vector, int vectors, float *w) {
    const int block = vector / block_vectors(type), left = j->elements - block * block_elements(type);
    const int all = vectors / block_vectors(type) * block_elements(type), elements = left < all ? left : all;
    const uint8_t *const p = j->weight + (ptrdiff_t)block * block_bytes(type);
    for (int o = 0; o < OUTS_TILE; o++) {
        const int row = out + o < j->outs ? out + o : j->outs - 1;
        expand_row(type, p + row * j->row_bytes, elements, w + o * 16);
    }
}

/* Outputs from `begin` on for `rows` rows, at most PANEL_ROWS, from `row` on. `then`: the output computed next. */
INLINE void panel_tile(const int type, const job *j, int begin, int outs, int row, int rows, int then) {
    const int panels = (outs + OUTS_TILE - 1) / OUTS_TILE, vectors = row_vectors(type, j->elements);
    const int bytes = STEPS / block_vectors(type) * block_bytes(type);
    float w[STEPS * OUTS_TILE * 16] __attribute__((aligned(64)));
    float sums[TILE_OUTS / OUTS_TILE][PANEL_ROWS * OUTS_TILE * 16] __attribute__((aligned(64)));
    for (int vector = 0; vector < vectors; vector += STEPS) {
        const int steps = vectors - vector < STEPS ? vectors - vector : STEPS;
        const float *const x = (const float *)j->x + ((ptrdiff_t)vector * j->rows + (ptrdiff_t)row * steps) * 16;
        const uint8_t *const at = j->weight + (ptrdiff_t)(vector / block_vectors(type)) * block_bytes(type);
        for (int p = 0; p < panels; p++) {
            const int last = p + 1 == panels, behind = last && vector + STEPS >= vectors;
            const int out = behind ? then : begin + (last ? 0 : (p + 1) * OUTS_TILE);
            const int some = j->outs - out < OUTS_TILE ? j->outs - out : OUTS_TILE;
            foresight next = foresee((behind ? j->weight : last ? at + bytes : at) + out * j->row_bytes, j->row_bytes,
                                     some, bytes);
            expand_panel(type, j, begin + p * OUTS_TILE, vector, steps, w);
            multiply_panels(type, x, w, rows, steps, !vector, &next, sums[p]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float *const y = results_of(j, row + r) + begin;
        for (int o = 0; o < outs; o++)
            y[o] = v_sum(v_load(sums[o / OUTS_TILE] + (r * OUTS_TILE + o % OUTS_TILE) * 16));
    }
}

INLINE void many_rows(const int type, const job *j, int index, int next) {
    const int begin = index * TILE_OUTS, outs = j->outs - begin < TILE_OUTS ? j->outs - begin : TILE_OUTS;
    for (int row = 0; row < j->rows; row += PANEL_ROWS) {
        const int left = j->rows - row, then = left > PANEL_ROWS || next < 0 ? begin : next * TILE_OUTS;
        panel_tile(type, j, begin, outs, row, left < PANEL_ROWS ? left : PANEL_ROWS, then);
    }
}

#endif
