/* Products by integers with the less common types, compiled in parallel to the others. */
#include "integers.h"

#ifdef LANES

RARE_TYPES(DEFINE_INTEGER)

static const integer_product rare[] = {RARE_TYPES(INTEGER)};

integer_product rare_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof rare / sizeof *rare);
    return found ? rare[type] : (integer_product){0};
}

#endif
