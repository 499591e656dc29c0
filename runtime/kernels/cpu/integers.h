/* Activations of 8 or 15 bits times quantised rows, by integer products.
 *
 * Each group of 32 activations of a row becomes integers and one scale. Integers of 15 bits are two
 * planes of bytes, high * 128 + low, or numbers of 16 bits. Invariant: the result of an output adds its
 * groups in the order of add_columns by float operations that do not depend on other rows or outputs, and all
 * other sums are exact; so the bits of a row depend on nothing else, not even on the instruction set. */
#ifndef CARAVAN_INTEGERS_H
#define CARAVAN_INTEGERS_H

#include "amx.h"
#include "jobs.h"
#include "tiles.h"

#ifdef LANES

#if TILED
#define STREAMS 4  /* tiles that are read in turn, with few rows: memory delivers several streams faster than one */
#define FEW_ROWS 16
#else
#define STREAMS 1
#define FEW_ROWS 0
#endif
#define FETCHES (LANES < 8 ? LANES : 8) /* of a block */
#define IN_MEMORY(v) __asm__("" : "+m"(v))
#define ROWS_AT_ONCE 128 /* rows of activations that share unpacked weights */
#define AMX_ROWS_AT_ONCE 256 /* the same with AMX */
#define AMX_TILES_AT_ONCE 32  /* of whose outputs some groups at a time are added; divisible by TILES */
#define AMX_ROWS_IN_ORDER 32  /* with so few, activations fit into the second cache, and tiles are read in order */

/* A group of activations: `planes` times 32 bytes, a float scale, then for each half the sum of its integers
 * as needed by the type: times minus the offset as an integer, or as a float; for types with one scale per
 * group, the first is the sum of both. Groups are ordered [rows / ROWS_AT_ONCE][group][row]. */
INLINE int group_bytes(const int planes) { return planes * GROUP + 16; }

typedef struct {
    const uint8_t *x; /* [group][row] */
    int rows;
    float *y;         /* [row][tiles * LANES] */
} tile_rows;

/* How activations are stored: as one or two planes, or as numbers of 16 bits, which take the space of two; or as
 * planes for AMX. */
enum { ONE_PLANE = 1, TWO_PLANES = 2, WIDE = 3, ONE_AMX_PLANE = 4, TWO_AMX_PLANES = 5 };

INLINE int planes_of(const int form) { return form == ONE_PLANE || form == ONE_AMX_PLANE ? 1 : 2; }
INLINE int is_amx(const int form) { return form >= ONE_AMX_PLANE; }

/* Rows whose groups are packed together. */
INLINE int rows_together(const int form) {
#if HAS_AMX
    if (is_amx(form)) return AMX_ROWS;
#endif
    (void)form;
    return ROWS_AT_ONCE;
}

/* Bytes of a group of a row. */
INLINE int form_bytes(const int form) {
#if HAS_AMX
    if (is_amx(form)) return amx_row_bytes(planes_of(form));
#endif
    return group_bytes(planes_of(form));
}

/* The form of `planes` of so many rows. */
INLINE int form_of(const int type, const int planes, int rows) {
    if (type == Q16_0) return WIDE;
#ifdef PAIRED_CODES
    return planes == 2 && (rows >= WIDE_ROWS || largest_code(type) > PAIRED_CODES) ? WIDE : planes;
#elif HAS_AMX
    return rows < amx_least_rows(type, planes) ? planes : planes == 2 ? TWO_AMX_PLANES : ONE_AMX_PLANE;
#else
    (void)type, (void)rows;
    return planes;
#endif
}

/* What is subtracted for the offset of the codes of a half. */
INLINE ints start_of(const int type, const uint8_t *numbers, const int h) {
    return i_all(code_offset(type) ? int_at(numbers + 4 + 4 * h) : 0);
}

