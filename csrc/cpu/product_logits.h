// Results computed from hidden @ weight.T without storing it.
#pragma once

#include <cmath>
#include <cstring>

#include "product_epilogue.h"
#include "product_memory.h"

namespace exgrpo::EXGRPO_VARIANT {

constexpr int64_t kBlockColumns = 256;  // summed in float32; the sums of blocks are added in float64
static_assert(kBlockColumns % kTileColumns == 0);

// A tile of raw products and its position.
struct LogitTile {
  int64_t column;
  int64_t columns;
  int64_t row;
  int64_t rows;
  alignas(64) float bias[kTileColumns];  // -inf beyond the vocabulary, and so are the logits
  Tile products;
};

// The raw products in blocks of columns, distributed over threads.
class LogitBlocks {
 public:
  explicit LogitBlocks(const Logits& logits)
      : logits_(logits), hidden_(logits.hidden, 0, logits.hidden.rows, 0, logits.hidden.columns) {}

  int64_t count() const { return (logits_.weight.rows + kBlockColumns - 1) / kBlockColumns; }
  int64_t rows() const { return logits_.hidden.rows; }
  int64_t panel_size() const { return hidden_.depth * kTileColumns; }

  // Calls visit(tile) for the tiles of a block; panel is scratch memory.
  template <class Visit>
  void walk(int64_t block, uint16_t* panel, const Visit& visit) const {
    LogitTile tile;
    const int64_t last = smaller((block + 1) * kBlockColumns, logits_.weight.rows);
    for (tile.column = block * kBlockColumns; tile.column < last; tile.column += kTileColumns) {
      tile.columns = smaller(kTileColumns, last - tile.column);
      pack_transposed(logits_.weight, tile.column, panel);
      for (int64_t j = 0; j < kTileColumns; ++j) tile.bias[j] = j < tile.columns ? bias(tile.column + j) : -HUGE_VALF;
      for (tile.row = 0; tile.row < rows(); tile.row += kTileRows) {
        tile.rows = smaller(kTileRows, rows() - tile.row);
        multiply(tile.rows, hidden_.row(tile.row), hidden_.stride, panel, hidden_.depth, tile.products);
        visit(tile);
      }
    }
  }

 private:
  float bias(int64_t column) const { return logits_.bias == nullptr ? 0.0f : logits_.bias[column]; }

  const Logits& logits_;
  const Padded hidden_;
};

// Replaces a tile's products by exponentials, writes them to out unless it is null, and adds them to the sums.
inline void add_exponentials(LogitTile& tile, const Shift& shift, uint16_t* const* out, LaneSums* sums) {
  const __mmask32 mask = first_words(tile.columns);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i, target = shift.target[row] - tile.column;
    float* const logits = tile.products.values[i];
    if (shift.target[row] >= 0 && target >= 0 && target < kTileColumns) logits[target] = -HUGE_VALF;
    const float scale = shift.temperature == nullptr ? kLog2E : kLog2E / shift.temperature[row];
    const __m512i words = exponentials(logits, tile.bias, shift.anchor[row], scale, sums[row]);
    if (out != nullptr) _mm512_mask_storeu_epi16(out[row] + tile.column, mask, words);
  }
}

inline void sums(const Logits& logits, const Shift& shift, uint16_t* const* out, float* rest, float* moment,
                 const Parallel& parallel) {
  const LogitBlocks blocks(logits);
  const int64_t rows = blocks.rows();
  const Scratch<float> rests(blocks.count() * rows), moments(blocks.count() * rows);
  for_parts(parallel, blocks.count(), [&](int64_t begin, int64_t end) {
    const Scratch<uint16_t> panel(blocks.panel_size());
    const Scratch<LaneSums> lanes(rows);
    for (int64_t block = begin; block < end; ++block) {
      std::memset(lanes, 0, rows * sizeof(LaneSums));
      blocks.walk(block, panel, [&](LogitTile& tile) { add_exponentials(tile, shift, out, lanes); });
      for (int64_t row = 0; row < rows; ++row) {
        rests[block * rows + row] = _mm512_reduce_add_ps(_mm512_load_ps(lanes[row].rest));
        moments[block * rows + row] = _mm512_reduce_add_ps(_mm512_load_ps(lanes[row].moment)) * kLn2;
      }
    }
  });
  const auto total = [&](const float* parts, int64_t row) {
    double sum = 0;
    for (int64_t block = 0; block < blocks.count(); ++block) sum += parts[block * rows + row];
    return static_cast<float>(sum);
  };
  for_parts(parallel, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      rest[row] = total(rests, row);
      moment[row] = total(moments, row);
    }
  });
}

inline void largest(const Logits& logits, float* result, const Parallel& parallel) {
  const LogitBlocks blocks(logits);
  const int64_t rows = blocks.rows();
  const Scratch<float> found(blocks.count() * rows);
  for_parts(parallel, blocks.count(), [&](int64_t begin, int64_t end) {
    const Scratch<uint16_t> panel(blocks.panel_size());
    for (int64_t block = begin; block < end; ++block) {
      float* const own = found + block * rows;
      for (int64_t row = 0; row < rows; ++row) own[row] = -HUGE_VALF;
      blocks.walk(block, panel, [&](const LogitTile& tile) {
        for (int64_t i = 0; i < tile.rows; ++i) {
          for (int64_t j = 0; j < tile.columns; ++j) {
            const float z = tile.products.values[i][j] + tile.bias[j];
            if (z > own[tile.row + i]) own[tile.row + i] = z;
          }
        }
      });
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    result[row] = -HUGE_VALF;
    for (int64_t block = 0; block < blocks.count(); ++block) {
      if (found[block * rows + row] > result[row]) result[row] = found[block * rows + row];
    }
  }
}

inline void target_logits(const Logits& logits, const int64_t* target, float* result, const Parallel& parallel) {
  const Bfloat16Matrix &hidden = logits.hidden, &weight = logits.weight;
  for_parts(parallel, hidden.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      result[row] = -HUGE_VALF;
      if (target[row] < 0) continue;
      __m512 sum = _mm512_setzero_ps();
      for (int64_t k = 0; k < hidden.columns; k += kWords) {
        const auto left = reinterpret_cast<__m512bh>(load_row(hidden, row, k));
        sum = _mm512_dpbf16_ps(sum, left, reinterpret_cast<__m512bh>(load_row(weight, target[row], k)));
      }
      result[row] = _mm512_reduce_add_ps(sum) + (logits.bias == nullptr ? 0.0f : logits.bias[target[row]]);
    }
  });
}

}  // namespace exgrpo::EXGRPO_VARIANT
