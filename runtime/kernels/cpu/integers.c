/* Products by integers: activations, and the kernels of the common types. */
#include "integers.h"

/* Whether this build has integer products at all. */
EXPORT int caravan_has_integers(void) {
#ifdef LANES
    return 1;
#else
    return 0;
#endif
}

#ifdef LANES

#define PARTS_PER_THREAD 8

DEFINE_INTEGER(Q4_0)
DEFINE_INTEGER(Q8_0)
DEFINE_INTEGER(Q4_K)
DEFINE_INTEGER(Q5_K)
DEFINE_INTEGER(Q6_K)

static const integer_product common[] = {
    INTEGER(Q4_0), INTEGER(Q8_0), INTEGER(Q4_K), INTEGER(Q5_K), INTEGER(Q6_K),
};

integer_product integer_product_of(int type) {
    const int found = type >= 0 && type < (int)(sizeof common / sizeof *common) && common[type].fine;
    return found ? common[type] : rarer_integer_product(type);
}

/* 32 floats at x times `factor`; with an infinity or NaN among them, the scale is NaN. */
INLINE void write_group(const int planes, int type, const float *x, float factor, uint8_t *to) {
    const int largest = planes == 2 ? 127 * 128 : 127, parts = GROUP / LANES;
    floats scaled[GROUP / LANES], most = f_all(0), invalid = f_all(0);
    float tops[LANES], invalids[LANES], top = 0, nothing = 0;
    for (int i = 0; i < parts; i++) {
        scaled[i] = f_load(x + i * LANES) * f_all(factor);
        most = f_max(most, f_max(scaled[i], -scaled[i]));
        invalid += scaled[i] * f_all(0);
    }
    f_store(tops, most);
    f_store(invalids, invalid);
    for (int l = 0; l < LANES; l++) {
        top = tops[l] > top ? tops[l] : top;
        nothing += invalids[l];
    }
    const int valid = nothing == 0;
    /* Below this, the reciprocal would overflow; such activations count as zero. */
    const float inverse = valid && top > 1e-30f ? (float)largest / top : 0;
    const float scale = !valid ? NAN : inverse ? top / (float)largest : 0;
    int32_t q[GROUP], sums[2] = {0, 0};
    for (int i = 0; i < parts; i++) {
        const ints each = valid ? i_round(scaled[i] * f_all(inverse)) : i_all(0);
        memcpy(q + i * LANES, &each, sizeof each);
    }
    for (int i = 0; i < GROUP; i++) {
        const int high = planes == 2 ? (q[i] + 64) >> 7 : q[i];
        to[i] = (uint8_t)high;
        if (planes == 2) to[GROUP + i] = (uint8_t)(q[i] - 128 * high);
    }
    for (int i = 0; i < GROUP; i++) sums[i / 16] += q[i];
    if (group_scales(type) == 1) sums[0] += sums[1];
    memcpy(to + planes * GROUP, &scale, 4);
    for (int h = 0; h < 2; h++) {
        const int32_t moved = -code_offset(type) * sums[h];
        const float sum = (float)sums[h];
        memcpy(to + planes * GROUP + 4 + 4 * h, has_base(type) ? (const void *)&sum : &moved, 4);
    }
}

INLINE void pack(const int planes, int type, const float *x, float factor, int elements, int rows, int row,
                 void *packed) {
    const int groups = elements / GROUP, first = row / ROWS_AT_ONCE * ROWS_AT_ONCE;
    const int some = rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
    uint8_t *to = (uint8_t *)packed + ((ptrdiff_t)first * groups + row - first) * group_bytes(planes);
    for (int i = 0; i < groups; i++, to += some * group_bytes(planes))
        write_group(planes, type, x + i * GROUP, factor, to);
}

static void pack_fine(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    pack(2, type, x, factor, elements, rows, row, packed);
}

static void pack_fast(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    pack(1, type, x, factor, elements, rows, row, packed);
}

/* Each thread computes some parts, so that a thread that is held up delays the others little; but parts
 * of several tiles, of which all but the first are loaded in advance. */
static int outs_at_once(int outs, int threads) {
    const int tiles = (outs + LANES - 1) / LANES, each = tiles / (PARTS_PER_THREAD * threads);
    return LANES * (each < 1 ? 1 : each);
}

method integer_method(int type, int compute, int outs, int threads) {
    const integer_product p = integer_product_of(type);
    if (outs < LANES) return (method){0};
    if (compute == FINE) return (method){p.fine, outs_at_once(outs, threads), pack_fine};
    if (compute == FAST) return (method){p.fast, outs_at_once(outs, threads), pack_fast};
    return (method){0};
}

#else

method integer_method(int type, int compute, int outs, int threads) {
    (void)type, (void)compute, (void)outs, (void)threads;
    return (method){0};
}

#endif
