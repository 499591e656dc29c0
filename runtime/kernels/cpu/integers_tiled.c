/* Products by integers with weights in tiles, of all types. */
#define TILED 1
#include "integers.h"

#ifdef LANES

COMMON_TYPES(DEFINE_INTEGER)
RARE_TYPES(DEFINE_INTEGER)

#ifdef WIDE_ROWS
/* With any way to compute: its integers have about as many bits as activations. */
static void Q16_0_product(const job *j, int index, int next, int foreseen) {
    if (j->rows <= FEW_ROWS || j->outs < TILES * LANES) integer_part(Q16_0, WIDE, 1, j, index, next, foreseen);
    else integer_part(Q16_0, WIDE, TILES, j, index, next, foreseen);
}
#define WIDE_TYPES [Q16_0] = {Q16_0_product, Q16_0_product, {0}},
#else
#define WIDE_TYPES
#endif

static const integer_product tiled[] = {COMMON_TYPES(INTEGER) RARE_TYPES(INTEGER) WIDE_TYPES};

integer_product tiled_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof tiled / sizeof *tiled);
    return found ? tiled[type] : (integer_product){0};
}

/* The type of tiles for weights of a type of files, whose products are faster than with rows; -1 if there is none.
 * Processors that multiply bfloat16 do so with BF16, but without AMX only for activations of one bfloat16. */
EXPORT int caravan_tiled_type(int type, int compute) {
    const int as_bfloats = HAS_AMX || (HAS_BFLOAT_DOTS && compute != FINE);
    const int own = type == F16 || (type == BF16 && !as_bfloats) ? Q16_0 : type;
    return compute != EXACT && tiled_integer_product(own).fine ? IN_TILES + own : -1;
}

#else

EXPORT int caravan_tiled_type(int type, int compute) {
    (void)type, (void)compute;
    return -1;
}

#endif
