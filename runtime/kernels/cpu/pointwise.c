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

/* x, y [rows][n], weight [n] or NULL */
EXPORT void caravan_rms_norm(const float *x, const float *weight, float eps, int rows, int n, float *y,
                             int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if ((int64_t)rows * n > WORTH_SHARING)
    for (int r = 0; r < rows; r++)
        rms_norm_row(x + (ptrdiff_t)r * n, weight, eps, n, y + (ptrdiff_t)r * n);
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

/* x, y [tokens][heads][dim], cosine and sine [tokens][pairs]; 2 * pairs <= dim. The pairs are (i, i +
 * pairs) if `halves`, else (2 i, 2 i + 1). */
EXPORT void caravan_rope(const float *x, const float *cosine, const float *sine, int tokens, int heads,
                         int dim, int pairs, int halves, float *y, int threads) {
    const int64_t elements = (int64_t)tokens * heads * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (elements > WORTH_SHARING)
    for (int t = 0; t < tokens; t++) {
        const float *c = cosine + (ptrdiff_t)t * pairs, *s = sine + (ptrdiff_t)t * pairs;
        for (int h = 0; h < heads; h++) {
            const ptrdiff_t at = ((ptrdiff_t)t * heads + h) * dim;
            if (halves) rotate(x + at, c, s, pairs, 1, y + at);
            else rotate(x + at, c, s, pairs, 0, y + at);
            memcpy(y + at + 2 * pairs, x + at + 2 * pairs, (dim - 2 * pairs) * sizeof(float));
        }
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

#define GATE_ALL(kind)                                                                                      \
    case kind:                                                                                              \
        _Pragma("omp parallel for num_threads(threads) schedule(static) if (n > WORTH_SHARING)")            \
        for (int64_t i = 0; i < whole; i += 16) gate_some(kind, gate + i, up ? up + i : NULL, 16, y + i);   \
        if (whole < n)                                                                                      \
            gate_some(kind, gate + whole, up ? up + whole : NULL, (int)(n - whole), y + whole);             \
        break;

/* y[i] = curve(gate[i]) * up[i]; up NULL: ones */
EXPORT void caravan_gate(int kind, const float *gate, const float *up, int64_t n, float *y, int threads) {
    const int64_t whole = n / 16 * 16;
    switch (kind) {
        GATE_ALL(SILU)
        GATE_ALL(GELU_TANH)
        GATE_ALL(GELU_ERF)
        GATE_ALL(GELU_QUICK)
        GATE_ALL(SIGMOID)
    }
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
