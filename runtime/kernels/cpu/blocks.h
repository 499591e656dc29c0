/* Block formats of GGUF -> floats, sixteen at a time, rounded as the torch twin rounds. */
#ifndef CARAVAN_BLOCKS_H
#define CARAVAN_BLOCKS_H

#include "codebooks.h"
#include "simd.h"
#include "types.h"

/* Maximum number of floats of a block's scales. */
#define SCALES 32

/* Whether vectors have 32 bfloat16, which are multiplied in pairs. */
INLINE int is_paired(const int type) { return type == BF16_ROUNDED && HAS_BFLOAT_DOTS; }

/* sum + a * b, of a vector of weights and one of activations. */
INLINE v16 v_multiply(const int type, v16 a, v16 b, v16 sum) {
    return is_paired(type) ? v_bfloat_dot(a, b, sum) : v_fma(a, b, sum);
}

/* Vectors of 16 elements, or of 32 if paired, per block; the plain types count one or two vectors as a block. */
INLINE int block_vectors(const int type) {
    switch (type) {
    case BF16_ROUNDED: return is_paired(type) ? 1 : 2;
    case F32: case F16: case BF16: return 1;
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: case Q8_0: case IQ4_NL: case MXFP4: case MXFP4_PAIRS:
    case Q16_0:
        return 2;
    case NVFP4: return 4;
    default: return 16;
    }
}

/* Plain types, whose rows may have any length. */
INLINE int is_plain(const int type) {
    return type == F32 || type == F16 || type == BF16 || type == BF16_ROUNDED;
}

INLINE int block_elements(const int type) { return (is_paired(type) ? 32 : 16) * block_vectors(type); }

/* A block is expanded in one part, or in four of 64 elements. */
INLINE int block_parts(const int type) { return block_vectors(type) == 16 ? 4 : 1; }

INLINE int part_vectors(const int type) { return block_vectors(type) / block_parts(type); }

INLINE int block_bytes(const int type) {
    switch (type) {
    case F32: case BF16_ROUNDED: return 64;
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ1_S: return 50;
    case IQ1_M: return 56;
    case IQ2_XXS: return 66;
    case IQ2_XS: return 74;
    case IQ2_S: return 82;
    case IQ3_XXS: return 98;
    case IQ3_S: return 110;
    case IQ4_NL: return 18;
    case IQ4_XS: return 136;
    case TQ1_0: return 54;
    case TQ2_0: return 66;
    case MXFP4: case MXFP4_PAIRS: return 17;
    case NVFP4: return 36;
    case Q16_0: return 65;
    default: return 32;
    }
}

/* d * scale in lanes 0..7, -dmin * minimum in lanes 8..15, from a block's first 16 bytes. */
INLINE void k_scales(const uint8_t *p, float *out) {
    const uint32_t low = 0x3f3f3f3f, high = 0x30303030, four = 0x0f0f0f0f;
    const float d = half_at(p), m = -half_at(p + 2);
    uint32_t in[3], bytes[4];
    memcpy(in, p + 4, 12);
    bytes[0] = in[0] & low;
    bytes[1] = (in[2] & four) | ((in[0] >> 2) & high);
    bytes[2] = in[1] & low;
    bytes[3] = ((in[2] >> 4) & four) | ((in[1] >> 2) & high);
    const float factors[16] = {d, d, d, d, d, d, d, d, m, m, m, m, m, m, m, m};
    v_store(out, v_mul(v_u8(b_load(bytes)), v_load(factors)));
}

/* d * scale in lanes 0..15, then -dmin * minimum, from sixteen bytes of both. */
INLINE void q2_k_scales(const uint8_t *p, float *s) {
    const b16 both = b_load(p);
    v_store(s, v_mul(v_u8(both & 15), v_all_half(p + 80)));
    v_store(s + 16, v_mul(v_u8(both >> 4), v_all(-half_at(p + 82))));
}

