/* The gated delta rule and the short convolution before it, row by row of a sequence.
 *
 * The rows of a sequence are computed in order, and the columns of a head are independent; so the
 * bits of a row do not depend on how its sequence is divided into steps. */
#include <math.h>
#include <stddef.h>

#include "curves.h"
#include "state_columns.h"

#define NORM_EPS 1e-6f

typedef struct {
    const float *mixed; /* [rows][2 key_heads key_dim + heads value_dim]: queries, keys, values */
    const float *alphas; /* [rows][heads][decays]: gates of decay */
    const float *betas; /* [rows][heads]: gates of update */
    const float *rates; /* [heads]; a state decays by e^(rate softplus(alpha + offset)) */
    const float *offsets; /* [heads][decays] */
    const int32_t *begins, *ends; /* [spans]: rows [begin, end); NULL: each is one row, in order */
    const int32_t *continues; /* [spans]: not 0 if there is a state */
    const int64_t *pages; /* [spans] */
    float *states; /* [pages][heads][key_dim][value_dim] */
    float *result; /* [rows][heads][value_dim] */
    int32_t spans, heads, key_heads, key_dim, value_dim;
    int32_t decays; /* of a head: one, or one for each element of a key */
    int32_t tiled; /* head h uses key head h % key_heads, else h / (heads / key_heads) */
} caravan_delta_job;

typedef caravan_delta_job job;

/* x / sqrt(sum(x^2) + eps) * scale */
static void normal(const float *x, int n, float scale, float *y) {
    v16 squares = v_zero();
    for (int i = 0; i < n; i += 16) {
        float last[16] = {0};
        const v16 some = v_load(n - i < 16 ? memcpy(last, x + i, (n - i) * sizeof(float)) : x + i);
        squares = v_fma(some, some, squares);
    }
    const float factor = scale / sqrtf(v_sum(squares) + NORM_EPS);
    for (int i = 0; i < n; i++) y[i] = x[i] * factor;
}

/* One row: state [key_dim][COLUMNS] decays, stores value at key, and is read with query. stays: a factor for
 * each element of a key, or if `apart` is 0 one for all. */
static void advance(float *state, const float *key, const float *query, const float *value,
                    const float *stays, int apart, float beta, int key_dim, float *answer) {
    v16 known[LANES], change[LANES], sum[LANES];
    UNROLL(4)
    for (int l = 0; l < LANES; l++) known[l] = sum[l] = v_zero();
    for (int d = 0; d < key_dim; d++) {
        const v16 weight = v_all(key[d]), factor = v_all(stays[apart * d]);
        UNROLL(4)
        for (int l = 0; l < LANES; l++) {
            float *at = state + d * COLUMNS + 16 * l;
            const v16 left = v_mul(v_load(at), factor);
            v_store(at, left);
            known[l] = v_fma(left, weight, known[l]);
        }
    }
    UNROLL(4)
    for (int l = 0; l < LANES; l++)
        change[l] = v_mul(v_add(v_load(value + 16 * l), v_negative(known[l])), v_all(beta));
    for (int d = 0; d < key_dim; d++) {
        const v16 weight = v_all(key[d]), asked = v_all(query[d]);
        UNROLL(4)
        for (int l = 0; l < LANES; l++) {
            float *at = state + d * COLUMNS + 16 * l;
            const v16 learnt = v_fma(change[l], weight, v_load(at));
            v_store(at, learnt);
            sum[l] = v_fma(learnt, asked, sum[l]);
        }
    }
    UNROLL(4)
    for (int l = 0; l < LANES; l++) v_store(answer + 16 * l, sum[l]);
}

