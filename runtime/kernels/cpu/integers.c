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

#define PARTS_PER_THREAD 16
#define AMX_PARTS_PER_THREAD 4 /* each part reads all activations into the second cache */
#define LEAST_OUTS 16 /* so that outputs have the same bits whatever the vectors */
#define TILES_OF_A_PART 16 /* at most, so that the threads end together */

COMMON_TYPES(DEFINE_INTEGER)

static const integer_product common[] = {COMMON_TYPES(INTEGER)};

integer_product integer_product_of(int type) {
    const int found = type >= 0 && type < (int)(sizeof common / sizeof *common) && common[type].fine;
    return found ? common[type] : rare_integer_product(type);
}

/* Where a row of a group is written: its first plane, and how far the next plane is; its scale, and how far the
 * sums are. */
typedef struct { uint8_t *planes, *numbers; int plane_bytes, number_bytes; } group_place;

/* Of row `at` of `some` rows, whose group begins at `to`. */
INLINE group_place place_of(const int form, uint8_t *to, int some, int at) {
    const int planes = planes_of(form);
#if HAS_AMX
    if (is_amx(form)) {
        uint8_t *const numbers = to + some * planes * AMX_PLANE + 4 * at;
        return (group_place){to + at * AMX_PLANE, numbers, some * AMX_PLANE, 4 * some};
    }
#endif
    (void)some;
    to += at * group_bytes(planes);
    return (group_place){to, to + planes * GROUP, GROUP, 4};
}

/* How the activations of a type are rounded and stored; `pairs_in_order`: of numbers of 16 bits. */
typedef struct { int form, largest, offset, halves, has_base, pairs_in_order; } rounding;

/* 32 floats at x times `factor`; with an infinity or NaN among them, the scale is NaN. */
INLINE void write_group(const int planes, const rounding *how, const float *x, float factor, const group_place *place) {
    uint8_t *const to = place->planes;
    const int form = how->form, largest = how->largest, parts = GROUP / LANES;
    floats scaled[GROUP / LANES];
    ints most = i_all(0);
    /* The bits of magnitudes are in the order of the magnitudes; those of infinities and NaN are the largest. */
    UNROLL(8)
    for (int i = 0; i < parts; i++) {
        scaled[i] = f_load(x + i * LANES) * f_all(factor);
        most = i_max(most, (ints)scaled[i] & 0x7fffffff);
    }
    const int32_t top_bits = i_top(most);
    const int valid = top_bits < 0x7f800000;
    const float top = float_at(&top_bits);
    /* Below this, the reciprocal would overflow; such activations count as zero. */
    const float inverse = valid && top > 1e-30f ? (float)largest / top : 0;
    const float scale = !valid ? NAN : inverse ? top / (float)largest : 0;
    ints sums[2] = {i_all(0), i_all(0)};
    UNROLL(8)
    for (int i = 0; i < parts; i++) {
        const ints q = valid ? i_round(scaled[i] * f_all(inverse)) : i_all(0);
        sums[i * LANES / 16] += q;
#ifdef WIDE_ROWS
        if (form == WIDE) {
#ifdef PAIRED_CODES
            if (!how->pairs_in_order) {
                store_shorts(to + 2 * i * LANES, widened_order(q));
                continue;
            }
#endif
            store_shorts(to + 2 * i * LANES, q);
            continue;
        }
#endif
        const ints high = planes == 2 ? (q + 64) >> 7 : q;
#if HAS_AMX
        if (is_amx(form)) {
            amx_store(to + 2 * i * LANES, planes == 2 ? high << 7 : high);
            if (planes == 2) amx_store(to + place->plane_bytes + 2 * i * LANES, q - (high << 7));
            continue;
        }
#endif
        i_store_bytes(to + i * LANES, high);
        if (planes == 2) i_store_bytes(to + place->plane_bytes + i * LANES, q - (high << 7));
    }
    int32_t both[2] = {i_sum(sums[0]), i_sum(sums[1])};
    if (how->halves == 1) both[0] += both[1];
    memcpy(place->numbers, &scale, 4);
    for (int h = 0; h < 2; h++) {
        const int32_t moved = -how->offset * both[h];
        const float sum = (float)both[h];
        memcpy(place->numbers + (h + 1) * place->number_bytes, how->has_base ? (const void *)&sum : &moved, 4);
    }
}

INLINE void pack(const int planes, int type, const float *x, float factor, int elements, int rows, int row,
                 void *packed) {
    const int form = form_of(type, planes, rows), each = form_bytes(form), groups = elements / GROUP;
    const int at_once = rows_together(form), first = row / at_once * at_once;
    const int some = rows - first < at_once ? rows - first : at_once, at = row - first;
    const rounding how = {form, largest_activation(type, planes), code_offset(type), group_scales(type), has_base(type),
                          type == Q16_0};
    uint8_t *to = (uint8_t *)packed + (ptrdiff_t)first * groups * each;
    for (int i = 0; i < groups; i++, to += some * each) {
        const group_place place = place_of(form, to, some, at);
        write_group(planes, &how, x + i * GROUP, factor, &place);
    }
}

static void pack_fine(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    pack(2, file_type(type), x, factor, elements, rows, row, packed);
}

static void pack_fast(int type, const float *x, float factor, int elements, int rows, int row, void *packed) {
    pack(1, file_type(type), x, factor, elements, rows, row, packed);
}

/* Each thread computes some parts, so that one that is held up delays the others little. */
static int outs_at_once(int form, int outs, int matrices, int threads) {
    const int width = TILES * LANES, tiles = (outs + width - 1) / width;
    const int parts = (is_amx(form) ? AMX_PARTS_PER_THREAD : PARTS_PER_THREAD) * threads;
    const int each = tiles * matrices / parts, most = tiles < TILES_OF_A_PART ? tiles : TILES_OF_A_PART;
    return width * (each < 1 ? 1 : each > most ? most : each);
}

method integer_method(int type, int compute, int rows, int outs, int matrices, int threads) {
    const int own = file_type(type), planes = compute == FINE || own == Q16_0 ? 2 : 1;
    const integer_product p = own == type ? integer_product_of(type) : tiled_integer_product(own);
    if (outs < LEAST_OUTS || (compute != FINE && compute != FAST)) return (method){0};
    const int at_once = outs_at_once(form_of(own, planes, rows), outs, matrices, threads);
    return planes == 2 ? (method){p.fine, at_once, pack_fine} : (method){p.fast, at_once, pack_fast};
}

#else

method integer_method(int type, int compute, int rows, int outs, int matrices, int threads) {
    (void)type, (void)compute, (void)rows, (void)outs, (void)matrices, (void)threads;
    return (method){0};
}

#endif
