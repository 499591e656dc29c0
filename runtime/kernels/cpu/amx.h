/* Sixteen rows of activations times sixteen outputs in the tile registers of AMX (Intel SDM, volume 2).
 *
 * Integers of activations and codes of weights are multiplied as bfloat16, which represents both exactly: codes have
 * at most 8 bits, and a plane of activations (high * 128, or low) has 8. The sum of a group is below 2^24, so float32
 * represents each partial sum exactly too, except for codes of 8 bits times integers of 15, whose planes are
 * summed separately. Therefore the bits are those of the other instruction sets (integers.h).
 *
 * The process needs Linux's permission to use the registers: runtime/kernels/cpu_levels.py requests it. */
#ifndef CARAVAN_AMX_H
#define CARAVAN_AMX_H

#include "tiles.h"

#if defined(__AMX_BF16__) && LANES == 16
#define HAS_AMX 1

#define AMX_ROWS 16
#define AMX_GROUPS 8      /* whose codes are unpacked at a time */
#define AMX_PLANE 64      /* bytes of a row of a group */

/* A group of up to AMX_ROWS rows, `rows`: [plane][row][32] bfloat16 in the order of pairs of amx_group, scales [row], sums [2][row] (as in integers.h).
 * Activations are packed as [rows / AMX_ROWS][group]. */
INLINE int amx_row_bytes(const int planes) { return planes * AMX_PLANE + 16; }

/* A group of 16 outputs: codes as bfloat16, [pair][output][2]. Pairs are elements 0 and 2, 1 and 3, 4 and 6 ...: so
 * the words of four codes need not be moved. */
typedef struct { bytes codes[16]; floats scale[2], base[2]; } amx_group;

typedef float amx_sums[2][AMX_ROWS][LANES]; /* of halves, or of planes */

/* Bytes of AMX_GROUPS groups of a row of weights. */
INLINE int amx_block_bytes(const int type) {
    return AMX_GROUPS * GROUP / (16 * block_vectors(type)) * block_bytes(type);
}

/* code - offset as bfloat16, by code. */
typedef struct { __m512i first, second; } amx_codes;

INLINE amx_codes amx_codes_of(const int offset) {
    const ints ramp = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512i half[2];
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const __m512 even = (__m512)f_from(ramp + (32 * i - offset)), odd = (__m512)f_from(ramp + (32 * i + 16 - offset));
        half[i] = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    }
    return (amx_codes){half[0], half[1]};
}

/* Four codes of each output to their places. */
INLINE void amx_small_codes(const int largest, const amx_codes *table, bytes w, bytes *to) {
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const __m512i at = i ? _mm512_srli_epi16((__m512i)w, 8) : (__m512i)w; /* of which the lowest bits count */
        to[i] = (bytes)(largest < 32 ? _mm512_permutexvar_epi16(at, table->first)
                                     : _mm512_permutex2var_epi16(table->first, at, table->second));
    }
}

/* The same for codes that are moved by SIGNED_OFFSET. */
INLINE void amx_large_codes(bytes w, bytes *to) {
    const bytes own = w ^ 0x80;
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        const ints first = (ints)f_from(signed_byte_of(own, i)), second = (ints)f_from(signed_byte_of(own, i + 2));
        to[i] = (bytes)((ints)_mm512_srli_epi32((__m512i)first, 16) | second);
    }
}

INLINE void amx_group_of(const int type, const amx_codes *table, const group *g, amx_group *to) {
    UNROLL(8)
    for (int i = 0; i < 8; i++) {
        if (largest_code(type) > 63) amx_large_codes(g->w[i], to->codes + 2 * i);
        else amx_small_codes(largest_code(type), table, g->w[i], to->codes + 2 * i);
    }
    UNROLL(2)
    for (int h = 0; h < group_scales(type); h++) {
        to->scale[h] = g->scale[h];
        if (has_base(type)) to->base[h] = g->base[h];
    }
}

/* Sixteen integers as bfloat16, of each four 0, 2, 1 and 3. */
INLINE void amx_store(uint8_t *p, ints i) {
    const __m512i bits = _mm512_srli_epi32((__m512i)f_from(i), 16);
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(_mm512_shuffle_epi32(bits, 0xd8)));
}

