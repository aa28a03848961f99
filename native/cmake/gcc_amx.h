// Included ahead of ggml-cpu's C++ under GCC 12 and older, and only there.
//
// Those compilers describe the AMX intrinsics wrongly.  _tile_loadconfig tells the optimiser that it reads one pointer's
// worth of memory, while LDTILECFG reads 64 bytes: the stores that fill the rest of the configuration look dead and are
// dropped.  _tile_loadd and _tile_stored do not say at all that they touch memory, so loads and stores around them may
// move across.  The result is a wrong configuration at run time: SIGILL or SIGSEGV in the matrix kernels.
//
// They are macros because the number of a tile is part of the instruction.
#pragma once

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13 && defined(__AMX_TILE__)

#include <immintrin.h>

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored

#define LANEWAY_TILE(number) "%%tmm" #number

#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" : : "m"(*reinterpret_cast<const unsigned char(*)[64]>(config)))

#define _tile_loadd(tile, base, stride)                                                         \
    __asm__ volatile("tileloadd (%0,%1,1), " LANEWAY_TILE(tile)                                 \
                     :                                                                          \
                     : "r"(static_cast<const void *>(base)), "r"(static_cast<long long>(stride)) \
                     : "memory")

#define _tile_stored(tile, base, stride)                                                  \
    __asm__ volatile("tilestored " LANEWAY_TILE(tile) ", (%0,%1,1)"                       \
                     :                                                                    \
                     : "r"(static_cast<void *>(base)), "r"(static_cast<long long>(stride)) \
                     : "memory")

#endif
