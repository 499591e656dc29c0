/* The recurrence of RWKV 7, row by row of a sequence.
 *
 * The rows of a sequence are computed in order, and the columns of a head are independent; so the
 * bits of a row do not depend on how its sequence is divided into steps. */
#include <math.h>
#include <stddef.h>

#include "state_columns.h"

#define LEAST_LOG -0.60653065971263342f /* -e^-0.5: of a decay */
#define LEAST_LENGTH 1e-12f

typedef struct {
    const float *queries, *decays, *keys, *values, *rates; /* [rows][heads][size]; decays and rates before the
                                                              logistic function */
    const float *removed, *added, *own_factors; /* [heads][size]: see `WkvHeads` */
    const int32_t *begins, *ends; /* [spans]: rows [begin, end); NULL: each is one row, in order */
    const int32_t *continues; /* [spans]: not 0 if there is a state */
    const int64_t *pages; /* [spans] */
    float *states; /* [pages][heads][size][size] */
    float *answers, *own; /* [rows][heads][size] */
    int32_t spans, heads, size;
} caravan_wkv7_job;

typedef caravan_wkv7_job job;

/* One row of a head: [size] each. */
typedef struct {
    const float *query;
    float *unit; /* what the state knows at it is removed */
    float *erased; /* unit times the rates */
    float *kept; /* factors of decay */
    float *key;
} row_vectors;

static float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Fills `to` with the vectors of the row and head at `at`; returns the factor of the row's own value. */
static float prepare(const job *j, ptrdiff_t at, int head, const row_vectors *to) {
    const float *key = j->keys + at, *removed = j->removed + head * j->size;
    const float *added = j->added + head * j->size, *factors = j->own_factors + head * j->size;
    float squares = 0.0f, own = 0.0f;
    for (int d = 0; d < j->size; d++) {
        to->unit[d] = key[d] * removed[d];
        squares += to->unit[d] * to->unit[d];
    }
    const float length = sqrtf(squares), scale = 1.0f / (length > LEAST_LENGTH ? length : LEAST_LENGTH);
    for (int d = 0; d < j->size; d++) {
        const float rate = logistic(j->rates[at + d]);
        to->unit[d] *= scale;
        to->erased[d] = to->unit[d] * rate;
        to->kept[d] = expf(LEAST_LOG * logistic(j->decays[at + d]));
        to->key[d] = key[d] * (1.0f + (rate - 1.0f) * added[d]);
        own += to->query[d] * factors[d] * to->key[d];
    }
    return own;
}

/* state [size][COLUMNS] is updated with value at the row's key, and read with its query. */
static void advance(float *state, const row_vectors *row, const float *value, int size, float *answer) {
    v16 known[LANES], sum[LANES];
    UNROLL(4)
    for (int l = 0; l < LANES; l++) known[l] = sum[l] = v_zero();
    for (int d = 0; d < size; d++) {
        const v16 weight = v_all(row->unit[d]);
        UNROLL(4)
        for (int l = 0; l < LANES; l++) known[l] = v_fma(v_load(state + d * COLUMNS + 16 * l), weight, known[l]);
    }
    for (int d = 0; d < size; d++) {
        const v16 kept = v_all(row->kept[d]), erased = v_all(-row->erased[d]);
        const v16 key = v_all(row->key[d]), asked = v_all(row->query[d]);
        UNROLL(4)
        for (int l = 0; l < LANES; l++) {
            float *at = state + d * COLUMNS + 16 * l;
            const v16 left = v_fma(known[l], erased, v_mul(v_load(at), kept));
            const v16 next = v_fma(v_load(value + 16 * l), key, left);
            v_store(at, next);
            sum[l] = v_fma(next, asked, sum[l]);
        }
    }
    UNROLL(4)
    for (int l = 0; l < LANES; l++) v_store(answer + 16 * l, sum[l]);
}

/* See `columns_kernel`. */
static void run_head(const void *argument, int span, int head, int first) {
    const job *j = argument;
    const int size = j->size, width = least(COLUMNS, size - first);
    float state[size * COLUMNS], unit[size], erased[size], kept[size], key[size];
    float *stored = j->states + (j->pages[span] * j->heads + head) * size * size + first;
    memset(state, 0, (size_t)size * COLUMNS * sizeof(float));
    if (j->continues[span]) copy_rows(state, COLUMNS, stored, size, size, width);
    for (int row = begin_of(j->begins, span), end = end_of(j->ends, span); row < end; row++) {
        const ptrdiff_t at = ((ptrdiff_t)row * j->heads + head) * size;
        const row_vectors vectors = {j->queries + at, unit, erased, kept, key};
        const float own = prepare(j, at, head, &vectors);
        float value[COLUMNS] = {0}, answer[COLUMNS];
        memcpy(value, j->values + at + first, width * sizeof(float));
        advance(state, &vectors, value, size, answer);
        memcpy(j->answers + at + first, answer, width * sizeof(float));
        for (int c = 0; c < width; c++) j->own[at + first + c] = own * value[c];
    }
    copy_rows(stored, size, state, COLUMNS, size, width);
}

EXPORT void caravan_wkv7(const job *j, int threads) {
    share_columns(threads, run_head, j, j->spans, j->heads, j->size);
}
