/* Products with the less common types, compiled in parallel to the others. */
#include "products.h"

DEFINE(Q4_1)
DEFINE(Q5_0)
DEFINE(Q5_1)
DEFINE(Q2_K)
DEFINE(Q3_K)
DEFINE(IQ4_NL)
DEFINE(IQ4_XS)
DEFINE(TQ2_0)
DEFINE(MXFP4)
DEFINE(MXFP4_PAIRS)
DEFINE(NVFP4)
DEFINE_MANY(IQ1_S)
DEFINE_MANY(IQ1_M)
DEFINE_MANY(IQ2_XXS)
DEFINE_MANY(IQ2_XS)
DEFINE_MANY(IQ2_S)
DEFINE_MANY(IQ3_XXS)
DEFINE_MANY(IQ3_S)
DEFINE_MANY(TQ1_0)

static const product rare[] = {
    ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(Q2_K),
    ENTRY(Q3_K), ENTRY(IQ4_NL), ENTRY(IQ4_XS), ENTRY(TQ2_0),
    ENTRY(MXFP4), ENTRY(MXFP4_PAIRS), ENTRY(NVFP4),
    ENTRY_MANY(IQ1_S), ENTRY_MANY(IQ1_M), ENTRY_MANY(IQ2_XXS), ENTRY_MANY(IQ2_XS),
    ENTRY_MANY(IQ2_S), ENTRY_MANY(IQ3_XXS), ENTRY_MANY(IQ3_S), ENTRY_MANY(TQ1_0),
};

const product *rare_product(int type) {
    const int found = type >= 0 && type < (int)(sizeof rare / sizeof *rare) && rare[type].many;
    return found ? rare + type : NULL;
}

/* Copies the grids that codebooks.h reads; called once, before any product. */
EXPORT void caravan_set_grids(const int8_t *all) { memcpy(grids, all, GRIDS); }
