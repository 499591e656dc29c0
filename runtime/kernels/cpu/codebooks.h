/* The formats that index grids, and TQ1_0: sixteen weights of a block of 256 at a time. */
#ifndef CARAVAN_CODEBOOKS_H
#define CARAVAN_CODEBOOKS_H

#include "simd.h"
#include "types.h"

/* Offsets of the grids, in the order of runtime/quant/formats/grids.py, one byte per weight. */
enum {
    GRID_2_XXS = 0,
    GRID_2_XS = GRID_2_XXS + 256 * 8,
    GRID_2_S = GRID_2_XS + 512 * 8,
    GRID_3_XXS = GRID_2_S + 1024 * 8,
    GRID_3_S = GRID_3_XXS + 256 * 4,
    GRID_1 = GRID_3_S + 512 * 4,
    GRIDS = GRID_1 + 2048 * 8,
};

static int8_t grids[GRIDS] __attribute__((aligned(64)));

INLINE uint32_t word_at(const uint8_t *p) { uint16_t w; memcpy(&w, p, 2); return w; }
INLINE uint32_t double_word_at(const uint8_t *p) { uint32_t w; memcpy(&w, p, 4); return w; }
INLINE uint32_t nibble_at(const uint8_t *p, const int i) { return p[i / 2] >> 4 * (i % 2) & 15; }

INLINE uint64_t eight(const int grid, uint32_t index) {
    uint64_t weights;
    memcpy(&weights, grids + grid + 8 * index, 8);
    return weights;
}
INLINE uint64_t four_and_four(const int grid, uint32_t first, uint32_t second) {
    uint32_t weights[2];
    memcpy(weights, grids + grid + 4 * first, 4);
    memcpy(weights + 1, grids + grid + 4 * second, 4);
    return weights[0] | (uint64_t)weights[1] << 32;
}

/* Seven signs, and an eighth that makes the number of negative ones even. */
INLINE uint32_t even_signs(uint32_t index) {
    index &= 127;
    return index | (uint32_t)__builtin_parity(index) << 7;
}

/* Bit i of `signs` negates weight i. */
INLINE v16 with_signs(uint64_t first, uint64_t second, uint32_t signs, float scale) {
    const b16 minus = b_first(b_from_bits(signs)), weights = b_pair(first, second);
    return v_mul(v_i8((weights ^ minus) - minus), v_all(scale));
}

/* Scales of all groups of a block. */
INLINE void codebook_scales(const int type, const uint8_t *p, float *s) {
    const float d = half_at(p);
    UNROLL(16)
    for (int i = 0; i < 16; i++) {
        const int k = i % 8;
        switch (type) {
        case IQ2_XXS: s[k] = d * (0.5f + (float)(double_word_at(p + 6 + 8 * k) >> 28)) * 0.25f; break;
        case IQ2_XS: s[i] = d * (0.5f + (float)nibble_at(p + 66, i)) * 0.25f; break;
        case IQ2_S: s[i] = d * (0.5f + (float)nibble_at(p + 74, i)) * 0.25f; break;
        case IQ3_XXS: s[k] = d * (0.5f + (float)(double_word_at(p + 66 + 4 * k) >> 28)) * 0.5f; break;
        case IQ3_S: s[k] = d * (float)(1 + 2 * nibble_at(p + 106, k)); break;
        case IQ1_S: s[k] = d * (float)(1 + 2 * (word_at(p + 34 + 2 * k) >> 12 & 7)) * 0.125f; break;
        }
    }
}

/* The half of a block of IQ1_M is in the upper nibbles of four words. */
INLINE void iq1_m_scales(const uint8_t *p, float *s) {
    uint16_t half = 0;
    for (int i = 0; i < 4; i++) half |= (p[49 + 2 * i] >> 4) << 4 * i;
    const float d = half_at(&half) * 0.125f;
    for (int i = 0; i < 16; i++)
        s[i] = d * (float)(1 + 2 * (word_at(p + 48 + i / 4 * 2) >> 3 * (i % 4) & 7));
}

INLINE v16 iq2_xxs(const uint8_t *p, const float *s, const int v) {
    const uint8_t *q = p + 2 + 8 * (v / 2);
    const uint32_t signs = double_word_at(q + 4) >> 14 * (v % 2);
    const uint8_t *at = q + 2 * (v % 2);
    return with_signs(eight(GRID_2_XXS, at[0]), eight(GRID_2_XXS, at[1]),
                      even_signs(signs) | even_signs(signs >> 7) << 8, s[v / 2]);
}

