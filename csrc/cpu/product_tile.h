// One tile of a product: a few rows times a panel of columns.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // intended in a header of GCC 12
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#if defined(__AMX_BF16__) || defined(EXGRPO_EMULATE_AMX)
#define EXGRPO_AMX
#endif

namespace exgrpo::EXGRPO_VARIANT {

#ifdef EXGRPO_AMX
constexpr int64_t kTileRows = 32;   // two registers of 16 rows
constexpr int64_t kDepthStep = 32;  // entries of a register's row
#else
constexpr int64_t kTileRows = 12;  // with two vectors of columns: 24 sums, leaving registers for the operands
constexpr int64_t kDepthStep = 2;  // entries multiplied and added at once
#endif
constexpr int64_t kTileColumns = 32;  // a cache line of bfloat16
constexpr int64_t kVector = 16;       // float32 lanes
constexpr int64_t kVectors = kTileColumns / kVector;

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct alignas(64) Tile {
  float values[kTileRows][kTileColumns];
};

}  // namespace exgrpo::EXGRPO_VARIANT

#ifdef EXGRPO_AMX
#include "product_tile_amx.h"
#else
#include "product_tile_avx512.h"
#endif
