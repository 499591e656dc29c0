/* Activation functions, sixteen values at a time. All of them map NaN to NaN. */
#ifndef CARAVAN_CURVES_H
#define CARAVAN_CURVES_H

#include "simd.h"

INLINE v16 v_negative(v16 x) { return v_mul(x, v_all(-1.0f)); }
INLINE v16 v_clamp(v16 x, float limit) {
    return v_negative(v_max(v_all(-limit), v_negative(v_max(v_all(-limit), x))));
}

/* x / (1 + e^-y): x times the logistic function of y. */
INLINE v16 v_times_logistic(v16 x, v16 y) {
    const v16 e = v_exp(v_negative(v_max(v_all(-88.0f), y)));
    return v_div(x, v_add(v_all(1.0f), e));
}

/* max(x, 0)^2 */
INLINE v16 v_relu_squared(v16 x) {
    const v16 positive = v_max(v_zero(), x);
    return v_mul(positive, positive);
}

/* e^x - 1 for |x| <= 88, accurate for small x. */
INLINE v16 v_expm1(v16 x) {
    v16 n;
    const v16 part = v_exp_reduced(x, &n);
    return v_add(v_scale2(part, n), v_add(v_scale2(v_all(1.0f), n), v_all(-1.0f)));
}

/* m / (m + 2) with m = e^2x - 1, which is accurate for small x. */
INLINE v16 v_tanh(v16 x) {
    const v16 m = v_expm1(v_clamp(v_mul(x, v_all(2.0f)), 20.0f));
    return v_div(m, v_add(m, v_all(2.0f)));
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter by 2 artanh(s) = log((1 + s) / (1 - s)) with s <= 1/3,
 * whose series ends where terms are below 1e-9 of the first. */
INLINE v16 v_softplus(v16 x) {
    const v16 e = v_exp(v_negative(v_max(v_negative(x), x)));
    const v16 s = v_div(e, v_add(e, v_all(2.0f))), square = v_mul(s, s);
    v16 p = v_all(2.0f / 17.0f);
    for (int term = 15; term > 0; term -= 2) p = v_fma(p, square, v_all(2.0f / term));
    return v_fma(p, s, v_max(v_zero(), x));
}

/* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), by 1 + tanh(u) = 2 / (1 + e^-2u). */
INLINE v16 v_gelu_tanh(v16 x) {
    const v16 cubic = v_fma(v_mul(x, x), v_all(0.044715f), v_all(1.0f));
    return v_times_logistic(x, v_mul(v_mul(x, cubic), v_all(1.595769122f)));
}

/* 0.5 x (1 + erf(x / sqrt(2))) = max(x, 0) - |x| / 2 * erfc(z), z = |x| / sqrt(2). With t = 1 / (1 + 0.3 z)
 * erfc(z) is t e^(-z^2) times a polynomial in t, fitted to 3e-8 of the value for all z below 10. */
INLINE v16 v_gelu_erf(v16 x) {
    const v16 size = v_max(v_negative(x), x), z = v_mul(size, v_all(0.7071067812f));
    const v16 t = v_div(v_all(1.0f), v_fma(z, v_all(0.3f), v_all(1.0f)));
    v16 p = v_fma(t, v_all(-0.13055858f), v_all(0.49073562f));
    p = v_fma(p, t, v_all(-0.523299158f));
    p = v_fma(p, t, v_all(0.560781002f));
    p = v_fma(p, t, v_all(-0.104048647f));
    p = v_fma(p, t, v_all(0.219122514f));
    p = v_fma(p, t, v_all(0.147205472f));
    p = v_fma(p, t, v_all(0.170884416f));
    p = v_fma(p, t, v_all(0.169177338f));
    const v16 tail = v_mul(v_mul(p, t), v_exp(v_negative(v_mul(z, z))));
    return v_fma(v_mul(size, v_all(-0.5f)), tail, v_max(v_zero(), x));
}

#endif
