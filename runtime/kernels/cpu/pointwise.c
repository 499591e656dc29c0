/* Norms, rotary embeddings and gates, a row at a time. */
#include <stddef.h>

#include "simd.h"

#define WORTH_SHARING (1 << 15) /* elements; below, waking threads costs more than it saves */

/* n % 16 elements in a vector, zeros behind them. */
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

static void norm_row(const float *x, const float *weight, float eps, int n, float *y) {
    const int whole = n / 16 * 16, rest = n - whole;
    v16 squares = v_zero();
    for (int i = 0; i < whole; i += 16) squares = v_fma(v_load(x + i), v_load(x + i), squares);
    if (rest) {
        const v16 last = v_load_some(x + whole, rest);
        squares = v_fma(last, last, squares);
    }
    const v16 scale = v_all(1.0f / sqrtf(v_sum(squares) / (float)n + eps));
    for (int i = 0; i < whole; i += 16)
        v_store(y + i, v_mul(v_mul(v_load(x + i), scale), v_load(weight + i)));
    if (rest) {
        const v16 scaled = v_mul(v_load_some(x + whole, rest), scale);
        v_store_some(y + whole, rest, v_mul(scaled, v_load_some(weight + whole, rest)));
    }
}

/* x, y [rows][n], weight [n] */
EXPORT void caravan_rms_norm(const float *x, const float *weight, float eps, int rows, int n, float *y,
                             int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if ((int64_t)rows * n > WORTH_SHARING)
    for (int r = 0; r < rows; r++) norm_row(x + (ptrdiff_t)r * n, weight, eps, n, y + (ptrdiff_t)r * n);
}

/* x, y [tokens][heads][dim], cosine and sine [tokens][pairs]; 2 * pairs <= dim */
EXPORT void caravan_rope_interleaved(const float *x, const float *cosine, const float *sine, int tokens,
                                     int heads, int dim, int pairs, float *y, int threads) {
    const int64_t elements = (int64_t)tokens * heads * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (elements > WORTH_SHARING)
    for (int t = 0; t < tokens; t++) {
        const float *c = cosine + (ptrdiff_t)t * pairs, *s = sine + (ptrdiff_t)t * pairs;
        for (int h = 0; h < heads; h++) {
            const ptrdiff_t at = ((ptrdiff_t)t * heads + h) * dim;
            const float *from = x + at;
            float *to = y + at;
            for (int i = 0; i < pairs; i++) {
                const float even = from[2 * i], odd = from[2 * i + 1];
                to[2 * i] = even * c[i] - odd * s[i];
                to[2 * i + 1] = even * s[i] + odd * c[i];
            }
            memcpy(to + 2 * pairs, from + 2 * pairs, (dim - 2 * pairs) * sizeof(float));
        }
    }
}

INLINE v16 silu(v16 x) {
    const v16 e = v_exp(v_mul(v_max(v_all(-88.0f), x), v_all(-1.0f)));
    return v_div(x, v_add(v_all(1.0f), e));
}

/* y[i] = silu(gate[i]) * up[i] */
EXPORT void caravan_silu_mul(const float *gate, const float *up, int64_t n, float *y, int threads) {
    const int64_t whole = n / 16 * 16;
    const int rest = (int)(n - whole);
#pragma omp parallel for num_threads(threads) schedule(static) if (n > WORTH_SHARING)
    for (int64_t i = 0; i < whole; i += 16) v_store(y + i, v_mul(silu(v_load(gate + i)), v_load(up + i)));
    if (rest)
        v_store_some(y + whole, rest,
                     v_mul(silu(v_load_some(gate + whole, rest)), v_load_some(up + whole, rest)));
}