/* The operand of LDTILECFG. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Registers 0 to 3 are sums of 16 rows, 4 such rows, 5 codes; 6 and 7 are `rest` rows and their sums. */
INLINE void begin_amx(const int type, int rest) {
    const int depth = AMX_PLANE / group_scales(type);
    tile_shapes all = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        all.rows[i] = i == 5 ? depth / 4 : i > 5 && rest ? rest : AMX_ROWS;
        all.row_bytes[i] = i == 4 || i == 6 ? depth : 64;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(all));
}

INLINE void end_amx(void) { _tile_release(); }

/* Not the compiler's intrinsic: that of gcc before 13 does not say that the instruction reads memory. */
#define LOAD_TILE(tile, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(p), "r"((ptrdiff_t)(stride)) : "memory")

/* Whether the planes of a group have a sum each. */
INLINE int separate_planes(const int type, const int planes) { return planes == 2 && largest_code(type) > 63; }

/* The sums of one or two planes, `apart` bytes from each other, in register `sums`. `left`: the register of rows. */
#define SUM_PLANES(planes, sums, left, w, x, apart)  \
    do {                                             \
        _tile_zero(sums);                            \
        LOAD_TILE(5, w, 64);                         \
        LOAD_TILE(left, x, AMX_PLANE);               \
        _tile_dpbf16ps(sums, left, 5);               \
        if ((planes) == 2) {                         \
            LOAD_TILE(left, (x) + (apart), AMX_PLANE); \
            _tile_dpbf16ps(sums, left, 5);           \
        }                                            \
    } while (0)

/* With fewer rows, vectors are faster, because codes are unpacked in less time for them. */
INLINE int amx_least_rows(const int type, const int planes) {
    return planes == 1 ? 96 : separate_planes(type, planes) ? 32 : AMX_ROWS;
}

/* What is summed in the first register, and in the second if there are two sums: halves, or separate planes. */
#define SUM_FIRST(type, planes, sums, left, g, x, apart) \
    SUM_PLANES(separate_planes(type, planes) ? 1 : (planes), sums, left, (g)->codes, x, apart)
#define SUM_SECOND(type, planes, sums, left, g, x, apart)                                             \
    do {                                                                                              \
        if (separate_planes(type, planes)) SUM_PLANES(1, sums, left, (g)->codes, (x) + (apart), 0);   \
        else SUM_PLANES(planes, sums, left, (g)->codes + 8, (x) + AMX_PLANE / 2, apart);              \
    } while (0)
INLINE int has_two_sums(const int type, const int planes) {
    return separate_planes(type, planes) || group_scales(type) == 2;
}

#define BEGIN_SUMS(type, planes, first, second, g, x)                                                            \
    do {                                                                                                         \
        SUM_FIRST(type, planes, first, 4, g, x, AMX_ROWS * AMX_PLANE);                                           \
        if (has_two_sums(type, planes)) SUM_SECOND(type, planes, second, 4, g, x, AMX_ROWS * AMX_PLANE);         \
    } while (0)
#define STORE_SUMS(type, planes, first, second, to)                              \
    do {                                                                         \
        _tile_stored(first, (to)[0], 64);                                        \
        if (has_two_sums(type, planes)) _tile_stored(second, (to)[1], 64);       \
    } while (0)

/* Adds a group to `some` rows of results. `numbers`: scales, then sums, of the rows. */
INLINE void add_sums(const int type, const int planes, const amx_group *g, amx_sums sums, const uint8_t *numbers,
                     int some, floats *y) {
    const float *const scales = (const float *)numbers;
    UNROLL(16)
    for (int r = 0; r < some; r++) {
        floats sum = f_load(sums[0][r]), all;
        if (separate_planes(type, planes)) sum = sum + f_load(sums[1][r]);
        all = sum * g->scale[0];
        if (has_base(type)) all = f_fma(f_all(float_at(scales + some + r)), g->base[0], all);
        if (group_scales(type) == 2) {
            all = f_fma(f_load(sums[1][r]), g->scale[1], all);
            if (has_base(type)) all = f_fma(f_all(float_at(scales + 2 * some + r)), g->base[1], all);
        }
        y[r] = f_fma(all, f_all(float_at(scales + r)), y[r]);
    }
}

