/* Blocks of LANES rows as integer codes: value = scale * (code - offset) or scale * code + base. */
#ifndef CARAVAN_TILES_H
#define CARAVAN_TILES_H

#include "blocks.h"
#include "fields.h"

#ifdef LANES

#define GROUP 32 /* elements whose codes are multiplied at a time */

/* Subtracted from each code; 0 also for types with a base. */
INLINE int code_offset(const int type) {
    switch (type) {
    case Q4_0: return 8;
    case Q5_0: return 16;
    case Q3_K: return 4;
    case Q6_K: return 32;
    case MXFP4: case MXFP4_PAIRS: return 12;
    case Q8_0: case IQ4_NL: case IQ4_XS: return SIGNED_OFFSET;
    default: return 0;
    }
}

INLINE int has_base(const int type) {
    return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K;
}

INLINE int largest_code(const int type) {
    switch (type) {
    case Q2_K: return 3;
    case Q3_K: return 7;
    case Q4_0: case Q4_1: case Q4_K: return 15;
    case MXFP4: case MXFP4_PAIRS: return 24;
    case Q5_0: case Q5_1: case Q5_K: return 31;
    case Q6_K: return 63;
    default: return 255;
    }
}

INLINE int has_signed_codes(const int type) { return largest_code(type) == 255 && !SIGNED_OFFSET; }

/* Scales of a group of 32 elements. */
INLINE int group_scales(const int type) { return type == Q2_K || type == Q3_K || type == Q6_K ? 2 : 1; }

/* A group of LANES rows: codes 4 i .. 4 i + 3 in w[i]; of Q16_0, numbers 2 i and 2 i + 1 in wide[i]. */
typedef struct { union { bytes w[8]; shorts wide[16]; }; floats scale[2], base[2]; } group;

/* The largest magnitude of the integers of activations. 32 products of two numbers of Q16_0 fit into 32 bits. */
INLINE int largest_activation(const int type, const int planes) {
    return type == Q16_0 ? 8191 : planes == 2 ? 127 * 128 : 127;
}

/* Nibbles of 16 bytes of each row: first the low ones. */
INLINE void nibbles_tile(const block_place *at, const int offset, bytes *w) {
    bytes q[4];
    words_at(at, offset, q);
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        w[i] = q[i] & 15;
        w[4 + i] = right(q[i], 4) & 15;
    }
}

/* A fifth bit for each code, from 32 bits of each row. */
INLINE void add_fifth_bits(ints bits, bytes *w) {
    UNROLL(8)
    for (int i = 0; i < 8; i++) w[i] |= bits_of((bytes)bits, i) & 16;
}

/* Nibbles as indices into `codes`, which are moved by `moved`. */
INLINE void codes_tile(const int8_t *codes, int moved, const block_place *at, const int offset, bytes *w) {
    uint8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(codes[i] + moved);
    nibbles_tile(at, offset, w);
    UNROLL(8)
    for (int i = 0; i < 8; i++) w[i] = look_up(table, w[i]);
}

/* power_at of each row. */
INLINE floats powers_at(const block_place *at) {
    const ints e = first_bytes(at), small = e < 2;
    return (floats)((small & (e + 1) << 21) | (~small & (e - 1) << 23));
}

/* As codes_tile for MXFP4, but with elements 2k and 2k + 1 in byte k. */
INLINE void pairs_tile(const block_place *at, const int offset, bytes *w) {
    uint8_t table[16];
    bytes q[4];
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(E2M1[i] + code_offset(MXFP4_PAIRS));
    words_at(at, offset, q);
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        UNROLL(2)
        for (int second = 0; second < 2; second++) {
            const ints two = ((ints)q[i] >> 16 * second) & 0xffff;
            const ints four = (two | two << 8) & 0x00ff00ff; /* byte 2k in bytes 2k and 2k + 1 */
            const bytes each = (bytes)((four & 0x000f000f) | ((four & 0x00f000f0) << 4));
            w[2 * i + second] = look_up(table, each);
        }
}

