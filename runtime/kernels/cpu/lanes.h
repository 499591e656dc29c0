/* Integer products of bytes, for several outputs at a time: AVX-512 VNNI, AVX2 (with or without VNNI), or Arm's
 * dot products. Without any of these, LANES is not defined: float products are faster.
 *
 * Lane l of a vector belongs to output l of a tile; its four bytes are four consecutive codes of that
 * output. Integer sums are exact, so all variants compute the same bits. */
#ifndef CARAVAN_LANES_H
#define CARAVAN_LANES_H

#include "simd.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#define TILES 2 /* so many share the loads of activations */
#define BYTE_TILES 2 /* as many, where these are bytes */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#define TILES 2
#define BYTE_TILES 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define LANES 4
#define TILES 1
#define BYTE_TILES 1
#endif

#ifdef LANES

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));

INLINE int32_t int_at(const void *p) { int32_t i; memcpy(&i, p, 4); return i; }
INLINE float float_at(const void *p) { float f; memcpy(&f, p, 4); return f; }
INLINE bytes right(bytes b, const int n) { return (bytes)((words)b >> n); }
INLINE bytes left(bytes b, const int n) { return (bytes)((words)b << n); }
INLINE ints i_all(int32_t i) { return (ints){0} + i; }
INLINE floats f_all(float f) { return (floats)i_all(int_at(&f)); } /* gcc inserts floats one by one */
INLINE floats f_from(ints i) { return __builtin_convertvector(i, floats); }
INLINE floats f_load(const float *p) { floats f; memcpy(&f, p, sizeof f); return f; }
INLINE void f_store(float *p, floats f) { memcpy(p, &f, sizeof f); }

#if LANES > 4
INLINE __m128i four_ints(const uint8_t *p, ptrdiff_t stride) {
    __m128i four = _mm_cvtsi32_si128(int_at(p));
    four = _mm_insert_epi32(four, int_at(p + stride), 1);
    four = _mm_insert_epi32(four, int_at(p + 2 * stride), 2);
    return _mm_insert_epi32(four, int_at(p + 3 * stride), 3);
}
#endif

#if LANES == 16

/* Codes are unsigned; signed ones are moved by 128. */
#define SIGNED_OFFSET 128
INLINE bytes from_signed(bytes b) { return b ^ 0x80; }

INLINE floats f_fma(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* To the nearest integer, half to even; within 32 bits. */
INLINE ints i_round(floats f) { return (ints)_mm512_cvtps_epi32((__m512)f); }
INLINE ints i_max(ints a, ints b) { return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
/* The largest lane, and the sum of the lanes. */
INLINE int32_t i_top(ints i) { return _mm512_reduce_max_epi32((__m512i)i); }
INLINE int32_t i_sum(ints i) { return _mm512_reduce_add_epi32((__m512i)i); }

/* Adds the sums over i < n of w[t][i] times the four bytes at x + 4 i to sum[t], lane by lane. */
INLINE void dots(const int largest, const int tiles, const bytes *const *w, const int8_t *x, const int n, ints *sum) {
    (void)largest;
    const int chains = n > 4 ? 2 : 1; /* half as many products wait for each other, for another addition */
    __m512i all[TILES][2];
    UNROLL(2)
    for (int t = 0; t < tiles; t++) all[t][0] = (__m512i)sum[t], all[t][1] = _mm512_setzero_si512();
    UNROLL(8)
    for (int i = 0; i < n; i++) {
        const __m512i at = _mm512_set1_epi32(int_at(x + 4 * i));
        const int c = i % chains;
        UNROLL(2)
        for (int t = 0; t < tiles; t++) all[t][c] = _mm512_dpbusd_epi32(all[t][c], (__m512i)w[t][i], at);
    }
    UNROLL(2)
    for (int t = 0; t < tiles; t++)
        sum[t] = (ints)(chains == 2 ? _mm512_add_epi32(all[t][0], all[t][1]) : all[t][0]);
}

/* Four bytes at p of each of rows `stride` apart; by quarters, because insertions wait for each other. */
INLINE ints ints_of_rows(const uint8_t *p, ptrdiff_t stride) {
    const __m128i a = four_ints(p, stride), b = four_ints(p + 4 * stride, stride);
    const __m128i c = four_ints(p + 8 * stride, stride), d = four_ints(p + 12 * stride, stride);
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
    return (ints)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Sixteen bytes of each of LANES rows: out[i] has bytes 4 i .. 4 i + 3 of row l in lane l. */
INLINE void transpose(const uint8_t *p, ptrdiff_t stride, bytes *out) {
    __m512i a[4];
    UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const uint8_t *q = p + i * stride;
        a[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)q));
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const void *)(q + 4 * stride)), 1);
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const void *)(q + 8 * stride)), 2);
        a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128((const void *)(q + 12 * stride)), 3);
    }
    const __m512i b0 = _mm512_unpacklo_epi32(a[0], a[1]), b1 = _mm512_unpackhi_epi32(a[0], a[1]);
    const __m512i c0 = _mm512_unpacklo_epi32(a[2], a[3]), c1 = _mm512_unpackhi_epi32(a[2], a[3]);
    out[0] = (bytes)_mm512_unpacklo_epi64(b0, c0);
    out[1] = (bytes)_mm512_unpackhi_epi64(b0, c0);
    out[2] = (bytes)_mm512_unpacklo_epi64(b1, c1);
    out[3] = (bytes)_mm512_unpackhi_epi64(b1, c1);
}

