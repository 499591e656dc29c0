/* State spaces with one decay per head and row, row by row of a sequence.
 *
 * The rows of a sequence are computed in order, and the columns of a head are independent; so the
 * bits of a row do not depend on how its sequence is divided into steps. */
#include <math.h>
#include <stddef.h>

#include "state_columns.h"

typedef struct {
    const float *mixed; /* [rows][heads value_dim + 2 groups key_dim]: values, keys, queries */
    const float *steps; /* [rows][heads]: before softplus */
    const float *rates, *offsets; /* [heads]; a state decays by e^(rate softplus(step + offset)) */
    const float *skips; /* [heads]: factors of values that are added to results */
    const int32_t *begins, *ends; /* [spans]: rows [begin, end); NULL: each is one row, in order */
    const int32_t *continues; /* [spans]: not 0 if there is a state */
    const int64_t *pages; /* [spans] */
    float *states; /* [pages][heads][key_dim][value_dim] */
    float *result; /* [rows][heads][value_dim] */
    int32_t spans, heads, groups, key_dim, value_dim; /* head h uses the keys of group h / (heads / groups) */
} caravan_state_space_job;

typedef caravan_state_space_job job;

/* One row: state [key_dim][COLUMNS] decays, learns step * value at key, and is read with query. */
static void advance(float *state, const float *key, const float *query, const float *value, float stays,
                    float step, float skip, int key_dim, float *answer) {
    v16 learnt[LANES], sum[LANES];
    const v16 factor = v_all(stays);
    UNROLL(4)
    for (int l = 0; l < LANES; l++) {
        learnt[l] = v_mul(v_load(value + 16 * l), v_all(step));
        sum[l] = v_zero();
    }
    for (int d = 0; d < key_dim; d++) {
        const v16 weight = v_all(key[d]), asked = v_all(query[d]);
        UNROLL(4)
        for (int l = 0; l < LANES; l++) {
            float *at = state + d * COLUMNS + 16 * l;
            const v16 next = v_fma(learnt[l], weight, v_mul(v_load(at), factor));
            v_store(at, next);
            sum[l] = v_fma(next, asked, sum[l]);
        }
    }
    UNROLL(4)
    for (int l = 0; l < LANES; l++)
        v_store(answer + 16 * l, v_fma(v_load(value + 16 * l), v_all(skip), sum[l]));
}

/* See `columns_kernel`. */
static void run_head(const void *argument, int span, int head, int first) {
    const job *j = argument;
    const int dim = j->key_dim, width = least(COLUMNS, j->value_dim - first);
    const ptrdiff_t values = (ptrdiff_t)j->heads * j->value_dim, keys = (ptrdiff_t)j->groups * dim;
    const ptrdiff_t key_at = values + head / (j->heads / j->groups) * dim;
    float state[dim * COLUMNS];
    float *stored = j->states + (j->pages[span] * j->heads + head) * dim * j->value_dim + first;
    memset(state, 0, (size_t)dim * COLUMNS * sizeof(float));
    if (j->continues[span]) copy_rows(state, COLUMNS, stored, j->value_dim, dim, width);
    for (int row = begin_of(j->begins, span), end = end_of(j->ends, span); row < end; row++) {
        const float *mixed = j->mixed + row * (values + 2 * keys);
        const ptrdiff_t at = (ptrdiff_t)row * j->heads + head;
        const float step = softplus(j->steps[at] + j->offsets[head]);
        float value[COLUMNS] = {0}, answer[COLUMNS];
        memcpy(value, mixed + (ptrdiff_t)head * j->value_dim + first, width * sizeof(float));
        advance(state, mixed + key_at, mixed + key_at + keys, value, expf(j->rates[head] * step), step,
                j->skips[head], dim, answer);
        memcpy(j->result + at * j->value_dim + first, answer, width * sizeof(float));
    }
    copy_rows(stored, j->value_dim, state, COLUMNS, dim, width);
}

EXPORT void caravan_state_space(const job *j, int threads) {
    share_columns(threads, run_head, j, j->spans, j->heads, j->value_dim);
}
