/* Products by integers with weights in tiles, of all types. */
#define TILED 1
#include "integers.h"

#ifdef LANES

DEFINE_INTEGER(Q4_0, BYTE_TILES)
DEFINE_INTEGER(Q8_0, BYTE_TILES)
DEFINE_INTEGER(Q4_K, BYTE_TILES)
DEFINE_INTEGER(Q5_K, BYTE_TILES)
DEFINE_INTEGER(Q6_K, 1)
DEFINE_INTEGER(Q4_1, 1)
DEFINE_INTEGER(Q5_0, 1)
DEFINE_INTEGER(Q5_1, 1)
DEFINE_INTEGER(Q2_K, 1)
DEFINE_INTEGER(Q3_K, 1)
DEFINE_INTEGER(IQ4_NL, 1)
DEFINE_INTEGER(IQ4_XS, 1)
DEFINE_INTEGER(MXFP4, 1)
DEFINE_INTEGER(MXFP4_PAIRS, 1)

static const integer_product tiled[] = {
    INTEGER(Q4_0), INTEGER(Q8_0), INTEGER(Q4_K), INTEGER(Q5_K),   INTEGER(Q6_K),   INTEGER(Q4_1),  INTEGER(Q5_0),
    INTEGER(Q5_1), INTEGER(Q2_K), INTEGER(Q3_K), INTEGER(IQ4_NL), INTEGER(IQ4_XS), INTEGER(MXFP4), INTEGER(MXFP4_PAIRS),
};

integer_product tiled_integer_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof tiled / sizeof *tiled);
    return found ? tiled[type] : (integer_product){0};
}

#endif
