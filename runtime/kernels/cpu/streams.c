/* Residuals of several streams; see runtime/kernels/streams.py. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "simd.h"
#include "thread_team.h"

#define WORTH_SHARING (1 << 15) /* elements; with fewer, threads do not pay off */
#define LANES 8

/* The sum of x - minus, or of its squares. */
INLINE double sum_of(const float *x, int n, double minus, const int squared) {
    double lanes[LANES] = {0}, sum = 0.0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            const double d = x[i + l] - minus;
            lanes[l] += squared ? d * d : d;
        }
    for (; i < n; i++) {
        const double d = x[i] - minus;
        sum += squared ? d * d : d;
    }
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

typedef struct {
    const float *x, *mixture;
    float *y;
    int64_t streams, n;
} mix_job;

static void mix_streams(const void *job, const items *mine) {
    const mix_job *j = job;
    const int64_t n = j->n;
    for (int64_t row = mine->begin; row < mine->end; row++) {
        const float *all = j->x + row / j->streams * j->streams * n, *weights = j->mixture + row * j->streams;
        float *to = j->y + row * n;
        memcpy(to, j->x + row * n, n * sizeof(float));
        for (int64_t s = 0; s < j->streams; s++)
            for (int64_t i = 0; i < n; i++) to[i] += weights[s] * all[s * n + i];
    }
}

/* y[t][s] = x[t][s] + the sum over k of mixture[t][s][k] * x[t][k]; x, y [tokens][streams][n] */
EXPORT void caravan_mix_streams(const float *x, const float *mixture, int tokens, int streams, int n, float *y,
                                int threads) {
    const mix_job j = {x, mixture, y, streams, n};
    const int64_t rows = (int64_t)tokens * streams;
    share(threads, rows * streams * n > WORTH_SHARING, even(rows, threads), mix_streams, &j);
}

typedef struct {
    float *x;
    const float *value, *shares;
    int64_t value_stride, streams, active, n;
} correct_job;

static void correct_stream(const correct_job *j, int64_t token, int64_t stream) {
    float *to = j->x + (token * j->streams + stream) * j->n;
    const float *predicted = j->x + (token * j->streams + j->active) * j->n, *value = j->value + token * j->value_stride;
    const float share = 1.0f + j->shares[token * j->streams + stream];
    for (int64_t i = 0; i < j->n; i++) to[i] += share * (value[i] - predicted[i]);
}

static void correct_tokens(const void *job, const items *mine) {
    const correct_job *j = job;
    for (int64_t token = mine->begin; token < mine->end; token++) {
        for (int64_t s = 0; s < j->streams; s++)
            if (s != j->active) correct_stream(j, token, s);
        correct_stream(j, token, j->active);
    }
}

/* x[t][s] += (1 + shares[t][s]) * (value[t] - x[t][active]), with the x[t][active] of before; x [tokens][streams][n],
 * shares [tokens][streams]; rows of value value_stride apart */
EXPORT void caravan_correct_streams(float *x, const float *value, int64_t value_stride, const float *shares,
                                    int tokens, int streams, int active, int n, int threads) {
    const correct_job j = {x, value, shares, value_stride, streams, active, n};
    const int worth = (int64_t)tokens * streams * n > WORTH_SHARING;
    share(threads, worth, even(tokens, threads), correct_tokens, &j);
}

typedef struct {
    float *x;
    const float *value, *shares;
    int64_t value_stride, streams, n;
} add_job;

static void add_shares(const void *job, const items *mine) {
    const add_job *j = job;
    for (int64_t row = mine->begin; row < mine->end; row++) {
        float *to = j->x + row * j->n;
        const float *value = j->value + row / j->streams * j->value_stride, share = j->shares[row];
        for (int64_t i = 0; i < j->n; i++) to[i] += share * value[i];
    }
}

/* x[t][s] += shares[t][s] * value[t]; x [tokens][streams][n], shares [tokens][streams]; rows of value value_stride
 * apart */