/* See `columns_kernel`. */
static void run_head(const void *argument, int span, int head, int first) {
    const job *j = argument;
    const int dim = j->key_dim, width = least(COLUMNS, j->value_dim - first);
    const int keys = j->key_heads * dim;
    const int key_head = j->tiled ? head % j->key_heads : head / (j->heads / j->key_heads);
    const ptrdiff_t row_size = 2 * (ptrdiff_t)keys + (ptrdiff_t)j->heads * j->value_dim;
    float state[dim * COLUMNS], key[dim], query[dim], stays[j->decays];
    float *stored = j->states + (j->pages[span] * j->heads + head) * dim * j->value_dim + first;
    memset(state, 0, (size_t)dim * COLUMNS * sizeof(float));
    if (j->continues[span]) copy_rows(state, COLUMNS, stored, j->value_dim, dim, width);
    for (int row = begin_of(j->begins, span), end = end_of(j->ends, span); row < end; row++) {
        const float *mixed = j->mixed + row * row_size;
        const ptrdiff_t at = (ptrdiff_t)row * j->heads + head;
        float value[COLUMNS] = {0}, answer[COLUMNS];
        normal(mixed + key_head * dim, dim, 1.0f / sqrtf((float)dim), query);
        normal(mixed + keys + key_head * dim, dim, 1.0f, key);
        memcpy(value, mixed + 2 * keys + head * j->value_dim + first, width * sizeof(float));
        const float *alphas = j->alphas + at * j->decays, *offsets = j->offsets + head * j->decays;
        for (int d = 0; d < j->decays; d++)
            stays[d] = expf(j->rates[head] * softplus(alphas[d] + offsets[d]));
        const float beta = 1.0f / (1.0f + expf(-j->betas[at]));
        advance(state, key, query, value, stays, j->decays > 1, beta, dim, answer);
        memcpy(j->result + at * j->value_dim + first, answer, width * sizeof(float));
    }
    copy_rows(stored, j->value_dim, state, COLUMNS, dim, width);
}

EXPORT void caravan_delta(const job *j, int threads) {
    share_columns(threads, run_head, j, j->spans, j->heads, j->value_dim);
}

typedef struct {
    const float *x, *weight;
    const int32_t *begins, *ends, *continues;
    const int64_t *pages;
    float *states, *y;
    int channels, taps;
} convolution;

static void convolve(const void *job, const items *mine) {
    const convolution *j = job;
    const int channels = j->channels, taps = j->taps, parts = (channels + 511) / 512;
    for (int64_t item = mine->begin; item < mine->end; item++) {
        const int span = (int)(item / parts), first = (int)(item % parts) * 512;
        const int begin = begin_of(j->begins, span), rows = end_of(j->ends, span) - begin;
        const int width = least(512, channels - first);
        const float *in = j->x + (ptrdiff_t)begin * channels + first;
        float *out = j->y + (ptrdiff_t)begin * channels + first;
        float *before = j->states + j->pages[span] * taps * channels + first;
        if (!j->continues[span])
            for (int t = 0; t < taps; t++)
                memset(before + (ptrdiff_t)t * channels, 0, width * sizeof(float));
        for (int r = 0; r < rows; r++)
            for (int t = 0; t <= taps; t++) {
                const float *from = r + t < taps ? before + (ptrdiff_t)(r + t) * channels
                                                 : in + (ptrdiff_t)(r + t - taps) * channels;
                const float *w = j->weight + (ptrdiff_t)t * channels + first;
                float *to = out + (ptrdiff_t)r * channels;
                for (int c = 0; c < width; c++) to[c] = (t ? to[c] : 0.0f) + w[c] * from[c];
            }
        for (int t = 0; t < taps; t++)
            memmove(before + (ptrdiff_t)t * channels,
                    rows + t < taps ? before + (ptrdiff_t)(rows + t) * channels
                                    : in + (ptrdiff_t)(rows + t - taps) * channels,
                    width * sizeof(float));
    }
}

/* y[row][c] = sum over t of weight[t][c] * the input `taps - t` rows earlier; t = taps is the row itself.
 * x, y [rows][channels], weight [taps + 1][channels], states [pages][taps][channels]: the last inputs. */
EXPORT void caravan_short_convolution(const float *x, const float *weight, const int32_t *begins,
                                      const int32_t *ends, const int32_t *continues, const int64_t *pages,
                                      int spans, int channels, int taps, float *states, float *y,
                                      int threads) {
    const convolution j = {x, weight, begins, ends, continues, pages, states, y, channels, taps};
    const int64_t parts = (channels + 511) / 512;
    share(threads, 1, even(spans * parts, threads), convolve, &j);
}