/* What is loaded while products are computed: the next codes of two tiles, some lines after each group. Many loads at
 * once would wait for the few buffers of the first cache. */
typedef struct { const uint8_t *p[2]; int lines, each; } amx_foresight;

INLINE void foresee_codes(amx_foresight *f) {
    for (int i = 0; i < f->each && f->lines > 0; i++, f->lines--)
        for (int t = 0; t < 2; t++) {
            prefetch_once(f->p[t]);
            f->p[t] += 64;
        }
}

/* `count` groups times AMX_ROWS rows, which begin at x; order[i] is the group that is added i-th. Sums of the next
 * group are begun before those of a group are added: the processor does not look far enough ahead by itself. */
INLINE void add_amx_rows(const int type, const int planes, const amx_group *g, int count, const uint8_t *x, float *y,
                         ptrdiff_t y_stride, amx_foresight *f) {
    const ptrdiff_t each = AMX_ROWS * amx_row_bytes(planes), numbers = AMX_ROWS * planes * AMX_PLANE;
    amx_sums sums[2] __attribute__((aligned(64)));
    floats to[AMX_ROWS];
    UNROLL(16)
    for (int r = 0; r < AMX_ROWS; r++) to[r] = f_load(y + r * y_stride);
    BEGIN_SUMS(type, planes, 0, 1, g, x + nth_group(type, 0) * each);
    for (int k = 0; k < count; k += 2) {
        const uint8_t *const even = x + nth_group(type, k) * each, *const odd = x + nth_group(type, k + 1) * each;
        foresee_codes(f);
        STORE_SUMS(type, planes, 0, 1, sums[0]);
        if (k + 1 < count) BEGIN_SUMS(type, planes, 2, 3, g + k + 1, odd);
        add_sums(type, planes, g + k, sums[0], even + numbers, AMX_ROWS, to);
        if (k + 1 == count) break;
        STORE_SUMS(type, planes, 2, 3, sums[1]);
        if (k + 2 < count)
            BEGIN_SUMS(type, planes, 0, 1, g + k + 2, x + nth_group(type, k + 2) * each);
        add_sums(type, planes, g + k + 1, sums[1], odd + numbers, AMX_ROWS, to);
    }
    UNROLL(16)
    for (int r = 0; r < AMX_ROWS; r++) f_store(y + r * y_stride, to[r]);
}

/* Whether add_amx_pairs computes a type: with one sum for each group. */
INLINE int has_amx_pairs(const int type, const int planes) { return !has_two_sums(type, planes); }

#define AMX_UNIT 4 /* groups of two tiles, whose sums are added while those of the next are computed */

#define BEGIN_PAIR(planes, first, second, g, other, x)       \
    do {                                                     \
        _tile_zero(first);                                   \
        _tile_zero(second);                                  \
        LOAD_TILE(4, x, AMX_PLANE);                          \
        LOAD_TILE(5, (g)->codes, 64);                        \
        _tile_dpbf16ps(first, 4, 5);                         \
        LOAD_TILE(6, (other)->codes, 64);                    \
        _tile_dpbf16ps(second, 4, 6);                        \
        if ((planes) == 2) {                                 \
            LOAD_TILE(7, (x) + AMX_ROWS * AMX_PLANE, AMX_PLANE); \
            _tile_dpbf16ps(first, 7, 5);                     \
            _tile_dpbf16ps(second, 7, 6);                    \
        }                                                    \
    } while (0)

/* As add_sums, for rows from `row` on of two adjacent tiles, whose activations are broadcast once for both. */
INLINE void add_pair_sums(const int type, const amx_group *g, const amx_group *other, float (*sums)[AMX_ROWS][LANES],
                          const uint8_t *numbers, const int row, floats (*y)[AMX_ROWS / 2]) {
    const float *const scales = (const float *)numbers + row;
    UNROLL(8)
    for (int r = 0; r < AMX_ROWS / 2; r++) {
        const floats scale = f_all(scales[r]), sum = has_base(type) ? f_all(scales[AMX_ROWS + r]) : scale;
        UNROLL(2)
        for (int t = 0; t < 2; t++) {
            const amx_group *const of = t ? other : g;
            floats all = f_load(sums[t][row + r]) * of->scale[0];
            if (has_base(type)) all = f_fma(sum, of->base[0], all);
            y[t][r] = f_fma(all, scale, y[t][r]);
        }
    }
}