/* `all` with the sum of half `h` of a group. */
INLINE floats add_half(const int type, const group *g, const uint8_t *numbers, const int h, ints sum, floats all) {
    all = h ? f_fma(f_from(sum), g->scale[h], all) : f_from(sum) * g->scale[h];
    return has_base(type) ? f_fma(f_all(float_at(numbers + 4 + 4 * h)), g->base[h], all) : all;
}

/* A group of a row times those of `tiles` adjacent tiles. */
INLINE void add_row(const int type, const int planes, const int tiles, const group *g, const uint8_t *x, float *y) {
    const int halves = group_scales(type), n = 8 / halves;
    const uint8_t *const numbers = x + planes * GROUP;
    floats all[TILES];
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
        const int8_t *const at = (const int8_t *)x + 16 * h;
        const ints start = start_of(type, numbers, h);
        const bytes *w[TILES];
        ints sum[TILES], high[TILES];
        UNROLL(2)
        for (int t = 0; t < tiles; t++) w[t] = g[t].w + n * h, sum[t] = start, high[t] = i_all(0);
        dots(largest_code(type), tiles, w, at + (planes - 1) * GROUP, n, sum);
        if (planes == 2) dots(largest_code(type), tiles, w, at, n, high);
        UNROLL(2)
        for (int t = 0; t < tiles; t++) {
            if (planes == 2) sum[t] += high[t] << 7;
            all[t] = add_half(type, g + t, numbers, h, sum[t], all[t]);
        }
    }
    UNROLL(2)
    for (int t = 0; t < tiles; t++, y += LANES) f_store(y, f_fma(all[t], f_all(float_at(numbers)), f_load(y)));
}

#ifdef WIDE_ROWS

/* A group of `rows` rows, as numbers of 16 bits, times those of `tiles` adjacent tiles, whose codes are in v. */
INLINE void add_wide_rows(const int type, const int rows, const int tiles, const group *g, const shorts *const *v,
                          const uint8_t *x, float *y) {
    const int each = group_bytes(2), halves = group_scales(type), n = 16 / halves, sums = rows * tiles;
    const uint8_t *numbers = x + 2 * GROUP;
    floats all[WIDE_ROWS * TILES];
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
        ints sum[WIDE_ROWS * TILES];
        UNROLL(8)
        for (int k = 0; k < sums; k++) sum[k] = start_of(type, numbers + k / tiles * each, h);
        UNROLL(16)
        for (int i = n * h; i < n * h + n; i++) {
            shorts first = v[0][i], second = v[tiles - 1][i];
            if (rows > 1) IN_REGISTER(first);
            if (tiles > 1) IN_REGISTER(second);
            UNROLL(8)
            for (int k = 0; k < sums; k++)
                add_wide_dot(k % tiles ? second : first, i_all(int_at(x + k / tiles * each + 4 * i)), sum + k);
        }
        UNROLL(8)
        for (int k = 0; k < sums; k++)
            all[k] = add_half(type, g + k % tiles, numbers + k / tiles * each, h, sum[k], all[k]);
    }
    UNROLL(8)
    for (int k = 0; k < sums; k++, y += LANES)
        f_store(y, f_fma(all[k], f_all(float_at(numbers + k / tiles * each)), f_load(y)));
}

/* Not inlined, as a block of a K type would have it eight times, more than the cache of instructions. */
#define DEFINE_WIDE_ROWS(type)                                                                               \
    static __attribute__((noinline)) void add_wide_##type(const group *g, const shorts *const *v,      \
                                                          const uint8_t *x, float *y, int rows) {              \
        const int each = group_bytes(2), width = TILES * LANES;                                              \
        int r = 0;                                                                                           \
        for (; r + WIDE_ROWS <= rows; r += WIDE_ROWS, x += WIDE_ROWS * each, y += WIDE_ROWS * width)         \
            add_wide_rows(type, WIDE_ROWS, TILES, g, v, x, y);                                               \
        for (; r < rows; r++, x += each, y += width) add_wide_rows(type, 1, TILES, g, v, x, y);              \
    }

