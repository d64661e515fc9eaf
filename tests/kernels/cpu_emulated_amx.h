// Matrix registers by plain loops, for tests on processors that have none.
#pragma once

#include <cstdint>
#include <cstring>

namespace exgrpo::EXGRPO_VARIANT::emulated {

struct Registers {
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t bytes[8][16][64];
};

inline thread_local Registers registers;

inline void load_layout(const void* layout) {
  const auto* const bytes = static_cast<const uint8_t*>(layout);
  std::memcpy(registers.row_bytes, bytes + 16, sizeof(registers.row_bytes));
  std::memcpy(registers.rows, bytes + 48, sizeof(registers.rows));
}

inline void release() { std::memset(&registers, 0, sizeof(registers)); }

inline void zero(int to) { std::memset(registers.bytes[to], 0, sizeof(registers.bytes[to])); }

inline void load(int to, const void* from, int64_t stride) {
  for (int i = 0; i < registers.rows[to]; ++i) {
    std::memcpy(registers.bytes[to][i], static_cast<const uint8_t*>(from) + i * stride, registers.row_bytes[to]);
  }
}

inline void store(int from, void* to, int64_t stride) {
  for (int i = 0; i < registers.rows[from]; ++i) {
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, registers.bytes[from][i], registers.row_bytes[from]);
  }
}

inline float entry(int of, int row, int column) {
  const uint8_t* const word = &registers.bytes[of][row][2 * column];
  const uint32_t bits = static_cast<uint32_t>(word[0] | word[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void multiply_add(int sum, int left, int right) {
  for (int i = 0; i < registers.rows[sum]; ++i) {
    for (int k = 0; k < registers.row_bytes[left] / 4; ++k) {
      for (int j = 0; j < registers.row_bytes[sum] / 4; ++j) {
        float value;
        std::memcpy(&value, &registers.bytes[sum][i][4 * j], sizeof(value));
        value += entry(left, i, 2 * k) * entry(right, k, 2 * j);
        value += entry(left, i, 2 * k + 1) * entry(right, k, 2 * j + 1);
        std::memcpy(&registers.bytes[sum][i][4 * j], &value, sizeof(value));
      }
    }
  }
}

}  // namespace exgrpo::EXGRPO_VARIANT::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_layout
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_add
