/* Products by integers with the less common types, compiled in parallel to the others. */
#include "integers.h"

#ifdef LANES

DEFINE_INTEGER(Q4_1, LATE)
DEFINE_INTEGER(Q5_0, LATE)
DEFINE_INTEGER(Q5_1, LATE)
DEFINE_INTEGER(Q2_K, LATE)
DEFINE_INTEGER(Q3_K, LATE)
DEFINE_INTEGER(IQ4_NL, LATE)
DEFINE_INTEGER(IQ4_XS, LATE)
DEFINE_INTEGER(MXFP4, LATE)
DEFINE_INTEGER(MXFP4_PAIRS, LATE)

static const integer_product rarer[] = {
    INTEGER(Q4_1),   INTEGER(Q5_0),   INTEGER(Q5_1),  INTEGER(Q2_K),        INTEGER(Q3_K),
    INTEGER(IQ4_NL), INTEGER(IQ4_XS), INTEGER(MXFP4), INTEGER(MXFP4_PAIRS),
};

integer_product rarer_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof rarer / sizeof *rarer);
    return found ? rarer[type] : (integer_product){0};
}

#endif
