/* Norms, rotary embeddings, activations and softcaps, a row at a time. */
#include <stddef.h>

#include "curves.h"
#include "thread_team.h"

#define WORTH_SHARING (1 << 15) /* elements; with fewer, threads do not pay off */

/* n % 16 elements in a vector, followed by zeros. */
INLINE v16 v_load_some(const float *p, int n) {
    float padded[16] = {0};
    memcpy(padded, p, n * sizeof(float));
    return v_load(padded);
}

INLINE void v_store_some(float *p, int n, v16 a) {
    float padded[16];
    v_store(padded, a);
    memcpy(p, padded, n * sizeof(float));
}

/* A vector of p from i on with `left` valid elements; ones if p is NULL. */
INLINE v16 factors(const float *p, int i, int left) {
    if (!p) return v_all(1.0f);
    return left < 16 ? v_load_some(p + i, left) : v_load(p + i);
}

INLINE v16 v_load_at(const float *x, int i, int n) {
    return n - i < 16 ? v_load_some(x + i, n - i) : v_load(x + i);
}

INLINE void v_store_at(float *y, int i, int n, v16 a) {
    if (n - i < 16) v_store_some(y + i, n - i, a);
    else v_store(y + i, a);
}

static void rms_norm_row(const float *x, const float *weight, float eps, int n, float *y) {
    v16 squares = v_zero();
    for (int i = 0; i < n; i += 16) {
        const v16 some = v_load_at(x, i, n);
        squares = v_fma(some, some, squares);
    }
    const v16 scale = v_all(1.0f / sqrtf(v_sum(squares) / (float)n + eps));
    for (int i = 0; i < n; i += 16)
        v_store_at(y, i, n, v_mul(v_mul(v_load_at(x, i, n), scale), factors(weight, i, n - i)));
}

typedef struct {
    const float *x, *weight, *bias;
    float *y, eps;
    int64_t x_stride;
    int weights, parts, n;
} norm_job;

static void rms_norm_rows(const void *job, const items *mine) {
    const norm_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++)
        rms_norm_row(j->x + r / j->parts * j->x_stride + r % j->parts * j->n,
                     j->weight ? j->weight + r % j->weights * j->n : NULL, j->eps, j->n, j->y + r * j->n);
}

/* x [rows], x_stride apart: [parts][n]; weight [weights][n], taken by turns, or NULL; y [rows][parts][n] */
EXPORT void caravan_rms_norm(const float *x, int64_t x_stride, const float *weight, int weights, float eps,
                             int rows, int parts, int n, float *y, int threads) {
    const norm_job j = {x, weight, NULL, y, eps, x_stride, weights, parts, n};
    const int64_t all = (int64_t)rows * parts;
    share(threads, all * n > WORTH_SHARING, even(all, threads), rms_norm_rows, &j);
}

static void layer_norm_row(const float *x, const float *weight, const float *bias, float eps, int n,
                           float *y) {
    v16 sum = v_zero(), squares = v_zero();
    for (int i = 0; i < n; i += 16) sum = v_add(sum, v_load_at(x, i, n));
    const v16 mean = v_all(v_sum(sum) / (float)n);
    for (int i = 0; i < n; i += 16) { /* zero, not minus the mean, after the end of x */
        const v16 some = v_add(v_load_at(x, i, n), v_negative(mean));
        float padded[16] = {0};
        if (n - i < 16) v_store_some(padded, n - i, some);
        const v16 deviation = n - i < 16 ? v_load(padded) : some;
        squares = v_fma(deviation, deviation, squares);
    }
    const v16 scale = v_all(1.0f / sqrtf(v_sum(squares) / (float)n + eps));
    for (int i = 0; i < n; i += 16) {
        const v16 normal = v_mul(v_add(v_load_at(x, i, n), v_negative(mean)), scale);
        v_store_at(y, i, n, v_fma(normal, v_load_at(weight, i, n), v_load_at(bias, i, n)));
    }
}

static void layer_norm_rows(const void *job, const items *mine) {
    const norm_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        const int64_t own = r % j->weights * j->n;
        layer_norm_row(j->x + r / j->parts * j->x_stride + r % j->parts * j->n, j->weight + own, j->bias + own,
                       j->eps, j->n, j->y + r * j->n);
    }
}

/* as caravan_rms_norm; bias like weight, both not NULL */
EXPORT void caravan_layer_norm(const float *x, int64_t x_stride, const float *weight, const float *bias,
                               int weights, float eps, int rows, int parts, int n, float *y, int threads) {
    const norm_job j = {x, weight, bias, y, eps, x_stride, weights, parts, n};
    const int64_t all = (int64_t)rows * parts;
    share(threads, all * n > WORTH_SHARING, even(all, threads), layer_norm_rows, &j);
}

