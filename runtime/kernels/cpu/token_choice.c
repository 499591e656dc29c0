/* The cached tokens that an indexer chooses for each row; see runtime/kernels/token_choice.py.
 *
 * A score adds its products in an order of its own, so that it does not depend on other rows. */
#include <stddef.h>

#include "cache_rows.h"
#include "curves.h"
#include "thread_team.h"

extern int omp_get_thread_num(void);

#define BLOCK 64 /* positions that a thread scores at once */
#define HEADS 4  /* heads whose products are in registers at once */
#define SCORES_PER_THREAD (1 << 19)

typedef struct {
    const float *queries; /* [rows][heads][dim] */
    const float *weights; /* [rows][heads] */
    const char *keys;     /* [pages][page_tokens] rows of dim elements */
    const int32_t *key_table, *cell_table; /* [slots], strides apart: pages of keys, and of the tokens */
    const int32_t *row_slot, *visible_begin, *visible_end; /* [rows] */
    int32_t *cells;  /* [rows][most] */
    int32_t *limits; /* [3][rows]: the number of the row, 0, and the number of its cells */
    float *scratch;  /* [caravan_choice_scratch] */
    int64_t key_stride, cell_stride;
    int32_t type, page_tokens, rows, heads, dim, most, capacity, threads;
} caravan_choice_job;

typedef caravan_choice_job choice;

/* Some rows, whose scores are in scratch at once. */
typedef struct {
    const choice *of;
    int first, rows, blocks; /* `blocks` of positions for each of them */
} batch;

INLINE int padded(int n) { return (n + 31) / 32 * 32; }
INLINE int most_of(int a, int b) { return a > b ? a : b; }

static int rows_at_once(const choice *j) {
    const int64_t rows = (int64_t)j->threads * SCORES_PER_THREAD / most_of(1, j->capacity);
    return rows < 1 ? 1 : rows < j->rows ? (int)rows : j->rows;
}

/* Floats of a thread: the queries of a row and a key, whose rows are padded with zeros. */
static int64_t own_floats(const choice *j) { return ((int64_t)j->heads + 1) * padded(j->dim); }

static float score(const choice *j, const float *queries, const float *key, const float *weights) {
    const int stride = padded(j->dim);
    float score = 0.0f;
    for (int head = 0; head < j->heads; head += HEADS) {
        const int some = least(HEADS, j->heads - head);
        v16 sum[HEADS];
        for (int h = 0; h < HEADS; h++) sum[h] = v_zero();
        for (int d = 0; d < stride; d += 16) {
            const v16 elements = v_load(key + d);
            for (int h = 0; h < some; h++)
                sum[h] = v_fma(v_load(queries + (int64_t)(head + h) * stride + d), elements, sum[h]);
        }
        for (int h = 0; h < some; h++) {
            const float product = v_sum(sum[h]);
            if (product > 0.0f) score += weights[head + h] * product;
        }
    }
    return score;
}

/* Item i: block i % blocks of row i / blocks. */
static void score_blocks(const void *argument, const items *mine) {
    const batch *b = argument;
    const choice *j = b->of;
    const int stride = padded(j->dim);
    const int64_t bytes = row_bytes(j->type, j->dim);
    float *queries = j->scratch + (int64_t)rows_at_once(j) * j->capacity + own_floats(j) * omp_get_thread_num();
    float *key = queries + (int64_t)j->heads * stride;
    int loaded = -1;
    for (int64_t item = mine->begin; item < mine->end; item++) {
        const int place = (int)(item / b->blocks), row = b->first + place, block = (int)(item % b->blocks) * BLOCK;
        const int begin = most_of(block, j->visible_begin[row]), end = least(block + BLOCK, j->visible_end[row]);
        if (begin >= end || j->visible_end[row] - j->visible_begin[row] <= j->most) continue;
        for (int h = 0; loaded != row && h < j->heads; h++) {
            memcpy(queries + h * stride, j->queries + ((int64_t)row * j->heads + h) * j->dim, j->dim * sizeof(float));
            memset(queries + h * stride + j->dim, 0, (stride - j->dim) * sizeof(float));
        }
        loaded = row;
        const int32_t *table = j->key_table + j->row_slot[row] * j->key_stride;
        float *scores = j->scratch + (int64_t)place * j->capacity;
        for (int p = begin; p < end; p++) {
            const int64_t at = table[p / j->page_tokens] * (int64_t)j->page_tokens + p % j->page_tokens;
            decode_row(j->type, j->keys + at * bytes, j->dim, key);
            scores[p] = score(j, queries, key, j->weights + (int64_t)row * j->heads);
        }
    }
}

/* An integer in the order of scores; minus zero equals zero. */
INLINE uint32_t order_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
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

static void choose_rows(const void *argument, const items *mine) {
    const batch *b = argument;
    const choice *j = b->of;
    for (int64_t place = mine->begin; place < mine->end; place++) {
        const int row = b->first + (int)place, begin = j->visible_begin[row], end = j->visible_end[row];
        const int all = end - begin <= j->most;
        const float *scores = j->scratch + place * j->capacity;
        const int32_t *table = j->cell_table + j->row_slot[row] * j->cell_stride;
        int32_t *cells = j->cells + (int64_t)row * j->most;
        int equal = 0, count = 0;
        const uint32_t lowest = all ? 0 : threshold(scores, begin, end, j->most, &equal);
        for (int p = begin; p < end; p++) {
            const uint32_t order = all ? 1 : order_of(scores[p]);
            if (order < lowest || (order == lowest && equal-- <= 0)) continue;
            cells[count++] = table[p / j->page_tokens] * j->page_tokens + p % j->page_tokens;
        }
        memset(cells + count, 0, (j->most - count) * sizeof *cells);
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
        for (int row = first; row < first + b.rows; row++) end = most_of(end, j->visible_end[row]);
        b.blocks = (end + BLOCK - 1) / BLOCK;
        share(j->threads, 1, (division){(int64_t)b.rows * b.blocks, 8, 0}, score_blocks, &b);
        share(j->threads, 1, (division){b.rows, 1, 0}, choose_rows, &b);
    }
}