/* Sixteen scales of 6 bits: 8 bytes of nibbles, first the low ones; 4 bytes of upper pairs. */
INLINE void q3_k_scales(const uint8_t *p, float *s) {
    const uint32_t four = 0x0f0f0f0f, two = 0x30303030;
    uint32_t in[3], bytes[4];
    memcpy(in, p + 96, 12);
    bytes[0] = (in[0] & four) | ((in[2] << 4) & two);
    bytes[1] = (in[1] & four) | ((in[2] << 2) & two);
    bytes[2] = ((in[0] >> 4) & four) | (in[2] & two);
    bytes[3] = ((in[1] >> 4) & four) | ((in[2] >> 2) & two);
    v_store(s, v_mul(v_i8(b_load(bytes) - 32), v_all_half(p + 108)));
}

/* Eight scales of 6 bits: a word of upper pairs, 4 bytes of nibbles. */
INLINE void iq4_xs_scales(const uint8_t *p, float *s) {
    const float d = half_at(p);
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        const int low = p[4 + i / 2] >> 4 * (i % 2) & 15, high = p[2 + i / 4] >> 2 * (i % 4) & 3;
        s[i] = d * (float)((low | high << 4) - 32);
    }
}

/* Scales of the groups of a block of 256. */
INLINE void block_scales(const int type, const uint8_t *p, float *s) {
    switch (type) {
    case Q2_K: q2_k_scales(p, s); break;
    case Q3_K: q3_k_scales(p, s); break;
    case Q4_K: case Q5_K: k_scales(p, s); break;
    case Q6_K: v_store(s, v_mul(v_i8(b_load(p + 192)), v_all_half(p + 208))); break;
    case IQ4_XS: iq4_xs_scales(p, s); break;
    case IQ1_M: iq1_m_scales(p, s); break;
    default: codebook_scales(type, p, s);
    }
}

INLINE void q4_0_block(const uint8_t *p, v16 *w) {
    const nibbles t = signed_nibbles_of(p);
    const b16 q = b_load(p + 2);
    w[0] = nibbles_low(t, q);
    w[1] = nibbles_high(t, q);
}

INLINE void q4_1_block(const uint8_t *p, v16 *w) {
    const nibbles t = nibbles_of(half_at(p), half_at(p + 2));
    const b16 q = b_load(p + 4);
    w[0] = nibbles_low(t, q);
    w[1] = nibbles_high(t, q);
}

/* Four bytes of fifth bits at `p`, then nibbles. */
INLINE void fives_block(const fives t, const uint8_t *p, v16 *w) {
    const b16 q = b_load(p + 4);
    const b32 upper = b_from_bits(double_word_at(p)) & 16;
    w[0] = fives_at(t, (q & 15) | b_first(upper));
    w[1] = fives_at(t, (q >> 4) | b_second(upper));
}

INLINE void q5_0_block(const uint8_t *p, v16 *w) {
    const float d = half_at(p);
    fives_block(fives_of(d, -16.0f * d), p + 2, w);
}

INLINE void q5_1_block(const uint8_t *p, v16 *w) {
    fives_block(fives_of(half_at(p), half_at(p + 2)), p + 4, w);
}

/* The sixteen values of IQ4_NL and IQ4_XS, and those of E2M1, doubled. */
static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Nibbles at `p`, each `scale` times a code. */
INLINE void codes_block(const int8_t *codes, float scale, const uint8_t *p, v16 *w) {
    const table t = table_of(codes, scale);
    const b16 q = b_load(p);
    w[0] = table_at(t, q & 15);
    w[1] = table_at(t, q >> 4);
}