INLINE void rotate(const float *from, const float *c, const float *s, int pairs, const int halves,
                   float *to) {
    for (int i = 0; i < pairs; i++) {
        const int first = halves ? i : 2 * i, second = halves ? i + pairs : 2 * i + 1;
        const float a = from[first], b = from[second];
        to[first] = a * c[i] - b * s[i];
        to[second] = a * s[i] + b * c[i];
    }
}

typedef struct {
    const float *x, *cosine, *sine;
    float *y;
    int64_t x_stride;
    int heads, dim, pairs, halves;
} rope_job;

static void rope_tokens(const void *job, const items *mine) {
    const rope_job *j = job;
    for (int64_t t = mine->begin; t < mine->end; t++) {
        const float *c = j->cosine + t * j->pairs, *s = j->sine + t * j->pairs;
        for (int h = 0; h < j->heads; h++) {
            const float *from = j->x + t * j->x_stride + h * j->dim;
            float *to = j->y + (t * j->heads + h) * j->dim;
            if (j->halves) rotate(from, c, s, j->pairs, 1, to);
            else rotate(from, c, s, j->pairs, 0, to);
            memcpy(to + 2 * j->pairs, from + 2 * j->pairs, (j->dim - 2 * j->pairs) * sizeof(float));
        }
    }
}

/* x [tokens], x_stride apart: [heads][dim]; y [tokens][heads][dim], cosine and sine [tokens][pairs];
 * 2 * pairs <= dim. The pairs are (i, i + pairs) if `halves`, else (2 i, 2 i + 1). */
EXPORT void caravan_rope(const float *x, int64_t x_stride, const float *cosine, const float *sine,
                         int tokens, int heads, int dim, int pairs, int halves, float *y, int threads) {
    const rope_job j = {x, cosine, sine, y, x_stride, heads, dim, pairs, halves};
    share(threads, (int64_t)tokens * heads * dim > WORTH_SHARING, even(tokens, threads), rope_tokens, &j);
}

typedef struct {
    const int64_t *positions, *axes;
    const float *frequencies;
    float *cosine, *sine, magnitude;
    int tokens, pairs;
} angles_job;

static void angles_of_tokens(const void *job, const items *mine) {
    const angles_job *j = job;
    for (int64_t t = mine->begin; t < mine->end; t++)
        for (int p = 0; p < j->pairs; p++) {
            const int64_t position = j->positions[(j->axes ? j->axes[p] : 0) * j->tokens + t];
            const float angle = (float)position * j->frequencies[p];
            j->cosine[t * j->pairs + p] = cosf(angle) * j->magnitude;
            j->sine[t * j->pairs + p] = sinf(angle) * j->magnitude;
        }
}

/* The angle of pair p of token t is positions[axes ? axes[p] : 0][t] * frequencies[p]; cosine and sine
 * [tokens][pairs] are those of the angles, times `magnitude`. */
EXPORT void caravan_angles(const int64_t *positions, const int64_t *axes, const float *frequencies,
                           int tokens, int pairs, float magnitude, float *cosine, float *sine,
                           int threads) {
    const angles_job j = {positions, axes, frequencies, cosine, sine, magnitude, tokens, pairs};
    const int worth = (int64_t)tokens * pairs > WORTH_SHARING / 8;
    share(threads, worth, even(tokens, threads), angles_of_tokens, &j);
}

enum {
    SILU = 0, GELU_TANH = 1, GELU_ERF = 2, GELU_QUICK = 3, SIGMOID = 4, RELU_SQUARED = 5, STRAIGHT = 6,
    RELU = 7, SOFTPLUS = 9,
};

INLINE v16 curve(const int kind, v16 x) {
    if (kind == SILU) return v_times_logistic(x, x);
    if (kind == GELU_TANH) return v_gelu_tanh(x);
    if (kind == GELU_ERF) return v_gelu_erf(x);
    if (kind == SIGMOID) return v_times_logistic(v_all(1.0f), x);
    if (kind == RELU_SQUARED) return v_relu_squared(x);
    if (kind == STRAIGHT) return x;
    if (kind == RELU) return v_max(v_zero(), x);
    if (kind == SOFTPLUS) return v_softplus(x);
    return v_times_logistic(x, v_mul(x, v_all(1.702f)));
}

/* Sixteen elements, or `left`, of curve(gate) * up; without `up`, of curve(gate). */
INLINE void gate_some(const int kind, const float *gate, const float *up, int left, float *y) {
    const v16 bent = curve(kind, v_load_at(gate, 0, left));
    v_store_at(y, 0, left, v_mul(bent, factors(up, 0, left)));
}

