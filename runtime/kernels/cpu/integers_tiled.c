/* Products by integers with weights in tiles, of all types. */
#define TILED 1
#include "integers.h"

#ifdef LANES

COMMON_TYPES(DEFINE_INTEGER)
RARER_TYPES(DEFINE_INTEGER)

static const integer_product tiled[] = {COMMON_TYPES(INTEGER) RARER_TYPES(INTEGER)};

integer_product tiled_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof tiled / sizeof *tiled);
    return found ? tiled[type] : (integer_product){0};
}

#endif