/* 2^(exponent - 128), whose two smallest values are denormal. */
INLINE float power_at(const uint8_t *p) {
    const uint32_t bits = *p < 2 ? (*p + 1u) << 21 : (*p - 1u) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* As MXFP4, but with elements 2k and 2k + 1 in byte k. */
INLINE void mxfp4_pairs_block(const uint8_t *p, v16 *w) {
    const table t = table_of(E2M1, power_at(p));
    const h16 wide = __builtin_convertvector(b_load(p + 1), h16);
    const b32 q = (b32)(wide | wide << 4) & 15;
    w[0] = table_at(t, b_first(q));
    w[1] = table_at(t, b_second(q));
}

/* Half of an unsigned E4M3, ignoring the sign; 0x7f is 0. */
INLINE float e4m3_at(const uint8_t *p) {
    const uint32_t bits = (*p == 0x7f ? 0 : *p & 0x7fu) << 20;
    float f;
    memcpy(&f, &bits, 4);
    return f * 0x1p119f;
}

/* Four groups of sixteen: eight bytes each, low nibbles before high ones. */
INLINE void nvfp4_block(const uint8_t *p, v16 *w) {
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        uint64_t q;
        memcpy(&q, p + 4 + 8 * i, 8);
        const b16 both = b_pair(q, q >> 4) & 15;
        w[i] = table_at(table_of(E2M1, e4m3_at(p + i)), both);
    }
}

INLINE void q8_0_block(const uint8_t *p, v16 *w) {
    const v16 d = v_all_half(p);
    w[0] = v_mul(v_i8(b_load(p + 2)), d);
    w[1] = v_mul(v_i8(b_load(p + 18)), d);
}

/* Elements 64 j .. 64 j + 63: the pairs of bits 4 (j % 2) and on of 32 bytes, then the next pairs. */
INLINE b32 pairs_of(const uint8_t *p, const int j, const int i) {
    return b_right(b_load32(p + 32 * (j / 2)), 4 * (j % 2) + 2 * i) & 3;
}

INLINE void q2_k_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const b32 q = pairs_of(p + 16, j, i);
        const float *at = s + 4 * j + 2 * i;
        w[2 * i] = v_fma(v_u8(b_first(q)), v_all(at[0]), v_all(at[16]));
        w[2 * i + 1] = v_fma(v_u8(b_second(q)), v_all(at[1]), v_all(at[17]));
    }
}

/* As Q2_K, with a third bit in bit 2 j + i of 32 bytes; values start at -4. */
INLINE void q3_k_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    const b32 bits = b_load32(p);
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const int bit = 2 * j + i;
        const b32 third = (bit < 2 ? b_left(bits, 2 - bit) : b_right(bits, bit - 2)) & 4;
        const b32 q = (pairs_of(p + 32, j, i) | third) - 4;
        w[2 * i] = v_mul(v_i8(b_first(q)), v_all(s[4 * j + 2 * i]));
        w[2 * i + 1] = v_mul(v_i8(b_second(q)), v_all(s[4 * j + 2 * i + 1]));
    }
}

INLINE void tq2_0_part(const uint8_t *p, const int j, v16 *w) {
    const v16 d = v_all_half(p + 64);
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const b32 q = pairs_of(p, j, i) - 1;
        w[2 * i] = v_mul(v_i8(b_first(q)), d);
        w[2 * i + 1] = v_mul(v_i8(b_second(q)), d);
    }
}

INLINE void iq4_xs_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    codes_block(NONLINEAR, s[2 * j], p + 8 + 32 * j, w);
    codes_block(NONLINEAR, s[2 * j + 1], p + 24 + 32 * j, w + 2);
}

/* Elements 64 j .. 64 j + 63 of a block, in 32 bytes: low nibbles, then high ones. */
INLINE void q4_k_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    const b16 a = b_load(p + 16 + 32 * j), b = b_load(p + 32 + 32 * j);
    const nibbles low = nibbles_of(s[2 * j], s[2 * j + 8]);
    const nibbles high = nibbles_of(s[2 * j + 1], s[2 * j + 9]);
    w[0] = nibbles_low(low, a);
    w[1] = nibbles_low(low, b);
    w[2] = nibbles_high(high, a);
    w[3] = nibbles_high(high, b);
}

/* Bit `bit` of each byte, moved to bit 4. */
INLINE b32 fifth(b32 bits, const int bit) {
    return (bit < 4 ? b_left(bits, 4 - bit) : b_right(bits, bit - 4)) & 16;
}