#if TILED
DEFINE_WIDE_ROWS(Q16_0)
#endif
#ifdef PAIRED_CODES
DEFINE_WIDE_ROWS(Q4_0)
DEFINE_WIDE_ROWS(Q4_K)
DEFINE_WIDE_ROWS(Q6_K)
DEFINE_WIDE_ROWS(Q2_K)
#endif

INLINE void add_wide_pairs(const int type, const group *g, const shorts *const *v, const uint8_t *x,
                           const tile_rows *to) {
#if TILED
    if (type == Q16_0) {
        add_wide_Q16_0(g, v, x, to->y, to->rows);
        return;
    }
#endif
#ifdef PAIRED_CODES
    const int halves = group_scales(type);
    if (has_base(type)) (halves == 1 ? add_wide_Q4_K : add_wide_Q2_K)(g, v, x, to->y, to->rows);
    else (halves == 1 ? add_wide_Q4_0 : add_wide_Q6_K)(g, v, x, to->y, to->rows); /* an offset may be 0 */
#endif
}

INLINE void add_wide_group(const int type, const int tiles, const group *g, const uint8_t *x, const tile_rows *to) {
    const shorts *v[TILES];
    float *y = to->y;
#ifdef PAIRED_CODES
    shorts codes[TILES][16];
    UNROLL(2)
    for (int t = 0; t < tiles && type != Q16_0; t++) widen(has_signed_codes(type), g[t].w, codes[t]);
#endif
    UNROLL(2)
    for (int t = 0; t < tiles; t++)
#ifdef PAIRED_CODES
        v[t] = type == Q16_0 ? g[t].wide : codes[t];
#else
        v[t] = g[t].wide;
#endif
    if (tiles > 1) {
        add_wide_pairs(type, g, v, x, to);
        return;
    }
    int r = 0;
    if (type == Q16_0)
        for (; r + WIDE_ROWS <= to->rows; r += WIDE_ROWS, x += WIDE_ROWS * group_bytes(2), y += WIDE_ROWS * LANES)
            add_wide_rows(type, WIDE_ROWS, 1, g, v, x, y);
    for (; r < to->rows; r++, x += group_bytes(2), y += LANES) add_wide_rows(type, 1, 1, g, v, x, y);
}

#endif

INLINE void add_group(const int type, const int form, const int tiles, const group *g, int index,
                      const tile_rows *to) {
    const int planes = planes_of(form);
    const uint8_t *x = to->x + (ptrdiff_t)index * to->rows * group_bytes(planes);
    float *y = to->y;
#ifdef WIDE_ROWS
    if (form == WIDE) {
        add_wide_group(type, tiles, g, x, to);
        return;
    }
#endif
    for (int r = 0; r < to->rows; r++, x += group_bytes(planes), y += tiles * LANES)
        add_row(type, planes, tiles, g, x, y);
}

/* Bytes of a row, or with TILED of a tile, that are loaded in advance: there also a block of 256 elements, which is not
 * read in order; and more with several rows, which do not wait for memory alone. */
INLINE int ahead(const int type, int rows) {
    if (!TILED) return 256;
    return block_vectors(type) == 16 ? 1024 + TILE_ROWS * block_bytes(type) : rows > 1 ? 4096 : 1024;
}

/* Begins to load so many bytes, some of which may be behind the end of the weights. */
INLINE void fetch(const uint8_t *p, const int bytes_count) {
    UNROLL(16)
    for (int line = 0; line < bytes_count; line += 64) prefetch_once(p + line);
}

/* The first block of LANES outputs from `out` on, with TILED a multiple of LANES. */
INLINE block_place block_of(const job *j, int out) {
    const int first = TILED ? out / TILE_ROWS * TILE_ROWS : out;
    return (block_place){j->weight + first * j->row_bytes, TILED ? out - first : j->row_bytes};
}

/* What is loaded while a tile is computed. Rows: the next tile, `p`, in order; and the first tile of a thread, which has
 * not been loaded (`is_first`), some bytes ahead in each row. The hardware does not foresee rows of tiles. TILED: the
 * same tile from p on, in advance; after so many bytes, `left`, the beginning of the tile `next`. */