/* A block of 32 elements. */
INLINE void simple_group(const int type, const block_place *at, group *g) {
    switch (type) {
    case Q4_0:
        g->scale[0] = halves_at(at, 0);
        nibbles_tile(at, 2, g->w);
        break;
    case Q4_1: case Q5_1: {
        const ints both = ints_at(at, 0);
        g->scale[0] = f_halves(both);
        g->base[0] = f_halves((both >> 16) & 0xffff);
        nibbles_tile(at, type == Q4_1 ? 4 : 8, g->w);
        if (type == Q5_1) add_fifth_bits(ints_at(at, 4), g->w);
        break;
    }
    case Q5_0:
        g->scale[0] = halves_at(at, 0);
        nibbles_tile(at, 6, g->w);
        add_fifth_bits(ints_at(at, 2), g->w);
        break;
    case Q8_0:
        g->scale[0] = halves_at(at, 0);
        words_at(at, 2, g->w);
        words_at(at, 18, g->w + 4);
        UNROLL(8)
        for (int i = 0; i < 8; i++) g->w[i] = from_signed(g->w[i]);
        break;
    case IQ4_NL:
        g->scale[0] = halves_at(at, 0);
        codes_tile(NONLINEAR, SIGNED_OFFSET, at, 2, g->w);
        break;
    case Q16_0:
        g->scale[0] = powers_at(at);
        UNROLL(16)
        for (int i = 0; i < 16; i++) g->wide[i] = (shorts)ints_at(at, 1 + 4 * i);
        break;
    case MXFP4:
        g->scale[0] = powers_at(at);
        codes_tile(E2M1, code_offset(MXFP4), at, 1, g->w);
        break;
    default: /* MXFP4_PAIRS */
        g->scale[0] = powers_at(at);
        pairs_tile(at, 1, g->w);
    }
}

/* Scales and bases of the eight groups of a block of Q4_K or Q5_K. */
INLINE void k_scales_tile(const block_place *at, floats *scale, floats *base) {
    bytes q[4], s[2], m[2];
    words_at(at, 0, q);
    const floats d = f_halves((ints)q[0] & 0xffff), least = -f_halves(((ints)q[0] >> 16) & 0xffff);
    s[0] = q[1] & 0x3f;
    s[1] = (q[3] & 0x0f) | (right(q[1], 2) & 0x30);
    m[0] = q[2] & 0x3f;
    m[1] = (right(q[3], 4) & 0x0f) | (right(q[2], 2) & 0x30);
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        scale[i] = d * f_from(byte_of(s[i / 4], i % 4));
        base[i] = least * f_from(byte_of(m[i / 4], i % 4));
    }
}

/* Sixteen scales and bases. */
INLINE void q2_k_scales_tile(const block_place *at, floats *scale, floats *base) {
    bytes q[4];
    words_at(at, 0, q);
    const ints both = ints_at(at, 80);
    const floats d = f_halves(both & 0xffff), least = -f_halves((both >> 16) & 0xffff);
    UNROLL(16)
    for (int i = 0; i < 16; i++) {
        const ints each = byte_of(q[i / 4], i % 4);
        scale[i] = d * f_from(each & 15);
        base[i] = least * f_from(each >> 4);
    }
}

INLINE void q3_k_scales_tile(const block_place *at, floats *scale) {
    const bytes a = (bytes)ints_at(at, 96), b = (bytes)ints_at(at, 100);
    const bytes c = (bytes)ints_at(at, 104);
    const floats d = halves_at(at, 108);
    const bytes s[4] = {
        (a & 15) | (left(c, 4) & 0x30), (b & 15) | (left(c, 2) & 0x30),
        (right(a, 4) & 15) | (c & 0x30), (right(b, 4) & 15) | (right(c, 2) & 0x30),
    };
    UNROLL(16)
    for (int i = 0; i < 16; i++) scale[i] = d * f_from(byte_of(s[i / 4], i % 4) - 32);
}

INLINE void q6_k_scales_tile(const block_place *at, floats *scale) {
    bytes q[4];
    words_at(at, 192, q);
    const floats d = halves_at(at, 208);
    UNROLL(16)
    for (int i = 0; i < 16; i++) scale[i] = d * f_from(signed_byte_of(q[i / 4], i % 4));
}

INLINE void iq4_xs_scales_tile(const block_place *at, floats *scale) {
    const ints first = ints_at(at, 0);
    const bytes low = (bytes)ints_at(at, 4);
    const ints high = (first >> 16) & 0xffff;
    const floats d = f_halves(first & 0xffff);
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        const ints four = (byte_of(low, i / 2) >> 4 * (i % 2)) & 15;
        scale[i] = d * f_from((four | ((high >> 2 * i & 3) << 4)) - 32);
    }
}

/* Groups of a tile that are unpacked together: 256 elements at a time, or each by itself. Q4_0 gains nothing in
 * tiles, and nothing with AVX2, which has too few registers. */
INLINE int block_groups(const int type) {
    return block_vectors(type) == 16 || (type == Q4_0 && LANES == 16 && !TILED) ? 8 : 1;
}

/* What is kept of 256 elements of each of LANES rows while their groups are unpacked. */
typedef struct { floats scale[16], base[16]; bytes q[8], bits[8]; } block;

