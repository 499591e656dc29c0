/* Fields of the blocks of LANES rows of weights. Compiled twice: for rows as in files, and, if TILED is 1, for tiles
 * of TILE_ROWS rows whose fields are interleaved (runtime/quant/formats/row_tiles.py). */
#ifndef CARAVAN_FIELDS_H
#define CARAVAN_FIELDS_H

#include "lanes.h"

#ifdef LANES

#ifndef TILED
#define TILED 0
#endif
#define TILE_ROWS 16
#define ADJACENT_ROWS (TILED ? TILE_ROWS : 1) /* whose n-th blocks are contiguous */

/* A block of LANES rows: in a file, that of the first row, and how far the next row is; in tiles, that of the tile,
 * and the first of its rows. */
typedef struct { const uint8_t *p; ptrdiff_t step; } block_place;

INLINE int first_lane(const block_place *at) { return LANES == TILE_ROWS ? 0 : (int)at->step; }

/* Four bytes at byte `offset` of the block of each row. */
INLINE ints ints_at(const block_place *at, const int offset) {
    ints i;
    if (!TILED) return ints_of_rows(at->p + offset, at->step);
    memcpy(&i, at->p + offset * TILE_ROWS + 4 * first_lane(at), sizeof i);
    return i;
}

/* Sixteen bytes: out[i] has bytes 4 i .. 4 i + 3 of row l in lane l. */
INLINE void words_at(const block_place *at, const int offset, bytes *out) {
    if (TILED)
        UNROLL(4)
        for (int i = 0; i < 4; i++) out[i] = (bytes)ints_at(at, offset + 4 * i);
    else transpose(at->p + offset, at->step, out);
}

/* Two bytes, as a float16. */
INLINE floats halves_at(const block_place *at, const int offset) {
    typedef uint16_t shorts_of_tile __attribute__((vector_size(2 * LANES)));
    shorts_of_tile some;
    if (!TILED) return f_halves(shorts_of_rows(at->p + offset, at->step));
    memcpy(&some, at->p + offset * TILE_ROWS + 2 * first_lane(at), sizeof some);
    return f_halves(__builtin_convertvector(some, ints));
}

/* The first byte of the block of each row. */
INLINE ints first_bytes(const block_place *at) {
    typedef uint8_t bytes_of_tile __attribute__((vector_size(LANES)));
    bytes_of_tile some;
    if (!TILED) return ints_of_rows(at->p, at->step) & 255;
    memcpy(&some, at->p + first_lane(at), sizeof some);
    return __builtin_convertvector(some, ints);
}

#endif /* LANES */
#endif