typedef struct { const uint8_t *p, *next; ptrdiff_t left; int is_first; } foresight;

/* `tiles` adjacent tiles at their next blocks; the results are added to y [row][tiles * LANES]. */
typedef struct { block_place at[TILES]; foresight f[TILES]; float *y; } column;

/* Columns that have a tile of TILE_ROWS rows in common; the loads are begun with the first of them. */
INLINE int columns_of_tile(const int tiles) { return tiles * LANES < TILE_ROWS ? TILE_ROWS / (tiles * LANES) : 1; }

/* With the blocks of `rows` rows, from `row` on, of a column; with TILED, of each of its tiles. */
INLINE void foresee(const int type, column *c, const int tiles, const int row, const int rows, const int row_bytes) {
    if (TILED) {
        UNROLL(2)
        for (int t = 0; t < tiles; t++) {
            foresight *const f = c->f + t;
            if (first_lane(c->at + t)) continue;
            fetch(f->p, rows * row_bytes);
            f->p += rows * row_bytes;
            f->left -= rows * row_bytes;
            if (f->left <= 0) f->p = f->next, f->left = PTRDIFF_MAX;
        }
        return;
    }
    fetch(c->f->p, rows * row_bytes);
    c->f->p += rows * row_bytes;
    if (c->f->is_first)
        for (int l = row; l < row + rows; l++) fetch(c->at->p + l * c->at->step + ahead(type, 0), row_bytes);
}

INLINE void next_block(column *c, const int tiles, const int block_bytes_count) {
    UNROLL(2)
    for (int t = 0; t < tiles; t++) c->at[t].p += ADJACENT_ROWS * block_bytes_count;
}

/* The eight groups of 256 elements, from group `index` on. turns[k]: the column whose blocks are loaded with group k. */
INLINE void add_block(const int type, const int form, const int tiles, column *c, column *const *turns, int index,
                      const tile_rows *to) {
    const int share = LANES / FETCHES * (TILED && LANES == TILE_ROWS ? 1 : tiles);
    const int row_bytes = 256 / (16 * block_vectors(type)) * block_bytes(type);
    block b[TILES];
    group g[TILES];
    UNROLL(2)
    for (int t = 0; t < tiles; t++) begin_block(type, c->at + t, b + t);
    UNROLL(8)
    for (int k = 0; k < 8; k++) {
        /* A share of the block's rows with each group, as many loads at once delay those behind them. */
        if (k % (8 / FETCHES) == 0) foresee(type, turns[k], tiles, k / (8 / FETCHES) * share, share, row_bytes);
        UNROLL(2)
        for (int t = 0; t < tiles; t++) block_group(type, c->at + t, k, b + t, g + t);
        IN_MEMORY(b); /* or gcc has too few registers for the loop over rows */
        add_group(type, form, tiles, g, index + nth_group(type, k), to);
    }
    next_block(c, tiles, row_bytes);
}

#if HAS_AMX

/* Products of a type with one or two planes. Each function is compiled by itself: inlined together, they need more
 * registers than there are. */
typedef struct {
    int type, planes;
    void (*rows)(const amx_group *g, int count, const uint8_t *x, float *y, ptrdiff_t y_stride, amx_foresight *f);
    void (*rest)(const amx_group *g, int count, const uint8_t *x, int rows, float *y, ptrdiff_t y_stride);
    void (*pairs)(amx_group (*g)[AMX_GROUPS], const uint8_t *x, ptrdiff_t x_stride, int full, float *y,
                  amx_foresight *f);
} amx_product;

typedef void (*amx_unpack)(const block_place *at, const block_place *next, int count, amx_group *to);

/* `count` groups of LANES outputs, at most AMX_GROUPS. `next`: those that are unpacked some time later, whose loads
 * begin; with TILED, products do that. */
