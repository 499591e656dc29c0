/* Norms, rotary embeddings, activations and softcaps, a row at a time. */
#include <stddef.h>

#include "curves.h"

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

/* x [rows], x_stride apart: [parts][n]; weight [n] or NULL; y [rows][parts][n] */
EXPORT void caravan_rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, int rows,
                             int parts, int n, float *y, int threads) {
    const int64_t all = (int64_t)rows * parts;
#pragma omp parallel for num_threads(threads) schedule(static) if (all * n > WORTH_SHARING)
    for (int64_t r = 0; r < all; r++)
        rms_norm_row(x + r / parts * x_stride + r % parts * n, weight, eps, n, y + r * n);
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

/* x, y [rows][n], weight and bias [n] */
EXPORT void caravan_layer_norm(const float *x, const float *weight, const float *bias, float eps, int rows,
                               int n, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if ((int64_t)rows * n > WORTH_SHARING)
    for (int r = 0; r < rows; r++)
        layer_norm_row(x + (ptrdiff_t)r * n, weight, bias, eps, n, y + (ptrdiff_t)r * n);
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

/* x [tokens], x_stride apart: [heads][dim]; y [tokens][heads][dim], cosine and sine [tokens][pairs];
 * 2 * pairs <= dim. The pairs are (i, i + pairs) if `halves`, else (2 i, 2 i + 1). */
EXPORT void caravan_rope(const float *x, int64_t x_stride, const float *cosine, const float *sine,
                         int tokens, int heads, int dim, int pairs, int halves, float *y, int threads) {
    const int64_t elements = (int64_t)tokens * heads * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (elements > WORTH_SHARING)
    for (int t = 0; t < tokens; t++) {
        const float *c = cosine + (ptrdiff_t)t * pairs, *s = sine + (ptrdiff_t)t * pairs;
        for (int h = 0; h < heads; h++) {
            const float *from = x + t * x_stride + h * dim;
            float *to = y + ((ptrdiff_t)t * heads + h) * dim;
            if (halves) rotate(from, c, s, pairs, 1, to);
            else rotate(from, c, s, pairs, 0, to);
            memcpy(to + 2 * pairs, from + 2 * pairs, (dim - 2 * pairs) * sizeof(float));
        }
    }
}

/* The angle of pair p of token t is positions[axes ? axes[p] : 0][t] * frequencies[p]; cosine and sine
 * [tokens][pairs] are those of the angles, times `magnitude`. */
EXPORT void caravan_angles(const int64_t *positions, const int64_t *axes, const float *frequencies,
                           int tokens, int pairs, float magnitude, float *cosine, float *sine,
                           int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if ((int64_t)tokens * pairs > WORTH_SHARING / 8)
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < pairs; p++) {
            const int64_t position = positions[(axes ? axes[p] : 0) * tokens + t];
            const float angle = (float)position * frequencies[p];
            cosine[(ptrdiff_t)t * pairs + p] = cosf(angle) * magnitude;
            sine[(ptrdiff_t)t * pairs + p] = sinf(angle) * magnitude;
        }
}

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, GELU_QUICK = 3, SIGMOID = 4 };

INLINE v16 curve(const int kind, v16 x) {
    if (kind == SILU) return v_times_logistic(x, x);
    if (kind == GELU_TANH) return v_gelu_tanh(x);
    if (kind == GELU_ERF) return v_gelu_erf(x);
    if (kind == SIGMOID) return v_times_logistic(v_all(1.0f), x);
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

/* y[r][i] = curve(gate[r][i]) * up[r][i]; rows of gate and up are strides apart; up NULL: ones */
EXPORT void caravan_gate(int kind, const float *gate, int64_t gate_stride, const float *up, int64_t up_stride,
                         int64_t rows, int64_t n, float *y, int threads) {
    const int64_t chunks = (n + GATE_CHUNK - 1) / GATE_CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > WORTH_SHARING)
    for (int64_t c = 0; c < rows * chunks; c++) {
        const int64_t row = c / chunks, begin = c % chunks * GATE_CHUNK;
        const int some = n - begin < GATE_CHUNK ? (int)(n - begin) : GATE_CHUNK;
        const float *g = gate + row * gate_stride + begin, *u = up ? up + row * up_stride + begin : NULL;
        float *to = y + row * n + begin;
        switch (kind) {
        case SILU: gate_chunk(SILU, g, u, some, to); break;
        case GELU_TANH: gate_chunk(GELU_TANH, g, u, some, to); break;
        case GELU_ERF: gate_chunk(GELU_ERF, g, u, some, to); break;
        case GELU_QUICK: gate_chunk(GELU_QUICK, g, u, some, to); break;
        case SIGMOID: gate_chunk(SIGMOID, g, u, some, to); break;
        }
    }
}

/* x[r][i] = x[r][i] * scale + y[r][i]; rows are strides apart; y NULL: zeros */
EXPORT void caravan_add(float *x, int64_t x_stride, const float *y, int64_t y_stride, float scale, int rows,
                        int n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if ((int64_t)rows * n > WORTH_SHARING)
    for (int r = 0; r < rows; r++) {
        float *to = x + r * x_stride;
        const float *from = y ? y + r * y_stride : NULL;
        for (int i = 0; i < n; i++) to[i] = to[i] * scale + (from ? from[i] : 0.0f);
    }
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

/* y[i] = cap tanh(x[i] / cap) */
EXPORT void caravan_softcap(const float *x, int64_t n, float cap, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > WORTH_SHARING)
    for (int64_t i = 0; i < n; i += 16) {
        const int left = n - i < 16 ? (int)(n - i) : 16;
        const v16 bent = v_tanh(v_div(v_load_at(x + i, 0, left), v_all(cap)));
        v_store_at(y + i, 0, left, v_mul(bent, v_all(cap)));
    }
}
