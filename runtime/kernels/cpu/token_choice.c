/* The cached tokens that an indexer chooses for each row; see runtime/kernels/token_choice.py. A row is one
 * of the `choices` of a row of the step.
 *
 * A score adds the products of a head in the order of elements, and the heads in order, so that it
 * does not depend on other rows. */
#include <math.h>
#include <stddef.h>

#include "cache_rows.h"
#include "curves.h"
#include "thread_team.h"

extern int omp_get_thread_num(void);

#define LANES 16
#define BLOCK 64 /* positions that a thread scores at once */
#define ROWS 8   /* rows for which it decodes their keys once, if they are of one slot */
#define HEADS 4  /* heads whose products are in registers at once */
#if defined(__AVX512F__)
#define GROUPS (BLOCK / LANES) /* groups of positions whose products are in registers at once */
#else
#define GROUPS 1
#endif
#define SCORES_PER_THREAD (1 << 19)

typedef struct {
    const float *queries; /* [rows][heads][dim] */
    const float *weights; /* [rows][heads]; none: scores are products */
    const char *keys;     /* [pages][page_tokens] rows of dim elements */
    const int32_t *key_table, *cell_table; /* [slots], strides apart: pages of keys, and of the tokens */
    const int32_t *row_slot, *visible_begin, *visible_end; /* [rows / choices] */
    int32_t *cells;  /* [rows][width], each of one of `choices` heads of a token */
    int32_t *limits; /* [3][rows]: the number of the row, 0, and the number of its cells */
    float *scratch;  /* [caravan_choice_scratch] */
    int64_t key_stride, cell_stride;
    int32_t type, page_tokens, rows, choices, heads, dim;
    int32_t most, block, local; /* of blocks of `block` positions, the last `local` always */
    int32_t width, capacity, threads;
} caravan_choice_job;

typedef caravan_choice_job choice;

/* Some rows, whose scores are in scratch at once. */
typedef struct {
    const choice *of;
    int first, rows, blocks; /* `blocks` of positions for each of them */
} batch;

/* The keys [dim][BLOCK] of positions [begin, end) of a slot's block; they are decoded to `key`. */
typedef struct {
    float *keys, *key;
    int slot, begin, end;
} decoded;

INLINE int padded(int n) { return (n + 31) / 32 * 32; }
INLINE int most_of(int a, int b) { return a > b ? a : b; }

/* The positions and blocks that a row sees. */
typedef struct {
    int slot, begin, end, first, last;
} sight;

INLINE sight sight_of(const choice *j, int row) {
    const int token = row / j->choices, begin = j->visible_begin[token], end = j->visible_end[token];
    return (sight){j->row_slot[token], begin, end, begin / j->block, end > begin ? (end - 1) / j->block : -1};
}

INLINE int sees_few(const choice *j, const sight *s) { return s->last - s->first < j->most; }

static int rows_at_once(const choice *j) {
    const int64_t rows = (int64_t)j->threads * SCORES_PER_THREAD / most_of(1, j->capacity);
    return rows < 1 ? 1 : rows < j->rows ? (int)rows : j->rows;
}

/* Floats of a thread: see `decoded`. */
static int64_t own_floats(const choice *j) { return (int64_t)BLOCK * j->dim + padded(j->dim); }

/* Decodes the keys of positions [begin, end) in the block, of which none may be outside. */
static void decode(const choice *j, int slot, int block, int begin, int end, decoded *d) {
    const int64_t bytes = row_bytes(j->type, j->dim);
    const int32_t *table = j->key_table + slot * j->key_stride;
    if (slot == d->slot && begin >= d->begin && end <= d->end) return;
    for (int p = begin; p < end; p++) {
        const int64_t at = table[p / j->page_tokens] * (int64_t)j->page_tokens + p % j->page_tokens;
        decode_row(j->type, j->keys + at * bytes, j->dim, d->key);
        for (int i = 0; i < j->dim; i++) d->keys[(int64_t)i * BLOCK + p - block] = d->key[i];
    }
    d->slot = slot, d->begin = begin, d->end = end;
}