INLINE void unpack_for_amx(const int type, const block_place *at, const block_place *next, int count, amx_group *to) {
    const int in_block = block_groups(type) == 8 && count == AMX_GROUPS;
    const amx_codes table = amx_codes_of(code_offset(type));
    block b;
    group g;
    if (in_block) begin_block(type, at, &b);
    UNROLL(8)
    for (int k = 0; k < AMX_GROUPS; k++) {
        if (k == count) break;
        UNROLL(2)
        for (int l = 0; l < LANES / AMX_GROUPS && !TILED; l++)
            fetch(next->p + (k * (LANES / AMX_GROUPS) + l) * next->step, amx_block_bytes(type));
        if (in_block) block_group(type, at, k, &b, &g);
        else if (block_vectors(type) < 16) {
            const block_place kth = {at->p + ADJACENT_ROWS * k * block_bytes(type), at->step};
            simple_group(type, &kth, &g);
        }
        IN_MEMORY(b);
        amx_group_of(type, &table, &g, to + k);
    }
}

/* `count` groups from `begin` on of `tiles` adjacent tiles, unpacked in g, for `rows` rows at x: added to y. */
INLINE void add_amx_groups(const amx_product *how, int tiles, amx_group (*g)[AMX_GROUPS], int begin, int count,
                           int groups, const uint8_t *x, int rows, float *y, amx_foresight *f) {
    const int width = tiles * LANES, full = rows / AMX_ROWS, rest = rows % AMX_ROWS;
    const ptrdiff_t row_bytes = amx_row_bytes(how->planes), apart = groups * AMX_ROWS * row_bytes;
    const uint8_t *const at = x + begin * AMX_ROWS * row_bytes;
    if (has_amx_pairs(how->type, how->planes) && count == AMX_GROUPS && tiles == 2) how->pairs(g, at, apart, full, y, f);
    else
        for (int i = 0; i < full; i++)
            for (int t = 0; t < tiles; t++)
                how->rows(g[t], count, at + i * apart, y + i * AMX_ROWS * width + t * LANES, width, f);
    if (!rest) return;
    begin_amx(how->type, rest);
    for (int t = 0; t < tiles; t++)
        how->rest(g[t], count, x + full * apart + begin * rest * row_bytes, rest,
                  y + full * AMX_ROWS * width + t * LANES, width);
    begin_amx(how->type, 0);
}

/* Outputs begin .. end - 1, at most AMX_TILES_AT_ONCE tiles, for `rows` rows, at most AMX_ROWS_AT_ONCE, from `row` on.
 * AMX_GROUPS groups of all of them at a time, so that weights are unpacked once for all rows, while the groups of the
 * activations stay in the second cache. `next`: the output that is computed afterwards. */
