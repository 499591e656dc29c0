// Included before each C++ file of llama.cpp when `make bench` builds it.
//
// gcc 12 and 13 do not know that `ldtilecfg` reads 64 bytes and `tileloadd` reads memory at all, so
// they leave out stores that these instructions depend on, and llama.cpp ends with a fault.
#pragma once
#if defined(__AMX_TILE__)
#include <immintrin.h>

static inline void caravan_load_tile_config(const void *config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])config) : "memory");
}

#define caravan_load_tile(tile, base, stride)                              \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(               \
                       (const void *)(base)), "r"((long)(stride)) : "memory")

#undef _tile_loadconfig
#undef _tile_loadd
#define _tile_loadconfig caravan_load_tile_config
#define _tile_loadd(tile, base, stride) caravan_load_tile(tile, base, stride)
#endif
