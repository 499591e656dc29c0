/* Products by integers with the less common types, compiled in parallel to the others. */
#include "integers.h"

#ifdef LANES

RARER_TYPES(DEFINE_INTEGER)

static const integer_product rarer[] = {RARER_TYPES(INTEGER)};

integer_product rarer_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof rarer / sizeof *rarer);
    return found ? rarer[type] : (integer_product){0};
}

#endif