/* The numbers in the lower halves of the lanes, as float16. */
INLINE floats f_halves(ints i) {
    return (floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)i));
}

/* table[b % 16] for each byte below 16. */
INLINE bytes look_up(const uint8_t *table, bytes b) {
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    return (bytes)_mm512_shuffle_epi8(all, (__m512i)b);
}

#define IN_REGISTER(v) __asm__("" : "+v"(v))
#define WIDE_ROWS 4 /* of numbers of 16 bits that share the loads of weights */

/* Integers as numbers of 16 bits. */
INLINE void store_shorts(uint8_t *p, ints i) {
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16((__m512i)i));
}

/* Adds the sum of the two products in each lane. */
INLINE void add_wide_dot(shorts v, ints pair, ints *sum) {
    *sum = (ints)_mm512_dpwssd_epi32((__m512i)*sum, (__m512i)v, (__m512i)pair);
}

/* The byte `which` of each lane, in all four bytes of the lane. */
INLINE bytes spread(bytes b, const int which) {
    const __m512i at = _mm512_set1_epi32(which * 0x01010101);
    const __m512i base = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    return (bytes)_mm512_shuffle_epi8((__m512i)b, _mm512_or_si512(at, base));
}

#elif LANES == 8

/* Codes above 127 would exceed 16 bits in pairs; so signed codes stay signed. */
#if defined(__AVXVNNI__)
#define SIGNED_OFFSET 128
INLINE bytes from_signed(bytes b) { return b ^ 0x80; }
#else
#define SIGNED_OFFSET 0
INLINE bytes from_signed(bytes b) { return b; }
#define PAIRED_CODES 63 /* with larger ones, sums of two products of bytes exceed 16 bits */
#endif
/* Without this, gcc loads codes again for each row, and adds integers in an order that needs more registers. */
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#define WIDE_ROWS 4 /* of 16 bits that share the loads of codes, as two tiles share theirs */

/* Eight integers as numbers of 16 bits. */
INLINE void store_shorts(uint8_t *p, ints i) {
    typedef int16_t few_shorts __attribute__((vector_size(16)));
    const few_shorts s = __builtin_convertvector(i, few_shorts);
    memcpy(p, &s, sizeof s);
}

/* Adds the sum of the two products in each lane. */
INLINE void add_wide_dot(shorts v, ints pair, ints *sum) {
#if defined(__AVXVNNI__)
    *sum = (ints)_mm256_dpwssd_avx_epi32((__m256i)*sum, (__m256i)v, (__m256i)pair);
#else
    *sum += (ints)_mm256_madd_epi16((__m256i)v, (__m256i)pair);
    IN_REGISTER(*sum);
#endif
}