static void add_amx_outs(const amx_product *how, amx_unpack unpack, int tiles, const job *j, int begin, int end, int row,
                         int rows, int next) {
    const int groups = j->elements / GROUP, width = tiles * LANES;
    const uint8_t *const x = (const uint8_t *)j->x + (ptrdiff_t)row * groups * amx_row_bytes(how->planes);
    float y[AMX_TILES_AT_ONCE * LANES * AMX_ROWS_AT_ONCE] __attribute__((aligned(64)));
    amx_group g[TILES][AMX_GROUPS];
    memset(y, 0, (size_t)rows * ((end - begin + width - 1) / width * width) * sizeof *y);
    const int lines = TILED ? LANES * amx_block_bytes(how->type) / 64 + 1 : 0, turns = rows / AMX_ROWS * AMX_GROUPS;
    for (int group = 0; group < groups; group += AMX_GROUPS) {
        const int count = groups - group < AMX_GROUPS ? groups - group : AMX_GROUPS;
        const ptrdiff_t offset = (ptrdiff_t)ADJACENT_ROWS * (group / AMX_GROUPS) * amx_block_bytes(how->type);
        const ptrdiff_t following = offset + ADJACENT_ROWS * amx_block_bytes(how->type);
        for (int out = begin; out < end; out += width) {
            /* The last tile ends with the last output. */
            const int first = out + width <= j->outs ? out : j->outs - width, last = out + width >= end;
            const int more = group + AMX_GROUPS < groups, then = !last ? out + width : more ? begin : next;
            amx_foresight f = {.lines = lines, .each = (lines + turns) / (turns + 1)};
            for (int t = 0; t < tiles; t++) {
                block_place at = block_of(j, first + t * LANES), behind = block_of(j, then + t * LANES);
                at.p += offset;
                behind.p += !last ? offset : more ? following : 0;
                unpack(&at, &behind, count, g[t]);
                f.p[t] = f.p[1] = behind.p;
            }
            add_amx_groups(how, tiles, g, group, count, groups, x, rows, y + (out - begin) * rows, &f);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int out = begin; out < end; out += width) {
            const int skipped = out + width <= j->outs ? 0 : width - (j->outs - out);
            memcpy(results_of(j, row + r) + out, y + (out - begin) * rows + r * width + skipped,
                   (width - skipped) * sizeof *y);
        }
}

/* As integer_part. */
static void amx_part(const amx_product *how, amx_unpack unpack, const job *j, int index, int next) {
    const int begin = index * j->outs_at_once, tiles = j->outs < TILES * LANES ? 1 : TILES;
    const int end = begin + j->outs_at_once < j->outs ? begin + j->outs_at_once : j->outs;
    const int at_once = TILED && j->rows <= AMX_ROWS_IN_ORDER ? tiles * LANES : AMX_TILES_AT_ONCE * LANES;
    begin_amx(how->type, 0);
    for (int row = 0; row < j->rows; row += AMX_ROWS_AT_ONCE) {
        const int rows = j->rows - row < AMX_ROWS_AT_ONCE ? j->rows - row : AMX_ROWS_AT_ONCE;
        const int behind = row + rows < j->rows || next < 0 ? begin : next * j->outs_at_once;
        for (int out = begin; out < end; out += at_once) {
            const int then = out + at_once < end ? out + at_once : behind;
            add_amx_outs(how, unpack, tiles, j, out, out + at_once < end ? out + at_once : end, row, rows, then);
        }
    }
    end_amx();
}

#define DEFINE_AMX_PLANES(type, planes)                                                                             \
    static __attribute__((noinline)) void type##_amx_rows_##planes(const amx_group *g, int count, const uint8_t *x, \
                                                                   float *y, ptrdiff_t y_stride, amx_foresight *f) { \
        add_amx_rows(type, planes, g, count, x, y, y_stride, f);                                                    \
    }                                                                                                               \
    static __attribute__((noinline)) void type##_amx_rest_##planes(const amx_group *g, int count, const uint8_t *x, \
                                                                   int rows, float *y, ptrdiff_t y_stride) {        \
        add_amx_rest(type, planes, g, count, x, rows, y, y_stride);                                                 \
    }                                                                                                               \
    static __attribute__((noinline)) void type##_amx_pairs_##planes(amx_group (*g)[AMX_GROUPS], const uint8_t *x,   \
                                                                    ptrdiff_t x_stride, int full, float *y,         \
                                                                    amx_foresight *f) {                             \
        if (has_amx_pairs(type, planes)) add_amx_pairs(type, planes, g, x, x_stride, full, y, f);                   \
    }                                                                                                               \
    static const amx_product type##_amx_##planes = {                                                                \
        type, planes, type##_amx_rows_##planes, type##_amx_rest_##planes, type##_amx_pairs_##planes};
#define DEFINE_UNPACK(type)                                                                                     \
    static __attribute__((noinline)) void type##_unpack_for_amx(const block_place *at, const block_place *next, \
                                                                int count, amx_group *to) {                     \
        unpack_for_amx(type, at, next, count, to);                                                              \
    }
#define UNPACK(type) type##_unpack_for_amx
#if TILED /* which has the products of rows */
#define DEFINE_AMX(type) DEFINE_UNPACK(type)
#define AMX_PRODUCTS(type) {0}
#else
#define DEFINE_AMX(type)       \
    DEFINE_UNPACK(type)        \
    DEFINE_AMX_PLANES(type, 1) \
    DEFINE_AMX_PLANES(type, 2)