EXPORT void caravan_add_shares(float *x, const float *value, int64_t value_stride, const float *shares, int tokens,
                               int streams, int n, int threads) {
    const add_job j = {x, value, shares, value_stride, streams, n};
    const int64_t rows = (int64_t)tokens * streams;
    share(threads, rows * n > WORTH_SHARING, even(rows, threads), add_shares, &j);
}

typedef struct {
    const float *keys, *queries, *value;
    float *y, scale;
    int64_t streams, n;
} stream_gate_job;

static void gate_streams(const void *job, const items *mine) {
    const stream_gate_job *j = job;
    for (int64_t row = mine->begin; row < mine->end; row++) {
        const float *key = j->keys + row * j->n, *query = j->queries + row * j->n;
        const float *value = j->value + row / j->streams * j->n;
        float *y = j->y + row * j->n;
        double sum = 0.0;
        for (int64_t i = 0; i < j->n; i++) sum += (double)key[i] * query[i];
        const double z = sum * j->scale, size = fabs(z) < 1e-6 ? 1e-6 : fabs(z);
        const double root = z == 0.0 ? 0.0 : copysign(sqrt(size), z);
        const float gate = (float)(1.0 / (1.0 + exp(-root)));
        for (int64_t i = 0; i < j->n; i++) y[i] = gate * value[i];
    }
}

/* y[t][s] = sigmoid(root(scale * (keys[t][s] . queries[t][s]))) * value[t], where root(z) has the sign of z and the size
 * sqrt(max(|z|, 1e-6)); keys, queries, y [tokens][streams][n], value [tokens][n] */
EXPORT void caravan_gate_streams(const float *keys, const float *queries, const float *value, float scale, int tokens,
                                 int streams, int n, float *y, int threads) {
    const stream_gate_job j = {keys, queries, value, y, scale, streams, n};
    const int64_t rows = (int64_t)tokens * streams;
    share(threads, rows * n > WORTH_SHARING, even(rows, threads), gate_streams, &j);
}

typedef struct {
    float *x;
    const float *other;
    float least;
    int64_t x_stride, other_stride;
    int n;
} match_job;

static void match_rows(const void *job, const items *mine) {
    const match_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        float *x = j->x + r * j->x_stride;
        const double own = sum_of(x, j->n, 0.0, 1) / j->n, other = sum_of(j->other + r * j->other_stride, j->n, 0.0, 1) / j->n;
        const float factor = (float)sqrt(other / (own > j->least ? own : j->least));
        for (int i = 0; i < j->n; i++) x[i] *= factor;
    }
}

/* Scales rows of x to the root mean square of those of `other`; `least`: lower bound of their own mean square. */
EXPORT void caravan_match_rms(float *x, int64_t x_stride, const float *other, int64_t other_stride, float least,
                              int rows, int n, int threads) {
    const match_job j = {x, other, least, x_stride, other_stride, n};
    share(threads, (int64_t)rows * n > WORTH_SHARING, even(rows, threads), match_rows, &j);
}

typedef struct {
    const float *x;
    float *y, bound;
    int64_t x_stride;
    int n;
} cut_job;

static void cut_rows(const void *job, const items *mine) {
    const cut_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        const float *x = j->x + r * j->x_stride;
        float *y = j->y + r * j->n;
        const double mean = sum_of(x, j->n, 0.0, 0) / j->n, variance = sum_of(x, j->n, mean, 1) / j->n;
        const float cut = (float)(mean + j->bound * sqrt(variance));
        for (int i = 0; i < j->n; i++) y[i] = x[i] - cut < 0.0f ? 0.0f : x[i] - cut;
    }
}

/* y = max(x - mean - bound * deviation, 0), mean and deviation of each row; NaN remains */
EXPORT void caravan_cut_low(const float *x, int64_t x_stride, float bound, int rows, int n, float *y, int threads) {
    const cut_job j = {x, y, bound, x_stride, n};
    share(threads, (int64_t)rows * n > WORTH_SHARING, even(rows, threads), cut_rows, &j);
}