#ifdef PAIRED_CODES
/* Codes of a group in numbers of 16 bits: of each four bytes 0 and 2, then 1 and 3. */
INLINE void widen(const int has_signs, const bytes *w, shorts *v) {
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        v[2 * i] = has_signs ? (shorts)w[i] << 8 >> 8 : (shorts)w[i] & 255;
        v[2 * i + 1] = has_signs ? (shorts)w[i] >> 8 : (shorts)((words)w[i] >> 8);
    }
}

/* Integers in that order. */
INLINE ints widened_order(ints i) { return (ints)_mm256_shuffle_epi32((__m256i)i, 0xd8); }
#endif

INLINE floats f_fma(floats a, floats b, floats c) {
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE ints i_round(floats f) { return (ints)_mm256_cvtps_epi32((__m256)f); }
INLINE ints i_max(ints a, ints b) { return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE int32_t i_top(ints i) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)i), _mm256_extracti128_si256((__m256i)i, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE int32_t i_sum(ints i) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)i), _mm256_extracti128_si256((__m256i)i, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

INLINE void dots(const int largest, const int tiles, const bytes *const *w, const int8_t *x, const int n, ints *to) {
    __m256i sum = (__m256i)to[0];
    (void)tiles;
#if defined(__AVXVNNI__)
    (void)largest;
    UNROLL(8)
    for (int i = 0; i < n; i++)
        sum = _mm256_dpbusd_avx_epi32(sum, (__m256i)w[0][i], _mm256_set1_epi32(int_at(x + 4 * i)));
#else
    const __m256i ones = _mm256_set1_epi16(1);
    /* So many sums of pairs, each at most 2 * 127 * largest, fit into 16 bits. */
    const int at_once = largest <= 15 ? 8 : largest <= 31 ? 4 : largest <= 63 ? 2 : 1;
    UNROLL(8)
    for (int i = 0; i < n; i += at_once) {
        __m256i pairs;
        UNROLL(8)
        for (int k = 0; k < at_once; k++) {
            if (i + k >= n) continue;
            const __m256i at = _mm256_set1_epi32(int_at(x + 4 * (i + k))), v = (__m256i)w[0][i + k];
            const __m256i more = largest > 127
                ? _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(at, v))
                : _mm256_maddubs_epi16(v, at);
            pairs = k ? _mm256_add_epi16(pairs, more) : more;
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
#endif
    to[0] = (ints)sum;
}

INLINE ints ints_of_rows(const uint8_t *p, ptrdiff_t stride) {
    const __m128i low = four_ints(p, stride), high = four_ints(p + 4 * stride, stride);
    return (ints)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE void transpose(const uint8_t *p, ptrdiff_t stride, bytes *out) {
    __m256i a[4];
    UNROLL(4)
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const void *)(p + i * stride))),
            _mm_loadu_si128((const void *)(p + (4 + i) * stride)), 1);
    const __m256i b0 = _mm256_unpacklo_epi32(a[0], a[1]), b1 = _mm256_unpackhi_epi32(a[0], a[1]);
    const __m256i c0 = _mm256_unpacklo_epi32(a[2], a[3]), c1 = _mm256_unpackhi_epi32(a[2], a[3]);
    out[0] = (bytes)_mm256_unpacklo_epi64(b0, c0);
    out[1] = (bytes)_mm256_unpackhi_epi64(b0, c0);
    out[2] = (bytes)_mm256_unpacklo_epi64(b1, c1);
    out[3] = (bytes)_mm256_unpackhi_epi64(b1, c1);
}