INLINE v16 iq2_xs(const uint8_t *p, const float *s, const int v) {
    const uint32_t a = word_at(p + 2 + 4 * v), b = word_at(p + 4 + 4 * v);
    return with_signs(eight(GRID_2_XS, a & 511), eight(GRID_2_XS, b & 511),
                      even_signs(a >> 9) | even_signs(b >> 9) << 8, s[v]);
}

INLINE v16 iq2_s(const uint8_t *p, const float *s, const int v) {
    const uint32_t upper = (uint32_t)p[66 + v / 2] >> 4 * (v % 2);
    const uint32_t a = p[2 + 2 * v] | (upper & 3) << 8, b = p[3 + 2 * v] | (upper >> 2 & 3) << 8;
    return with_signs(eight(GRID_2_S, a), eight(GRID_2_S, b), word_at(p + 34 + 2 * v), s[v]);
}

INLINE v16 iq3_xxs(const uint8_t *p, const float *s, const int v) {
    const uint8_t *q = p + 2 + 4 * v;
    const uint32_t signs = double_word_at(p + 66 + 4 * (v / 2)) >> 14 * (v % 2);
    return with_signs(four_and_four(GRID_3_XXS, q[0], q[1]), four_and_four(GRID_3_XXS, q[2], q[3]),
                      even_signs(signs) | even_signs(signs >> 7) << 8, s[v / 2]);
}

INLINE v16 iq3_s(const uint8_t *p, const float *s, const int v) {
    uint32_t index[4];
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        index[i] = p[2 + 4 * v + i] | ((uint32_t)p[66 + v / 2] >> (4 * (v % 2) + i) & 1) << 8;
    return with_signs(four_and_four(GRID_3_S, index[0], index[1]),
                      four_and_four(GRID_3_S, index[2], index[3]), word_at(p + 74 + 2 * v), s[v / 2]);
}

/* Eight weights of the ternary grid, in eighths: nibble 8 shifts them down by one, or else up. */
INLINE uint64_t shift_of(uint32_t nibble) { return nibble & 8 ? ~0ull : 0x0101010101010101; }

INLINE v16 iq1(const uint8_t *q, uint32_t first, uint32_t second, float scale) {
    const uint64_t a = eight(GRID_1, q[0] | (first & 7) << 8);
    const uint64_t b = eight(GRID_1, q[1] | (second & 7) << 8);
    const b16 eighths = b_pair(a, b) * 8 + b_pair(shift_of(first), shift_of(second));
    return v_mul(v_i8(eighths), v_all(scale));
}

INLINE v16 iq1_s(const uint8_t *p, const float *s, const int v) {
    const uint32_t packed = word_at(p + 34 + 2 * (v / 2)), shift = packed >> 12 & 8;
    const uint32_t upper = packed >> 6 * (v % 2);
    return iq1(p + 2 + 2 * v, (upper & 7) | shift, (upper >> 3 & 7) | shift, s[v / 2]);
}

INLINE v16 iq1_m(const uint8_t *p, const float *s, const int v) {
    return iq1(p + 2 * v, p[32 + v] & 15, p[32 + v] >> 4, s[v]);
}

/* Base-3 digits, each the integer part of 3 times a fraction of 256; bytes wrap around by design. */
INLINE v16 tq1_0(const uint8_t *p, const int v) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    static const uint8_t last[16] = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    const uint64_t four = double_word_at(p + 48), twice = four | four << 32;
    const b16 fractions = v < 10   ? b_load(p + 16 * (v % 2)) * powers[v / 2]
                          : v < 15 ? b_load(p + 32) * powers[v - 10]
                                   : b_pair(twice, twice) * b_load(last);
    const b16 above = (b16)(fractions > 85) + (b16)(fractions > 170); /* -1 for each true comparison */
    return v_mul(v_i8(-1 - above), v_all_half(p + 52));
}

/* Elements 16 v .. 16 v + 15 of a block; v is a constant after inlining. */
INLINE v16 codebook_vector(const int type, const uint8_t *p, const float *s, const int v) {
    switch (type) {
    case IQ2_XXS: return iq2_xxs(p, s, v);
    case IQ2_XS: return iq2_xs(p, s, v);
    case IQ2_S: return iq2_s(p, s, v);
    case IQ3_XXS: return iq3_xxs(p, s, v);
    case IQ3_S: return iq3_s(p, s, v);
    case IQ1_S: return iq1_s(p, s, v);
    case IQ1_M: return iq1_m(p, s, v);
    default: return tq1_0(p, v);
    }
}

#endif
