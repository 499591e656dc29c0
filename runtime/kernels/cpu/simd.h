/* Sixteen floats at a time: AVX-512, AVX2, NEON (neon.h) or plain C, with the same order of operations.
 *
 * Lane l of every accumulator adds the elements k with k % 16 == l, and v_sum adds the lanes in one
 * fixed tree; so a dot product does not depend on the loop that computes it. */
#ifndef CARAVAN_SIMD_H
#define CARAVAN_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE int least(int a, int b) { return a < b ? a : b; }
#define EXPORT __attribute__((visibility("default")))

/* To be placed before a loop with constant bounds whose values must stay in registers. */
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(n) PRAGMA(GCC unroll n)

/* Whether lines that are used once are loaded into the second cache: on AMD's processors, up to half as fast again as into
 * the first one, or past both; those of Intel would then read memory at a quarter of their speed. */
extern int caravan_loads_into_second_cache;

/* Whether plain weights are expanded in registers for each panel of rows (plain_rows.h) instead of once for all of them:
 * where to store a vector of 512 bits takes as long as two products. */
extern int caravan_expands_in_registers;

/* Begins to load the line at p, which is used once. */
INLINE void prefetch_once(const void *p) {
    if (caravan_loads_into_second_cache) __builtin_prefetch(p, 0, 2);
    else __builtin_prefetch(p, 0, 3);
}

typedef uint8_t b16 __attribute__((vector_size(16)));

typedef uint8_t b32 __attribute__((vector_size(32)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint64_t l2 __attribute__((vector_size(16)));

INLINE b16 b_load(const void *p) { b16 v; memcpy(&v, p, 16); return v; }
INLINE b16 b_pair(uint64_t first, uint64_t second) { return (b16)(l2){first, second}; }
INLINE b32 b_load32(const void *p) { b32 v; memcpy(&v, p, 32); return v; }
/* Shifts pairs of bytes; the caller masks the bits from the neighbouring byte. */
INLINE b32 b_left(b32 b, const int n) { return (b32)((h16)b << n); }
INLINE b32 b_right(b32 b, const int n) { return (b32)((h16)b >> n); }
INLINE b16 b_first(b32 b) {
#if defined(__AVX2__)
    return (b16)_mm256_castsi256_si128((__m256i)b);
#else
    b16 half;
    memcpy(&half, &b, 16);
    return half;
#endif
}
INLINE b16 b_second(b32 b) {
#if defined(__AVX2__)
    return (b16)_mm256_extracti128_si256((__m256i)b, 1);
#else
    b16 half;
    memcpy(&half, (const char *)&b + 16, 16);
    return half;
#endif
}

INLINE float half_to_float_portable(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    float f;
    if (magnitude >= 0x7c00) {
        bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x0400) {
        bits = sign | ((magnitude << 13) + 0x38000000);
    } else {
        f = (float)magnitude * 5.9604644775390625e-8f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float half_at(const void *p) {
#if defined(__aarch64__)
    __fp16 h;
    memcpy(&h, p, 2);
    return (float)h;
#else
    uint16_t h;
    memcpy(&h, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return half_to_float_portable(h);
#endif
#endif
}

/* The nearest half, ties to even; larger numbers become infinite. */
INLINE uint16_t half_of(float f) {
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#elif defined(__aarch64__)
    const __fp16 nearest = (__fp16)f;
    uint16_t h;
    memcpy(&h, &nearest, 2);
    return h;
#else
    uint32_t bits, sign;
    memcpy(&bits, &f, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#define SUMS_AT_ONCE 24 /* of 16 lanes kept in registers */
#define ROWS_TILE 4
#define OUTS_TILE 6
typedef __m512 v16;

INLINE v16 v_zero(void) { return _mm512_setzero_ps(); }
INLINE v16 v_all(float f) { return _mm512_set1_ps(f); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
/* Of a where x is above 0, else of b. */
INLINE v16 v_by_sign(v16 x, v16 a, v16 b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), b, a);
}
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_u8(b16 b) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)b)); }
INLINE v16 v_i8(b16 b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b)); }
INLINE v16 v_half(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE v16 v_bfloat(const void *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* Of 32 bfloat16. */
INLINE v16 v_even_bfloats(v16 a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16)); }
INLINE v16 v_odd_bfloats(v16 a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE float v_sum(v16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
/* a * 2^n for integral n */
INLINE v16 v_scale2(v16 a, v16 n) { return _mm512_scalef_ps(a, n); }
INLINE v16 v_round(v16 a) { return _mm512_roundscale_ps(a, 0); }

/* The half at p in every lane. */
INLINE v16 v_all_half(const void *p) {
    int16_t h;
    memcpy(&h, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16(h));
}

/* Nibbles n mean scale * n + base: a lookup in a table of sixteen. */
typedef v16 nibbles;
INLINE nibbles nibbles_of(float scale, float base) {
    const v16 ramp = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return v_fma(ramp, v_all(scale), v_all(base));
}
/* Nibbles n mean (n - 8) * the half at p. */
INLINE nibbles signed_nibbles_of(const void *p) {
    const v16 ramp = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return v_mul(ramp, v_all_half(p));
}
INLINE v16 nibbles_low(nibbles t, b16 b) {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32((__m128i)b), t);
}
INLINE v16 nibbles_high(nibbles t, b16 b) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32((__m128i)b), 4), t);
}