/* Adds the scores of n heads for GROUPS groups of positions; without weights, of which a row has only one
 * head, its products. */
INLINE void add_heads(const int n, int dim, const float *queries, const float *weights, const float *keys,
                      v16 *scores) {
    v16 sum[HEADS][GROUPS];
    UNROLL(4)
    for (int h = 0; h < n; h++)
        UNROLL(4)
        for (int g = 0; g < GROUPS; g++) sum[h][g] = v_zero();
    for (int i = 0; i < dim; i++, keys += BLOCK) {
        v16 key[GROUPS];
        UNROLL(4)
        for (int g = 0; g < GROUPS; g++) key[g] = v_load(keys + g * LANES);
        UNROLL(4)
        for (int h = 0; h < n; h++) {
            const v16 query = v_all(queries[(int64_t)h * dim + i]);
            UNROLL(4)
            for (int g = 0; g < GROUPS; g++) sum[h][g] = v_fma(query, key[g], sum[h][g]);
        }
    }
    UNROLL(4)
    for (int h = 0; h < n; h++)
        UNROLL(4)
        for (int g = 0; g < GROUPS; g++) {
            const v16 positive = v_max(v_zero(), sum[h][g]); /* or NaN */
            scores[g] = weights ? v_fma(v_all(weights[h]), positive, scores[g]) : sum[h][g];
        }
}

/* scores [BLOCK] of a row. */
static void score_block(const choice *j, int row, const float *keys, float *scores) {
    const float *queries = j->queries + (int64_t)row * j->heads * j->dim;
    const float *weights = j->weights ? j->weights + (int64_t)row * j->heads : NULL;
    for (int lane = 0; lane < BLOCK; lane += GROUPS * LANES) {
        v16 sums[GROUPS];
        int head = 0;
        for (int g = 0; g < GROUPS; g++) sums[g] = v_zero();
        for (; head + HEADS <= j->heads; head += HEADS)
            add_heads(HEADS, j->dim, queries + (int64_t)head * j->dim, weights + head, keys + lane, sums);
        for (; head < j->heads; head++)
            add_heads(1, j->dim, queries + (int64_t)head * j->dim, weights ? weights + head : NULL, keys + lane, sums);
        for (int g = 0; g < GROUPS; g++) v_store(scores + lane + g * LANES, sums[g]);
    }
}

/* Item i: block i % blocks of ROWS rows from i / blocks * ROWS on. */
static void score_blocks(const void *argument, const items *mine) {
    const batch *b = argument;
    const choice *j = b->of;
    float *own = j->scratch + (int64_t)rows_at_once(j) * j->capacity + own_floats(j) * omp_get_thread_num();
    for (int64_t item = mine->begin; item < mine->end; item++) {
        const int place = (int)(item / b->blocks) * ROWS, block = (int)(item % b->blocks) * BLOCK;
        decoded keys = {own, own + (int64_t)BLOCK * j->dim, -1, 0, 0};
        for (int i = least(ROWS, b->rows - place) - 1; i >= 0; i--) { /* the last row of a slot sees most */
            const int row = b->first + place + i;
            const sight seen = sight_of(j, row);
            const int begin = most_of(block, seen.begin), end = least(block + BLOCK, seen.end);
            if (begin >= end || sees_few(j, &seen)) continue;
            decode(j, seen.slot, block, begin, end, &keys);
            float scores[BLOCK];
            score_block(j, row, keys.keys, scores);
            memcpy(j->scratch + (int64_t)(place + i) * j->capacity + begin, scores + begin - block,
                   (end - begin) * sizeof(float));
        }
    }
}