#define AMX_PRODUCTS(type) {&type##_amx_1, &type##_amx_2}
#endif

#else

typedef struct amx_product amx_product;
typedef void (*amx_unpack)(void);
#define DEFINE_AMX(type)
#define UNPACK(type) NULL
#define AMX_PRODUCTS(type) {0}
INLINE void amx_part(const amx_product *how, amx_unpack unpack, const job *j, int index, int next) {
    (void)how, (void)unpack, (void)j, (void)index, (void)next;
}

#endif

/* The outputs of some columns, whose blocks are read in turn. */
INLINE void add_columns(const int type, const int form, const int tiles, column *all, int count, int elements,
                        const tile_rows *to) {
    const int groups = elements / GROUP, at_once = block_groups(type);
    const int apart = TILED ? columns_of_tile(tiles) : 1;
    column *turns[8];
    int i = 0;
    for (int k = 0; k < 8; k++) turns[k] = all + k / (8 / FETCHES) * apart % count;
    if (at_once == 8)
        for (; i + 8 <= groups; i += 8)
            for (column *c = all; c < all + count; c++) {
                const tile_rows of = {to->x, to->rows, c->y};
                add_block(type, form, tiles, c, turns, i, &of);
            }
    if (block_vectors(type) == 16) return;
    for (; i < groups; i++)
        for (column *c = all; c < all + count; c++) {
            const tile_rows of = {to->x, to->rows, c->y};
            group g[TILES];
            foresee(type, c, tiles, 0, TILED ? TILE_ROWS : tiles * LANES, block_bytes(type));
            UNROLL(2)
            for (int t = 0; t < tiles; t++) simple_group(type, c->at + t, g + t);
            add_group(type, form, tiles, g, i, &of);
            next_block(c, tiles, block_bytes(type));
        }
}

/* A column of the outputs from `out` on, whose first blocks are loaded already if `foreseen`; then that of `next`. */
INLINE void begin_column(const int type, const int tiles, const job *j, int out, int next, int foreseen, column *c) {
    const ptrdiff_t tile_bytes = TILE_ROWS * j->row_bytes;
    UNROLL(2)
    for (int t = 0; t < tiles; t++) {
        foresight *const f = c->f + t;
        c->at[t] = block_of(j, out + t * LANES);
        f->is_first = !foreseen;
        f->next = block_of(j, next + t * LANES).p;
        f->left = tile_bytes - ahead(type, j->rows);
        f->p = !TILED || f->left <= 0 ? f->next : c->at[t].p + ahead(type, j->rows);
        if (TILED && !foreseen && !first_lane(c->at + t)) fetch(c->at[t].p, ahead(type, j->rows));
    }
    if (!TILED && !foreseen)
        for (int l = 0; l < tiles * LANES; l++) fetch(c->at->p + l * c->at->step, ahead(type, j->rows));
}

