// A tile's product by the instructions that multiply and add pairs of bfloat16 entries; its sums stay in registers.
#pragma once

#include "product_tile.h"

namespace exgrpo::EXGRPO_VARIANT {

// Nothing to set up.
struct TileRegisters {
  TileRegisters() {}
};

// Two adjacent entries of a row, which one instruction multiplies and adds.
using Pair = int __attribute__((may_alias, aligned(2)));

template <int Rows>
void multiply_rows(const uint16_t* left, int64_t stride, const uint16_t* panel, int64_t depth, Tile& tile) {
  __m512 sum[Rows][kVectors];
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[row][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh right[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      right[j] = reinterpret_cast<__m512bh>(_mm512_load_si512(panel + (k * kVectors + 2 * j) * kVector));
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
      const int pair = *reinterpret_cast<const Pair*>(left + row * stride + k);
      const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int j = 0; j < kVectors; ++j) sum[row][j] = _mm512_dpbf16_ps(sum[row][j], both, right[j]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < Rows; ++row) {
    for (int j = 0; j < kVectors; ++j) _mm512_store_ps(&tile.values[row][j * kVector], sum[row][j]);
  }
}

// left [rows, depth] times a packed panel [depth, kTileColumns], in which the entries of two rows alternate.
// depth is a multiple of kDepthStep, rows at most kTileRows.
inline void multiply(int64_t rows, const uint16_t* left, int64_t stride, const uint16_t* panel, int64_t depth,
                     Tile& tile) {
  constexpr decltype(&multiply_rows<1>) by_rows[] = {
      multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,  multiply_rows<5>,  multiply_rows<6>,
      multiply_rows<7>, multiply_rows<8>, multiply_rows<9>, multiply_rows<10>, multiply_rows<11>, multiply_rows<12>};
  by_rows[rows - 1](left, stride, panel, depth, tile);
}

}  // namespace exgrpo::EXGRPO_VARIANT
