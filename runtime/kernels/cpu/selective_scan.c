/* Selective scans: state spaces with a decay for each element of a channel's state, row by row of a sequence.
 *
 * The rows of a sequence are computed in order, and channels are independent; so the bits of a row do not
 * depend on how its sequence is divided into steps. */
#include <stddef.h>

#include "curves.h"
#include "spans.h"
#include "thread_team.h"

#define CHANNELS 16 /* that one thread computes at once */

typedef struct {
    const float *values, *steps; /* [rows][channels]; steps before softplus */
    const float *keys, *queries; /* [rows][size] */
    const float *rates; /* [channels][size]; an element decays by e^(rate softplus(step + offset)) */
    const float *offsets, *skips; /* [channels]; skips: factors of values that are added to results */
    const int32_t *begins, *ends; /* [spans]: rows [begin, end); NULL: each is one row, in order */
    const int32_t *continues; /* [spans]: not 0 if there is a state */
    const int64_t *pages; /* [spans] */
    float *states; /* [pages][channels][size] */
    float *result; /* [rows][channels] */
    int64_t value_row, step_row, key_row, query_row; /* from a row to the next */
    int32_t spans, channels, size;
} caravan_selective_scan_job;

typedef caravan_selective_scan_job job;

/* One row of `width` channels: their states [CHANNELS][padded] decay, learn step * value at key, and are read
 * with query. */
static void advance(float *state, const float *rates, const float *key, const float *query, const float *value,
                    const float *step, const float *skips, int width, int padded, float *answer) {
    for (int c = 0; c < width; c++) {
        const v16 time = v_all(step[c]), learnt = v_all(step[c] * value[c]);
        v16 sum = v_zero();
        for (int d = 0; d < padded; d += 16) {
            float *at = state + c * padded + d;
            const v16 stays = v_exp(v_mul(v_load(rates + c * padded + d), time));
            const v16 next = v_fma(learnt, v_load(key + d), v_mul(v_load(at), stays));
            v_store(at, next);
            sum = v_fma(next, v_load(query + d), sum);
        }
        answer[c] = v_sum(sum) + skips[c] * value[c];
    }
}

/* The channels from `first` on, over all rows of one span. */
static void run_channels(const job *j, int span, int first) {
    const int size = j->size, padded = (size + 15) / 16 * 16, width = least(CHANNELS, j->channels - first);
    float state[CHANNELS * padded], rates[CHANNELS * padded], key[padded], query[padded];
    float *stored = j->states + (j->pages[span] * j->channels + first) * size;
    memset(state, 0, sizeof state);
    memset(rates, 0, sizeof rates);
    memset(key, 0, sizeof key);
    memset(query, 0, sizeof query);
    copy_rows(rates, padded, j->rates + (ptrdiff_t)first * size, size, width, size);
    if (j->continues[span]) copy_rows(state, padded, stored, size, width, size);
    for (int row = begin_of(j->begins, span), end = end_of(j->ends, span); row < end; row++) {
        float step[CHANNELS] = {0}, offset[CHANNELS] = {0};
        memcpy(step, j->steps + row * j->step_row + first, width * sizeof(float));
        memcpy(offset, j->offsets + first, width * sizeof(float));
        v_store(step, v_softplus(v_add(v_load(step), v_load(offset))));
        memcpy(key, j->keys + row * j->key_row, size * sizeof(float));
        memcpy(query, j->queries + row * j->query_row, size * sizeof(float));
        advance(state, rates, key, query, j->values + row * j->value_row + first, step, j->skips + first, width,
                padded, j->result + (ptrdiff_t)row * j->channels + first);
    }
    copy_rows(stored, size, state, padded, width, size);
}

static int parts_of_channels(const job *j) { return (j->channels + CHANNELS - 1) / CHANNELS; }

static void run_spans(const void *argument, const items *mine) {
    const job *j = argument;
    const int parts = parts_of_channels(j);
    for (int64_t item = mine->begin; item < mine->end; item++)
        run_channels(j, (int)(item / parts), (int)(item % parts) * CHANNELS);
}

EXPORT void caravan_selective_scan(const job *j, int threads) {
    share(threads, 1, (division){(int64_t)j->spans * parts_of_channels(j), 1, 0}, run_spans, j);
}
