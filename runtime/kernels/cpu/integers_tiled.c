/* Products by integers with weights in tiles, of all types. */
#define TILED 1
#include "integers.h"

#ifdef LANES

DEFINE_INTEGER(Q4_0, SOON)
DEFINE_INTEGER(Q8_0, SOON)
DEFINE_INTEGER(Q4_K, SOON)
DEFINE_INTEGER(Q5_K, SOON)
DEFINE_INTEGER(Q6_K, LATE)
DEFINE_INTEGER(Q4_1, LATE)
DEFINE_INTEGER(Q5_0, LATE)
DEFINE_INTEGER(Q5_1, LATE)
DEFINE_INTEGER(Q2_K, LATE)
DEFINE_INTEGER(Q3_K, LATE)
DEFINE_INTEGER(IQ4_NL, LATE)
DEFINE_INTEGER(IQ4_XS, LATE)
DEFINE_INTEGER(MXFP4, LATE)
DEFINE_INTEGER(MXFP4_PAIRS, LATE)

static const integer_product tiled[] = {
    INTEGER(Q4_0), INTEGER(Q8_0), INTEGER(Q4_K), INTEGER(Q5_K),   INTEGER(Q6_K),   INTEGER(Q4_1),  INTEGER(Q5_0),
    INTEGER(Q5_1), INTEGER(Q2_K), INTEGER(Q3_K), INTEGER(IQ4_NL), INTEGER(IQ4_XS), INTEGER(MXFP4), INTEGER(MXFP4_PAIRS),
};

integer_product tiled_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof tiled / sizeof *tiled);
    return found ? tiled[type] : (integer_product){0};
}

#endif