/* Numbers n below 32 mean scale * n + base. */
typedef struct { v16 low, high; } fives;
INLINE fives fives_of(float scale, float base) {
    const v16 ramp = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    return (fives){nibbles_of(scale, base), v_fma(ramp, v_all(scale), v_all(base))};
}
INLINE v16 fives_at(fives t, b16 b) {
    return _mm512_permutex2var_ps(t.low, _mm512_cvtepu8_epi32((__m128i)b), t.high);
}

/* Numbers n below 16 mean scale * codes[n]. */
typedef v16 table;
INLINE table table_of(const int8_t *codes, float scale) {
    return v_mul(v_i8(b_load(codes)), v_all(scale));
}
INLINE v16 table_at(table t, b16 b) {
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32((__m128i)b), t);
}

/* 255 in byte i where that bit is set, else 0. */
INLINE b32 b_from_bits(uint32_t bits) { return (b32)_mm256_movm_epi8(bits); }

#else /* eight or fewer lanes in hardware */

#define SUMS_AT_ONCE 6

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define ROWS_TILE 4
#define OUTS_TILE 3

typedef struct { __m256 lo, hi; } v16;
#define V_MAP2(name, op) INLINE v16 name(v16 a, v16 b) { return (v16){op(a.lo, b.lo), op(a.hi, b.hi)}; }
V_MAP2(v_add, _mm256_add_ps)
V_MAP2(v_mul, _mm256_mul_ps)
V_MAP2(v_div, _mm256_div_ps)
V_MAP2(v_max, _mm256_max_ps)
INLINE __m256 half_by_sign(__m256 x, __m256 a, __m256 b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ));
}
INLINE v16 v_by_sign(v16 x, v16 a, v16 b) {
    return (v16){half_by_sign(x.lo, a.lo, b.lo), half_by_sign(x.hi, a.hi, b.hi)};
}
INLINE v16 v_all(float f) { return (v16){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
INLINE v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, v16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
INLINE v16 v_u8(b16 b) {
    __m128i i = (__m128i)b;
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(i)),
                 _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(i, 8)))};
}
INLINE v16 v_i8(b16 b) {
    __m128i i = (__m128i)b;
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(i, 8)))};
}
INLINE v16 v_half(const void *p) {
    const __m128i *h = (const __m128i *)p;
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
INLINE __m256 bfloats(const __m128i *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE v16 v_bfloat(const void *p) {
    return (v16){bfloats((const __m128i *)p), bfloats((const __m128i *)p + 1)};
}
INLINE __m256 even_bfloats(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
INLINE v16 v_even_bfloats(v16 a) { return (v16){even_bfloats(a.lo), even_bfloats(a.hi)}; }
INLINE v16 v_odd_bfloats(v16 a) {
    const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000));
    return (v16){_mm256_and_ps(a.lo, odd), _mm256_and_ps(a.hi, odd)};
}
INLINE float v_sum(v16 a) {
    __m256 b = _mm256_add_ps(a.lo, a.hi);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
INLINE __m256 scale2_half(__m256 a, __m256 n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
INLINE v16 v_scale2(v16 a, v16 n) { return (v16){scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }
INLINE v16 v_round(v16 a) { return (v16){_mm256_round_ps(a.lo, 0), _mm256_round_ps(a.hi, 0)}; }
INLINE b16 b_pick(b16 from, b16 at) { return (b16)_mm_shuffle_epi8((__m128i)from, (__m128i)at); }
INLINE b32 b_spread(uint32_t fours) {
    const __m256i each = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    return (b32)_mm256_shuffle_epi8(_mm256_set1_epi32((int)fours), each);
}

#elif defined(__aarch64__)

#include "neon.h"

#else /* plain C, with vectors that the compiler splits */

#define ROWS_TILE 2
#define OUTS_TILE 3
#undef UNROLL
#define UNROLL(n)
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int8_t c16 __attribute__((vector_size(16)));
#define EACH for (int i = 0; i < 16; i++)
INLINE v16 v_all(float f) { return (v16){0} + f; }
INLINE v16 v_load(const float *p) { v16 r; memcpy(&r, p, 64); return r; }
INLINE void v_store(float *p, v16 a) { memcpy(p, &a, 64); }
INLINE v16 v_add(v16 a, v16 b) { return a + b; }
INLINE v16 v_mul(v16 a, v16 b) { return a * b; }
INLINE v16 v_div(v16 a, v16 b) { return a / b; }
INLINE v16 v_chosen(i16 first, v16 a, v16 b) { return (v16)((first & (i16)a) | (~first & (i16)b)); }
INLINE v16 v_max(v16 a, v16 b) { return v_chosen((i16)(a > b), a, b); }
INLINE v16 v_by_sign(v16 x, v16 a, v16 b) { return v_chosen((i16)(x > (v16){0}), a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return c + a * b; }
INLINE v16 v_u8(b16 b) { return __builtin_convertvector(__builtin_convertvector(b, i16), v16); }
INLINE v16 v_i8(b16 b) { return __builtin_convertvector(__builtin_convertvector((c16)b, i16), v16); }
INLINE v16 v_half(const void *p) {
    float f[16];
    EACH f[i] = half_at((const char *)p + 2 * i);
    return v_load(f);
}
INLINE v16 v_bfloat(const void *p) {
    uint16_t halves[16];
    i16 words;
    memcpy(halves, p, 32);
    EACH words[i] = (int32_t)((uint32_t)halves[i] << 16);
    return (v16)words;
}
INLINE v16 v_even_bfloats(v16 a) { return (v16)((i16)a << 16); }
INLINE v16 v_odd_bfloats(v16 a) { return (v16)((i16)a & (int32_t)0xffff0000); }
INLINE float v_sum(v16 a) {
    float f[16];
    v_store(f, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) f[i] += f[i + width];
    return f[0];
}
INLINE v16 v_scale2(v16 a, v16 n) {
    return a * (v16)((__builtin_convertvector(n, i16) + 127) << 23);
}
INLINE v16 v_round(v16 a) {
    EACH a[i] = rintf(a[i]);
    return a;
}
INLINE b16 b_pick(b16 from, b16 at) {
    b16 r;
    EACH r[i] = from[at[i]];
    return r;
}
INLINE b32 b_spread(uint32_t fours) {
    b32 r;
    for (int i = 0; i < 32; i++) r[i] = (uint8_t)(fours >> i / 8 * 8);
    return r;
}
#undef EACH

#endif

INLINE v16 v_zero(void) { return v_all(0.0f); }
INLINE v16 v_all_half(const void *p) { return v_all(half_at(p)); }

typedef struct { v16 scale, base; } nibbles;
INLINE nibbles nibbles_of(float scale, float base) { return (nibbles){v_all(scale), v_all(base)}; }
INLINE nibbles signed_nibbles_of(const void *p) { return nibbles_of(half_at(p), -8.0f * half_at(p)); }
INLINE v16 nibbles_low(nibbles t, b16 b) { return v_fma(v_u8(b & 15), t.scale, t.base); }
INLINE v16 nibbles_high(nibbles t, b16 b) { return v_fma(v_u8(b >> 4), t.scale, t.base); }

typedef nibbles fives;
INLINE fives fives_of(float scale, float base) { return nibbles_of(scale, base); }
INLINE v16 fives_at(fives t, b16 b) { return v_fma(v_u8(b), t.scale, t.base); }

typedef struct { b16 codes; v16 scale; } table;
INLINE table table_of(const int8_t *codes, float scale) { return (table){b_load(codes), v_all(scale)}; }
INLINE v16 table_at(table t, b16 b) { return v_mul(v_i8(b_pick(t.codes, b)), t.scale); }

/* 255 in byte i where that bit is set, else 0. */
INLINE b32 b_from_bits(uint32_t bits) {
    const uint64_t each = 0x8040201008040201;
    const uint64_t masks[4] = {each, each, each, each};
    const b32 mask = b_load32(masks);
    return (b32)((b_spread(bits) & mask) == mask);
}

#endif

/* Vector lanes that are accumulated in one register; each lane has its own sum. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define CHAIN 8
typedef __m256 chain;
INLINE chain c_zero(void) { return _mm256_setzero_ps(); }
INLINE chain c_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void c_store(float *p, chain a) { _mm256_storeu_ps(p, a); }
INLINE chain c_fma(chain a, chain b, chain c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
#define CHAIN 4
typedef float32x4_t chain;
INLINE chain c_zero(void) { return vdupq_n_f32(0.0f); }
INLINE chain c_load(const float *p) { return vld1q_f32(p); }
INLINE void c_store(float *p, chain a) { vst1q_f32(p, a); }
INLINE chain c_fma(chain a, chain b, chain c) { return vfmaq_f32(c, a, b); }
#else
#define CHAIN 16
typedef v16 chain;
INLINE chain c_zero(void) { return v_zero(); }
INLINE chain c_load(const float *p) { return v_load(p); }
INLINE void c_store(float *p, chain a) { v_store(p, a); }
INLINE chain c_fma(chain a, chain b, chain c) { return v_fma(a, b, c); }
#endif

/* Adds products of 32 bfloat16: in lane l of element 2 l + 1, then of 2 l, as two fused multiply-adds whose
 * subnormal operands and results are zero. */
#if defined(__AVX512BF16__)
#define HAS_BFLOAT_DOTS 1
INLINE v16 v_bfloat_dot(v16 a, v16 b, v16 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#else
#define HAS_BFLOAT_DOTS 0
INLINE v16 v_bfloat_dot(v16 a, v16 b, v16 sum) { return v_fma(a, b, sum); } /* not used */
#endif

#if defined(__AVX512F__)

/* Sixteen halves, the nearest ones. */
INLINE void v_store_half(void *to, v16 a) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

/* The largest lane. */
INLINE float v_top(v16 a) { return _mm512_reduce_max_ps(a); }

#elif !defined(__aarch64__)

INLINE void v_store_half(void *to, v16 a) {
    float lanes[16];
    uint16_t halves[16];
    v_store(lanes, a);
    for (int i = 0; i < 16; i++) halves[i] = half_of(lanes[i]);
    memcpy(to, halves, 32);
}

INLINE float v_top(v16 a) {
    float lanes[16], top;
    v_store(lanes, a);
    top = lanes[0];
    for (int i = 1; i < 16; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

#endif

/* e^r - 1 where x = n ln 2 + r, for |x| <= 88: Cody and Waite's reduction, Cephes' polynomial. */
INLINE v16 v_exp_reduced(v16 x, v16 *n) {
    *n = v_round(v_mul(x, v_all(1.44269504f)));
    v16 r = v_fma(*n, v_all(-0.693359375f), x), y = v_all(1.9875691500e-4f);
    r = v_fma(*n, v_all(2.12194440e-4f), r);
    y = v_fma(y, r, v_all(1.3981999507e-3f));
    y = v_fma(y, r, v_all(8.3334519073e-3f));
    y = v_fma(y, r, v_all(4.1665795894e-2f));
    y = v_fma(y, r, v_all(1.6666665459e-1f));
    y = v_fma(y, r, v_all(5.0000001201e-1f));
    return v_fma(v_mul(r, r), y, r);
}

/* e^x for x <= 88, no less than e^-87.5. */
INLINE v16 v_exp(v16 x) {
    v16 n; /* this order of operands keeps NaN */
    const v16 part = v_exp_reduced(v_max(v_all(-87.5f), x), &n);
    return v_scale2(v_add(part, v_all(1.0f)), n);
}

#endif
