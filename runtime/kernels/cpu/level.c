/* The instruction set that this library was compiled for, and what depends on the maker of the processor. */
#include "simd.h"

int caravan_loads_into_second_cache = 1;
EXPORT int caravan_expands_in_registers = 0;

#if defined(__x86_64__)
__attribute__((constructor)) static void choose(void) {
    __builtin_cpu_init();
    caravan_loads_into_second_cache = __builtin_cpu_is("amd");
#if defined(__AVX512F__)
    caravan_expands_in_registers = __builtin_cpu_is("amd");
#endif
}
#endif

EXPORT const char *caravan_level(void) { return CARAVAN_LEVEL; }