INLINE void begin_block(const int type, const block_place *at, block *b) {
    switch (type) {
    case Q4_0: words_at(at, 0, b->q); break;
    case Q4_K: k_scales_tile(at, b->scale, b->base); break;
    case Q5_K: k_scales_tile(at, b->scale, b->base); break;
    case Q2_K: q2_k_scales_tile(at, b->scale, b->base); break;
    case Q3_K: q3_k_scales_tile(at, b->scale); break;
    case Q6_K: q6_k_scales_tile(at, b->scale); break;
    default: iq4_xs_scales_tile(at, b->scale);
    }
}

/* 32 bytes that several groups need, of which this one is the `first` or not. Rows are transposed once, for all
 * of them; tiles are read again, because a store of a vector takes twice as long as a load on some processors. */
INLINE void shared_words(const block_place *at, const int offset, const int first, bytes *out) {
    if (!TILED && !first) return;
    words_at(at, offset, out);
    words_at(at, offset + 16, out + 4);
}

/* The group that is unpacked as the k-th: Q6_K stores groups 0 and 2 of a half in the same bytes. */
INLINE int nth_group(const int type, const int k) {
    return type == Q6_K ? k / 4 * 4 + k % 4 / 2 + k % 2 * 2 : k;
}

/* The k-th of eight groups of 18 bytes: b->q has the words 16 bytes at a time, in turn in its halves. */
INLINE void q4_0_group(const block_place *at, const int k, block *b, group *g) {
    const int first = k / 2 * 9 + k % 2 * 4; /* the word with the scale, in its lower or upper half */
    const ints start = (ints)b->q[first % 8];
    words_at(at, 16 * (k + 1), b->q + (k + 1) % 2 * 4);
    g->scale[0] = f_halves(k % 2 ? (start >> 16) & 0xffff : start & 0xffff);
    UNROLL(4)
    for (int n = 0; n < 4; n++) {
        const bytes word = n || k % 2 ? b->q[(first + n) % 8] : (bytes)start, next = b->q[(first + n + 1) % 8];
        const bytes q = k % 2 ? next : join_halves(word, next);
        g->w[n] = q & 15;
        g->w[4 + n] = right(q, 4) & 15;
    }
}

INLINE void block_group(const int type, const block_place *at, const int k, block *b, group *g) {
    const int i = nth_group(type, k), quarter = i % 4;
    bytes own_q[8], own_bits[8];
    bytes *const q = TILED ? own_q : b->q, *const bits = TILED ? own_bits : b->bits;
    switch (type) {
    case Q4_0: q4_0_group(at, k, b, g); return;
    case Q4_K: case Q5_K:
        shared_words(at, (type == Q4_K ? 16 : 48) + 32 * (i / 2), i % 2 == 0, q);
        if (type == Q5_K) shared_words(at, 16, k == 0, bits);
        UNROLL(8)
        for (int n = 0; n < 8; n++) {
            g->w[n] = (i % 2 ? right(q[n], 4) : q[n]) & 15;
            if (type == Q5_K) g->w[n] |= (i < 4 ? left(bits[n], 4 - i) : right(bits[n], i - 4)) & 16;
        }
        break;
    case Q2_K: case Q3_K:
        shared_words(at, (type == Q2_K ? 16 : 32) + 32 * (i / 4), quarter == 0, q);
        if (type == Q3_K) shared_words(at, 0, k == 0, bits);
        UNROLL(8)
        for (int n = 0; n < 8; n++) {
            g->w[n] = right(q[n], 2 * quarter) & 3;
            if (type == Q3_K) g->w[n] |= (i < 2 ? left(bits[n], 2 - i) : right(bits[n], i - 2)) & 4;
        }
        break;
    case Q6_K:
        shared_words(at, 128 + 32 * (i / 4), k % 4 == 0, bits);
        shared_words(at, 64 * (i / 4) + 32 * (i % 2), k % 2 == 0, q);
        UNROLL(8)
        for (int n = 0; n < 8; n++) {
            const bytes upper = quarter < 2 ? left(bits[n], 4 - 2 * quarter)
                                            : right(bits[n], 2 * quarter - 4);
            g->w[n] = ((quarter < 2 ? q[n] : right(q[n], 4)) & 15) | (upper & 48);
        }
        break;
    default: codes_tile(NONLINEAR, SIGNED_OFFSET, at, 8 + 16 * i, g->w);
    }
    UNROLL(2)
    for (int h = 0; h < group_scales(type); h++) {
        g->scale[h] = b->scale[group_scales(type) * i + h];
        if (has_base(type)) g->base[h] = b->base[group_scales(type) * i + h];
    }
}

#endif /* LANES */
#endif