#define GATE_CHUNK 1024 /* elements */

INLINE void gate_chunk(const int kind, const float *gate, const float *up, int n, float *y) {
    for (int i = 0; i < n; i += 16) gate_some(kind, gate + i, up ? up + i : NULL, n - i < 16 ? n - i : 16, y + i);
}

typedef struct {
    int kind;
    const float *gate, *up;
    float *y;
    int64_t gate_stride, up_stride, n, chunks;
} gate_job;

static void gate_chunks(const void *job, const items *mine) {
    const gate_job *j = job;
    for (int64_t c = mine->begin; c < mine->end; c++) {
        const int64_t row = c / j->chunks, begin = c % j->chunks * GATE_CHUNK;
        const int some = j->n - begin < GATE_CHUNK ? (int)(j->n - begin) : GATE_CHUNK;
        const float *g = j->gate + row * j->gate_stride + begin, *u = j->up ? j->up + row * j->up_stride + begin : NULL;
        float *to = j->y + row * j->n + begin;
        switch (j->kind) {
        case SILU: gate_chunk(SILU, g, u, some, to); break;
        case GELU_TANH: gate_chunk(GELU_TANH, g, u, some, to); break;
        case GELU_ERF: gate_chunk(GELU_ERF, g, u, some, to); break;
        case GELU_QUICK: gate_chunk(GELU_QUICK, g, u, some, to); break;
        case SIGMOID: gate_chunk(SIGMOID, g, u, some, to); break;
        case RELU_SQUARED: gate_chunk(RELU_SQUARED, g, u, some, to); break;
        case SOFTPLUS: gate_chunk(SOFTPLUS, g, u, some, to); break;
        case RELU: gate_chunk(RELU, g, u, some, to); break;
        case STRAIGHT: gate_chunk(STRAIGHT, g, u, some, to); break;
        }
    }
}

/* y[r][i] = curve(gate[r][i]) * up[r][i]; rows of gate and up are strides apart; up NULL: ones */
EXPORT void caravan_gate(int kind, const float *gate, int64_t gate_stride, const float *up, int64_t up_stride,
                         int64_t rows, int64_t n, float *y, int threads) {
    const gate_job j = {kind, gate, up, y, gate_stride, up_stride, n, (n + GATE_CHUNK - 1) / GATE_CHUNK};
    share(threads, rows * n > WORTH_SHARING, even(rows * j.chunks, threads), gate_chunks, &j);
}

typedef struct {
    float *x;
    const float *y;
    float scale;
    int64_t x_stride, y_stride;
    int n;
} add_job;

static void add_rows(const void *job, const items *mine) {
    const add_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        float *to = j->x + r * j->x_stride;
        const float *from = j->y ? j->y + r * j->y_stride : NULL;
        for (int i = 0; i < j->n; i++) to[i] = to[i] * j->scale + (from ? from[i] : 0.0f);
    }
}

/* x[r][i] = x[r][i] * scale + y[r][i]; rows are strides apart; y NULL: zeros */
EXPORT void caravan_add(float *x, int64_t x_stride, const float *y, int64_t y_stride, float scale, int rows,
                        int n, int threads) {
    const add_job j = {x, y, scale, x_stride, y_stride, n};
    share(threads, (int64_t)rows * n > WORTH_SHARING, even(rows, threads), add_rows, &j);
}

typedef struct {
    float *x, bound;
    int64_t x_stride;
    int n;
} clip_job;

static void clip_rows(const void *job, const items *mine) {
    const clip_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        float *x = j->x + r * j->x_stride;
        for (int i = 0; i < j->n; i++) x[i] = x[i] > j->bound ? j->bound : x[i] < -j->bound ? -j->bound : x[i];
    }
}

/* x[r][i] limited to the range from -bound to bound; rows are strides apart; NaN remains */
EXPORT void caravan_clip(float *x, int64_t x_stride, float bound, int rows, int n, int threads) {
    const clip_job j = {x, bound, x_stride, n};
    share(threads, (int64_t)rows * n > WORTH_SHARING, even(rows, threads), clip_rows, &j);
}

/* y[i] = x[rows[i]], rows of x x_stride apart, of y n. Returns 1 if a row is outside x. */
EXPORT int caravan_take_rows(const float *x, int64_t x_stride, int64_t x_rows, const int64_t *rows,
                             int count, int n, float *y) {
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= x_rows) return 1;
        memcpy(y + (ptrdiff_t)i * n, x + rows[i] * x_stride, n * sizeof(float));
    }
    return 0;
}