/* AMX_GROUPS groups of two adjacent tiles times `full` tiles of rows, `x_stride` bytes from each other, each of which
 * is loaded once for both. Registers 0 to 3 are sums, 4 and 7 rows, 5 and 6 codes. */
INLINE void add_amx_pairs(const int type, const int planes, amx_group (*g)[AMX_GROUPS], const uint8_t *x,
                          ptrdiff_t x_stride, int full, float *y, amx_foresight *f) {
    const ptrdiff_t each = AMX_ROWS * amx_row_bytes(planes), numbers = AMX_ROWS * planes * AMX_PLANE;
    const int units = full * (AMX_GROUPS / AMX_UNIT), width = 2 * LANES;
    float sums[2][AMX_UNIT][2][AMX_ROWS][LANES] __attribute__((aligned(64)));
    const uint8_t *before = x;
    for (int u = 0; u <= units; u++) {
        const int begin = u % (AMX_GROUPS / AMX_UNIT) * AMX_UNIT, begun = AMX_GROUPS - AMX_UNIT - begin;
        const uint8_t *const now = x + u / (AMX_GROUPS / AMX_UNIT) * x_stride + begin * each;
        float *const to = y + (u - 1) / (AMX_GROUPS / AMX_UNIT) * AMX_ROWS * width;
        floats all[2][AMX_ROWS / 2];
        UNROLL(4)
        for (int k = 0; k < AMX_UNIT; k++) {
            const int first = k % 2 * 2, row = k / 2 * (AMX_ROWS / 2);
            foresee_codes(f);
            if (u < units) {
                const amx_group *const a = g[0] + begin + k, *const b = g[1] + begin + k;
                if (k % 2) BEGIN_PAIR(planes, 2, 3, a, b, now + k * each);
                else BEGIN_PAIR(planes, 0, 1, a, b, now + k * each);
            }
            if (u > 0) {
                UNROLL(16)
                for (int i = 0; i < AMX_ROWS && !first; i++)
                    all[i % 2][i / 2] = f_load(to + (row + i / 2) * width + i % 2 * LANES);
                UNROLL(2)
                for (int i = first; i < first + 2; i++)
                    add_pair_sums(type, g[0] + begun + i, g[1] + begun + i, sums[~u & 1][i],
                                  before + i * each + numbers, row, all);
                UNROLL(16)
                for (int i = 0; i < AMX_ROWS && first; i++)
                    f_store(to + (row + i / 2) * width + i % 2 * LANES, all[i % 2][i / 2]);
            }
            if (u < units) {
                if (k % 2) {
                    _tile_stored(2, sums[u & 1][k][0], 64);
                    _tile_stored(3, sums[u & 1][k][1], 64);
                } else {
                    _tile_stored(0, sums[u & 1][k][0], 64);
                    _tile_stored(1, sums[u & 1][k][1], 64);
                }
            }
        }
        before = now;
    }
}

/* The same for fewer rows. */
INLINE void add_amx_rest(const int type, const int planes, const amx_group *g, int count, const uint8_t *x, int some,
                         float *y, ptrdiff_t y_stride) {
    const ptrdiff_t each = some * amx_row_bytes(planes), numbers = some * planes * AMX_PLANE;
    amx_sums sums __attribute__((aligned(64)));
    floats to[AMX_ROWS];
    for (int r = 0; r < some; r++) to[r] = f_load(y + r * y_stride);
    for (int k = 0; k < count; k++) {
        const uint8_t *const at = x + nth_group(type, k) * each;
        SUM_FIRST(type, planes, 7, 6, g + k, at, some * AMX_PLANE);
        _tile_stored(7, sums[0], 64);
        if (has_two_sums(type, planes)) {
            SUM_SECOND(type, planes, 7, 6, g + k, at, some * AMX_PLANE);
            _tile_stored(7, sums[1], 64);
        }
        add_sums(type, planes, g + k, sums, at + numbers, some, to);
    }
    for (int r = 0; r < some; r++) f_store(y + r * y_stride, to[r]);
}

#else
#define HAS_AMX 0
#endif
#endif
