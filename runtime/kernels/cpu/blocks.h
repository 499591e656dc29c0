/* Block formats of GGUF -> floats, sixteen at a time, rounded as the torch twin rounds. */
#ifndef CARAVAN_BLOCKS_H
#define CARAVAN_BLOCKS_H

#include "simd.h"

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

/* Vectors of 16 elements per block; the plain types count 16 elements as a block. */
INLINE int block_vectors(const int type) {
    return type == Q4_0 || type == Q8_0 ? 2 : type >= Q4_K && type <= Q6_K ? 16 : 1;
}

/* A block is expanded in one part, or in four of 64 elements. */
INLINE int block_parts(const int type) { return block_vectors(type) == 16 ? 4 : 1; }

INLINE int part_vectors(const int type) { return block_vectors(type) / block_parts(type); }

INLINE int block_bytes(const int type) {
    switch (type) {
    case F32: return 64;
    case Q4_0: return 18;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
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

/* Scales of the groups of a block of 256. */
INLINE void block_scales(const int type, const uint8_t *p, float *s) {
    if (type == Q4_K || type == Q5_K) k_scales(p, s);
    if (type == Q6_K) v_store(s, v_mul(v_i8(b_load(p + 192)), v_all_half(p + 208)));
}

INLINE void q4_0_block(const uint8_t *p, v16 *w) {
    const nibbles t = signed_nibbles_of(p);
    const b16 q = b_load(p + 2);
    w[0] = nibbles_low(t, q);
    w[1] = nibbles_high(t, q);
}

INLINE void q8_0_block(const uint8_t *p, v16 *w) {
    const v16 d = v_all_half(p);
    w[0] = v_mul(v_i8(b_load(p + 2)), d);
    w[1] = v_mul(v_i8(b_load(p + 18)), d);
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

/* Elements 64 part and on of the block at p into w, part_vectors(type) vectors of them; s as told by
 * block_scales. `type` and `part` are constants after inlining. */
INLINE void expand_part(const int type, const uint8_t *p, const float *s, const int part, v16 *w) {
    switch (type) {
    case F32: w[0] = v_load((const float *)p); break;
    case F16: w[0] = v_half(p); break;
    case BF16: w[0] = v_bfloat(p); break;
    case Q4_0: q4_0_block(p, w); break;
    case Q8_0: q8_0_block(p, w); break;
    case Q4_K: q4_k_part(p, s, part, w); break;
    case Q5_K: q5_k_part(p, s, part, w); break;
    case Q6_K: q6_k_part(p, s, part, w); break;
    }
}

/* The last elements % 16 of a row of a plain type, then zeros. */
INLINE v16 expand_tail(const int type, const uint8_t *p, int elements) {
    uint8_t padded[64] = {0};
    v16 w;
    memcpy(padded, p, elements * (type == F32 ? 4 : 2));
    expand_part(type, padded, NULL, 0, &w);
    return w;
}

#endif
