/* The name of the instruction set that this library was compiled for. */
#include "simd.h"

EXPORT const char *caravan_level(void) { return CARAVAN_LEVEL; }