typedef struct {
    const float *x;
    const int64_t *positions;
    float *y, span, beta;
    int64_t stride, offset;
    int n;
} temper_job;

static void temper_rows(const void *job, const items *mine) {
    const temper_job *j = job;
    for (int64_t r = mine->begin; r < mine->end; r++) {
        const float factor = 1.0f + j->beta * log1pf(floorf((float)(j->positions[r] + j->offset) / j->span));
        for (int i = 0; i < j->n; i++) j->y[r * j->n + i] = j->x[r * j->stride + i] * factor;
    }
}

/* y[r] = x[r] (1 + beta ln(1 + floor(p / span))), p = positions[r] + offset; rows of x stride apart, of y n */
EXPORT void caravan_temper(const float *x, int64_t stride, const int64_t *positions, int64_t offset, float span,
                           float beta, int rows, int n, float *y, int threads) {
    const temper_job j = {x, positions, y, span, beta, stride, offset, n};
    share(threads, (int64_t)rows * n > WORTH_SHARING, even(rows, threads), temper_rows, &j);
}

/* Copies n floats of each part of each row; strides in floats. */
EXPORT void caravan_copy(const float *x, int64_t row, int64_t part, float *y, int64_t to_row, int64_t to_part,
                         int rows, int parts, int n) {
    for (int64_t i = 0; i < (int64_t)rows * parts; i++)
        memcpy(y + i / parts * to_row + i % parts * to_part, x + i / parts * row + i % parts * part, n * sizeof(float));
}

/* x[r][c] = value for columns [begin, end) of rows that are `stride` floats apart */
EXPORT void caravan_fill_columns(float *x, int64_t stride, int rows, int begin, int end, float value) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = begin; c < end; c++) x[r * stride + c] = value;
}

/* x[r][c] = value for the listed columns of rows of `width` floats, `stride` floats apart. Returns 1 if a
 * column is outside. */
EXPORT int caravan_fill_listed(float *x, int64_t stride, int rows, int64_t width, const int64_t *columns,
                               int64_t count, float value) {
    for (int64_t i = 0; i < count; i++)
        if (columns[i] < 0 || columns[i] >= width) return 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++) x[r * stride + columns[i]] = value;
    return 0;
}

typedef struct {
    const float *x;
    float *y, cap;
    int64_t n;
} softcap_job;

static void softcap_vectors(const void *job, const items *mine) {
    const softcap_job *j = job;
    for (int64_t i = 16 * mine->begin; i < j->n && i < 16 * mine->end; i += 16) {
        const int left = j->n - i < 16 ? (int)(j->n - i) : 16;
        const v16 bent = v_tanh(v_div(v_load_at(j->x + i, 0, left), v_all(j->cap)));
        v_store_at(j->y + i, 0, left, v_mul(bent, v_all(j->cap)));
    }
}

/* y[i] = cap tanh(x[i] / cap) */
EXPORT void caravan_softcap(const float *x, int64_t n, float cap, float *y, int threads) {
    const softcap_job j = {x, y, cap, n};
    share(threads, n > WORTH_SHARING, even((n + 15) / 16, threads), softcap_vectors, &j);
}

typedef struct {
    const float *x;
    float *y, positive, negative, beta, eps;
    int64_t n;
} xielu_job;

INLINE v16 v_xielu(v16 x, const xielu_job *j) {
    const v16 linear = v_mul(x, v_all(j->beta)), above = v_fma(v_mul(x, x), v_all(j->positive), linear);
    const v16 least = v_negative(v_max(v_all(-j->eps), v_negative(x))); /* of x and eps */
    const v16 bent = v_add(v_expm1(v_max(v_all(-80.0f), least)), v_negative(x));
    return v_by_sign(x, above, v_fma(bent, v_all(j->negative), linear));
}

static void xielu_vectors(const void *job, const items *mine) {
    const xielu_job *j = job;
    for (int64_t i = 16 * mine->begin; i < j->n && i < 16 * mine->end; i += 16) {
        const int left = j->n - i < 16 ? (int)(j->n - i) : 16;
        v_store_at(j->y + i, 0, left, v_xielu(v_load_at(j->x + i, 0, left), j));
    }
}

/* y[i] = positive x^2 + beta x where x = x[i] is above 0, else negative (e^min(x, eps) - 1 - x) + beta x */
EXPORT void caravan_xielu(const float *x, int64_t n, float positive, float negative, float beta, float eps,
                          float *y, int threads) {
    const xielu_job j = {x, y, positive, negative, beta, eps, n};
    share(threads, n > WORTH_SHARING, even((n + 15) / 16, threads), xielu_vectors, &j);
}