/* As Q4_K, with the fifth bit of element i of group g in bit g of byte i. */
INLINE void q5_k_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    const b32 q = b_load32(p + 48 + 32 * j), bits = b_load32(p + 16);
    const b32 low = (q & 15) | fifth(bits, 2 * j);
    const b32 high = (b_right(q, 4) & 15) | fifth(bits, 2 * j + 1);
    const fives even = fives_of(s[2 * j], s[2 * j + 8]);
    const fives odd = fives_of(s[2 * j + 1], s[2 * j + 9]);
    w[0] = fives_at(even, b_first(low));
    w[1] = fives_at(even, b_second(low));
    w[2] = fives_at(odd, b_first(high));
    w[3] = fives_at(odd, b_second(high));
}

/* Elements 64 j .. 64 j + 63: low or high nibbles of 64 bytes, which two parts share. */
INLINE void q6_k_part(const uint8_t *p, const float *s, const int j, v16 *w) {
    const int half = j / 2, high = j % 2;
    const b32 bits = b_load32(p + 128 + 32 * half);
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const b32 a = b_load32(p + 64 * half + 32 * i);
        const b32 upper = high ? (i ? b_right(bits, 2) : bits) : b_left(bits, i ? 2 : 4);
        const b32 q = (((high ? b_right(a, 4) : a) & 15) | (upper & 48)) - 32;
        w[2 * i] = v_mul(v_i8(b_first(q)), v_all(s[4 * j + 2 * i]));
        w[2 * i + 1] = v_mul(v_i8(b_second(q)), v_all(s[4 * j + 2 * i + 1]));
    }
}

/* 32 bfloat16, in order or with the odd ones before the even ones. */
INLINE void bfloat_pairs(const uint8_t *p, v16 *w) {
    w[0] = v_load((const float *)p);
    if (is_paired(BF16_ROUNDED)) return;
    w[1] = v_even_bfloats(w[0]);
    w[0] = v_odd_bfloats(w[0]);
}

/* Elements from 64 part on of the block at p into w, part_vectors(type) vectors; s from block_scales.
 * `type` and `part` are constants after inlining. */
INLINE void expand_part(const int type, const uint8_t *p, const float *s, const int part, v16 *w) {
    switch (type) {
    case F32: w[0] = v_load((const float *)p); break;
    case F16: w[0] = v_half(p); break;
    case BF16: w[0] = v_bfloat(p); break;
    case BF16_ROUNDED: bfloat_pairs(p, w); break;
    case Q4_0: q4_0_block(p, w); break;
    case Q4_1: q4_1_block(p, w); break;
    case Q5_0: q5_0_block(p, w); break;
    case Q5_1: q5_1_block(p, w); break;
    case Q8_0: q8_0_block(p, w); break;
    case IQ4_NL: codes_block(NONLINEAR, half_at(p), p + 2, w); break;
    case MXFP4: codes_block(E2M1, power_at(p), p + 1, w); break;
    case MXFP4_PAIRS: mxfp4_pairs_block(p, w); break;
    case NVFP4: nvfp4_block(p, w); break;
    case Q2_K: q2_k_part(p, s, part, w); break;
    case Q3_K: q3_k_part(p, s, part, w); break;
    case IQ4_XS: iq4_xs_part(p, s, part, w); break;
    case TQ2_0: tq2_0_part(p, part, w); break;
    case Q4_K: q4_k_part(p, s, part, w); break;
    case Q5_K: q5_k_part(p, s, part, w); break;
    case Q6_K: q6_k_part(p, s, part, w); break;
    default:
        UNROLL(4)
        for (int i = 0; i < 4; i++) w[i] = codebook_vector(type, p, s, 4 * part + i);
    }
}

/* The last elements of a row of a plain type, less than a block, followed by zeros. */
INLINE void expand_tail(const int type, const uint8_t *p, int elements, v16 *w) {
    uint8_t padded[64] = {0};
    memcpy(padded, p, elements * (type == F32 ? 4 : 2));
    expand_part(type, padded, NULL, 0, w);
}

#endif