/* Outputs from `index` * outs_at_once on, a multiple of tiles * LANES, of at least so many in all. */
INLINE void integer_part(const int type, const int form, const int tiles, const job *j, int index, int next,
                         int foreseen) {
    enum { most = STREAMS * TILE_ROWS / LANES }; /* columns */
    const int begin = index * j->outs_at_once, width = tiles * LANES, last = j->outs - width;
    const int end = begin + j->outs_at_once < j->outs ? begin + j->outs_at_once : j->outs;
    const int columns = TILED && j->rows <= FEW_ROWS ? most / tiles : 1, step = columns * width;
    float y[(TILED && most * FEW_ROWS > TILES * ROWS_AT_ONCE ? most * FEW_ROWS : TILES * ROWS_AT_ONCE) * LANES]
        __attribute__((aligned(64)));
    column all[TILED ? most : 1];
    for (int row = 0; row < j->rows; row += ROWS_AT_ONCE) {
        const int rows = j->rows - row < ROWS_AT_ONCE ? j->rows - row : ROWS_AT_ONCE;
        const ptrdiff_t row_bytes = (ptrdiff_t)(j->elements / GROUP) * form_bytes(form);
        const tile_rows to = {(const uint8_t *)j->x + row * row_bytes, rows, y};
        const int behind = row + rows < j->rows || next < 0 ? begin : next * j->outs_at_once;
        for (int out = begin; out < end; out += step) {
            const int count = end - out < step ? (end - out + width - 1) / width : columns;
            /* The last tile ends with the last output; it stores only those after the other tiles. */
            for (int c = 0; c < count; c++) {
                const int own = out + c * width, then = own + step < end ? own + step : behind + c * width;
                begin_column(type, tiles, j, own < last ? own : last, then < last ? then : last,
                             foreseen || row || out > begin, all + c);
                all[c].y = y + c * rows * width;
            }
            memset(y, 0, (size_t)count * rows * width * sizeof *y);
            add_columns(type, form, tiles, all, count, j->elements, &to);
            for (int c = 0; c < count; c++) {
                const int own = out + c * width, skipped = own < last ? 0 : own - last;
                for (int r = 0; r < rows; r++)
                    memcpy(results_of(j, row + r) + own, all[c].y + r * width + skipped, (width - skipped) * sizeof *y);
            }
        }
    }
}

typedef struct {
    part fine, fast;
    const amx_product *amx[2]; /* with one plane, and with two */
} integer_product;

/* The integer kernels of a type; `fine` is NULL if it has none. The second function has those of
 * integers_rare_types.c, the third those of integers_tiled.c, for weights in tiles. */
integer_product integer_product_of(int type);
integer_product rare_integer_product(int type);
integer_product tiled_integer_product(int type);

/* Rows from which two tiles share the loads of activations, by how many operations unpack a type; with fewer, the
 * innermost cache holds the next tile too, or sums stay in registers. */
#define SOON 4
#define LATE 32
#define DEFINE_PART(name, type, planes, pairs_from)                                                             \
    static void name(const job *j, int index, int next, int foreseen) {                                         \
        const int form = form_of(type, planes, j->rows), few = j->rows < SOON;                                  \
        if (is_amx(form)) amx_part(integer_product_of(type).amx[planes - 1], UNPACK(type), j, index, next);     \
        else if (form == WIDE && few) integer_part(type, WIDE, 1, j, index, next, foreseen);                    \
        else if (form == WIDE) integer_part(type, WIDE, TILES, j, index, next, foreseen);                       \
        else if (BYTE_TILES > 1 && j->rows >= pairs_from && j->outs >= BYTE_TILES * LANES)                      \
            integer_part(type, planes, BYTE_TILES, j, index, next, foreseen);                                   \
        else integer_part(type, planes, 1, j, index, next, foreseen);                                           \
    }
#define DEFINE_INTEGER(type, pairs_from)          \
    DEFINE_AMX(type)                              \
    DEFINE_PART(type##_fine, type, 2, pairs_from) \
    DEFINE_PART(type##_fast, type, 1, pairs_from)
#define INTEGER(type, pairs_from) [type] = {type##_fine, type##_fast, AMX_PRODUCTS(type)},

/* The types, with the rows from which two tiles share loads: of integers.c, and of integers_rare_types.c. */
#define COMMON_TYPES(DO) DO(Q4_0, SOON) DO(Q8_0, SOON) DO(Q4_K, SOON) DO(Q5_K, SOON) DO(Q6_K, LATE)
#define RARE_TYPES(DO)                                                                              \
    DO(Q4_1, LATE) DO(Q5_0, LATE) DO(Q5_1, LATE) DO(Q2_K, LATE) DO(Q3_K, LATE) DO(IQ4_NL, LATE) \
    DO(IQ4_XS, LATE) DO(MXFP4, LATE) DO(MXFP4_PAIRS, LATE)

#endif /* LANES */
#endif