INLINE floats f_halves(ints i) {
    const __m256i low = _mm256_and_si256((__m256i)i, _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

INLINE bytes look_up(const uint8_t *table, bytes b) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    return (bytes)_mm256_shuffle_epi8(all, (__m256i)b);
}

INLINE bytes spread(bytes b, const int which) {
    const __m256i at = _mm256_set1_epi32(which * 0x01010101);
    const __m256i base =
        _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    return (bytes)_mm256_shuffle_epi8((__m256i)b, _mm256_or_si256(at, base));
}

#else /* LANES == 4 */

/* Unsigned codes are at most 63 here, so that all codes are signed bytes. */
#define SIGNED_OFFSET 0
INLINE bytes from_signed(bytes b) { return b; }

INLINE floats f_fma(floats a, floats b, floats c) {
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE ints i_round(floats f) { return (ints)vcvtnq_s32_f32((float32x4_t)f); }
INLINE ints i_max(ints a, ints b) { return (ints)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
INLINE int32_t i_top(ints i) { return vmaxvq_s32((int32x4_t)i); }
INLINE int32_t i_sum(ints i) { return vaddvq_s32((int32x4_t)i); }

INLINE void dots(const int largest, const int tiles, const bytes *const *w, const int8_t *x, const int n, ints *sum) {
    (void)largest, (void)tiles;
    UNROLL(8)
    for (int i = 0; i < n; i++)
        sum[0] = (ints)vdotq_s32((int32x4_t)sum[0], (int8x16_t)w[0][i], (int8x16_t)vdupq_n_s32(int_at(x + 4 * i)));
}

INLINE ints ints_of_rows(const uint8_t *p, ptrdiff_t stride) {
    return (ints){int_at(p), int_at(p + stride), int_at(p + 2 * stride), int_at(p + 3 * stride)};
}

INLINE void transpose(const uint8_t *p, ptrdiff_t stride, bytes *out) {
    uint32x4_t a[4];
    UNROLL(4)
    for (int i = 0; i < 4; i++) a[i] = (uint32x4_t)vld1q_u8(p + i * stride);
    const uint64x2_t b0 = (uint64x2_t)vtrn1q_u32(a[0], a[1]), b1 = (uint64x2_t)vtrn2q_u32(a[0], a[1]);
    const uint64x2_t c0 = (uint64x2_t)vtrn1q_u32(a[2], a[3]), c1 = (uint64x2_t)vtrn2q_u32(a[2], a[3]);
    out[0] = (bytes)vtrn1q_u64(b0, c0);
    out[1] = (bytes)vtrn1q_u64(b1, c1);
    out[2] = (bytes)vtrn2q_u64(b0, c0);
    out[3] = (bytes)vtrn2q_u64(b1, c1);
}

INLINE floats f_halves(ints i) {
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)i)));
}

INLINE bytes look_up(const uint8_t *table, bytes b) {
    return (bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)b);
}

INLINE bytes spread(bytes b, const int which) {
    const bytes at = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    return (bytes)vqtbl1q_u8((uint8x16_t)b, (uint8x16_t)(at + (uint8_t)which));
}

#endif

/* The lowest byte of each lane. */
INLINE void i_store_bytes(uint8_t *p, ints i) {
    typedef int8_t few_bytes __attribute__((vector_size(LANES)));
    const few_bytes b = __builtin_convertvector(i, few_bytes);
    memcpy(p, &b, sizeof b);
}

/* The upper half of each lane of a, then the lower half of that of b. */
INLINE bytes join_halves(bytes a, bytes b) { return (bytes)(((ints)a >> 16 & 0xffff) | (ints)b << 16); }

/* Two bytes at p of each of rows `stride` apart. */
INLINE ints shorts_of_rows(const uint8_t *p, ptrdiff_t stride) {
    ints i;
    UNROLL(16)
    for (int l = 0; l < LANES; l++) {
        uint16_t h;
        memcpy(&h, p + l * stride, 2);
        i[l] = h;
    }
    return i;
}

/* Unsigned and signed byte `which` of each lane. */
INLINE ints byte_of(bytes b, const int which) { return ((ints)b >> 8 * which) & 255; }
INLINE ints signed_byte_of(bytes b, const int which) { return (ints)b << (24 - 8 * which) >> 24; }

/* 255 in each byte of which bit 0..3 of the lower or upper nibble of byte `nibble / 2` is set: bit k for byte k. */
INLINE bytes bits_of(bytes b, const int nibble) {
    const bytes mask = (bytes)i_all(nibble % 2 ? (int32_t)0x80402010 : 0x08040201);
    return (bytes)((spread(b, nibble / 2) & mask) == mask);
}

#endif /* LANES */
#endif
