// A tile's product by matrix registers: two times two of 16 rows and 16 columns.
#pragma once

#include "product_tile.h"

namespace exgrpo::EXGRPO_VARIANT {

constexpr int64_t kRegisterRows = 16;
constexpr int64_t kRegisterBytes = 64;  // per row

// The layout of the registers: 0 to 3 the sums, 4 and 5 the left operand, 6 and 7 the right one.
struct alignas(64) TileLayout {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileLayout(int64_t upper, int64_t lower) {
    const int64_t count[8] = {upper, upper, lower, lower, upper, lower, kRegisterRows, kRegisterRows};
    for (int i = 0; i < 8; ++i) {
      if (count[i] == 0) continue;
      rows[i] = static_cast<uint8_t>(count[i]);
      row_bytes[i] = kRegisterBytes;
    }
  }
};

// Sets the thread's registers to the layout of whole tiles during its lifetime.
class TileRegisters {
 public:
  TileRegisters() { lay_out(kTileRows); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() { _tile_release(); }

  static void lay_out(int64_t rows) {
    const int64_t upper = smaller(rows, kRegisterRows);
    const TileLayout layout(upper, rows - upper);
    _tile_loadconfig(&layout);
  }
};

inline void multiply_upper(const uint16_t* left, int64_t stride, const uint16_t* panel, int64_t depth, Tile& tile) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < depth; k += kDepthStep) {
    const uint16_t* const right = panel + k * kTileColumns;
    _tile_loadd(4, left + k, stride * 2);
    _tile_loadd(6, right, 2 * kRegisterBytes);
    _tile_loadd(7, right + kDepthStep, 2 * kRegisterBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, &tile.values[0][0], sizeof(tile.values[0]));
  _tile_stored(1, &tile.values[0][kVector], sizeof(tile.values[0]));
}

inline void multiply_both(const uint16_t* left, int64_t stride, const uint16_t* panel, int64_t depth, Tile& tile) {
  const uint16_t* const lower = left + kRegisterRows * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; k += kDepthStep) {
    const uint16_t* const right = panel + k * kTileColumns;
    _tile_loadd(4, left + k, stride * 2);
    _tile_loadd(6, right, 2 * kRegisterBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + kDepthStep, 2 * kRegisterBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + k, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, &tile.values[0][0], sizeof(tile.values[0]));
  _tile_stored(1, &tile.values[0][kVector], sizeof(tile.values[0]));
  _tile_stored(2, &tile.values[kRegisterRows][0], sizeof(tile.values[0]));
  _tile_stored(3, &tile.values[kRegisterRows][kVector], sizeof(tile.values[0]));
}

// left [rows, depth] times a packed panel [depth, kTileColumns], in which the entries of two rows alternate.
// depth is a multiple of kDepthStep, rows at most kTileRows; the thread must have TileRegisters.
inline void multiply(int64_t rows, const uint16_t* left, int64_t stride, const uint16_t* panel, int64_t depth,
                     Tile& tile) {
  if (rows < kTileRows) TileRegisters::lay_out(rows);
  if (rows > kRegisterRows) {
    multiply_both(left, stride, panel, depth, tile);
  } else {
    multiply_upper(left, stride, panel, depth, tile);
  }
  if (rows < kTileRows) TileRegisters::lay_out(kTileRows);
}

}  // namespace exgrpo::EXGRPO_VARIANT