/* An integer in the order of scores, of which NaN are the highest; minus zero equals zero. */
INLINE uint32_t order_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    if (score != score) return UINT32_MAX;
    if (!(bits << 1)) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The `count`-th highest of the scores [begin, end), of which there are more. `equal`: how many of the
 * scores that equal it are among the `count` highest. */
static uint32_t threshold(const float *scores, int begin, int end, int count, int *equal) {
    static const int shifts[] = {21, 10, 0}, sizes[] = {2048, 2048, 1024};
    uint32_t known = 0, mask = 0;
    for (int digit = 0; digit < 3; digit++) {
        int numbers[2048] = {0}, place = sizes[digit] - 1;
        for (int p = begin; p < end; p++) {
            const uint32_t order = order_of(scores[p]);
            if ((order & mask) == known) numbers[order >> shifts[digit] & (sizes[digit] - 1)]++;
        }
        while (numbers[place] < count) count -= numbers[place--];
        known |= (uint32_t)place << shifts[digit];
        mask |= (uint32_t)(sizes[digit] - 1) << shifts[digit];
    }
    *equal = count;
    return known;
}

/* Scores of positions become those of their blocks, in place. */
static void score_of_blocks(const choice *j, const sight *s, float *scores) {
    for (int b = s->first; b <= s->last; b++) {
        const int begin = most_of(b * j->block, s->begin), end = least(b * j->block + j->block, s->end);
        float highest = scores[begin];
        for (int p = begin + 1; p < end; p++)
            if (scores[p] > highest || scores[p] != scores[p]) highest = scores[p];
        scores[b] = b > s->last - j->local ? INFINITY : highest;
    }
}

static void choose_rows(const void *argument, const items *mine) {
    const batch *b = argument;
    const choice *j = b->of;
    for (int64_t place = mine->begin; place < mine->end; place++) {
        const int row = b->first + (int)place;
        const sight seen = sight_of(j, row);
        const int all = sees_few(j, &seen);
        float *scores = j->scratch + place * j->capacity;
        const int32_t *table = j->cell_table + seen.slot * j->cell_stride;
        int32_t *cells = j->cells + (int64_t)row * j->width;
        int equal = 0, count = 0;
        if (!all) score_of_blocks(j, &seen, scores);
        const uint32_t lowest = all ? 0 : threshold(scores, seen.first, seen.last + 1, j->most, &equal);
        for (int block = seen.first; block <= seen.last; block++) {
            const uint32_t order = all ? 1 : order_of(scores[block]);
            if (order < lowest || (order == lowest && equal-- <= 0)) continue;
            const int begin = most_of(block * j->block, seen.begin);
            const int end = least(block * j->block + j->block, seen.end);
            for (int p = begin; p < end; p++) {
                const int32_t cell = table[p / j->page_tokens] * j->page_tokens + p % j->page_tokens;
                cells[count++] = cell * j->choices + row % j->choices;
            }
        }
        memset(cells + count, 0, (j->width - count) * sizeof *cells);
        j->limits[row] = row;
        j->limits[j->rows + row] = 0;
        j->limits[2 * j->rows + row] = count;
    }
}

/* Floats of scratch. */
EXPORT int64_t caravan_choice_scratch(const choice *j) {
    return (int64_t)rows_at_once(j) * j->capacity + own_floats(j) * j->threads;
}

EXPORT void caravan_choose_tokens(const choice *j) {
    const int at_once = rows_at_once(j);
    for (int first = 0; first < j->rows; first += at_once) {
        batch b = {j, first, least(at_once, j->rows - first), 0};
        int end = 0;
        for (int row = first; row < first + b.rows; row++) end = most_of(end, sight_of(j, row).end);
        b.blocks = (end + BLOCK - 1) / BLOCK;
        share(j->threads, 1, (division){(int64_t)(b.rows + ROWS - 1) / ROWS * b.blocks, 1, 0}, score_blocks, &b);
        share(j->threads, 1, (division){b.rows, 1, 0}, choose_rows, &b);
    }
}
