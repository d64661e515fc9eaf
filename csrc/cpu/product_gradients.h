// Products whose left operand is the gradient with respect to the logits.
#pragma once

#include <cstring>

#include "product_epilogue.h"
#include "product_memory.h"

namespace exgrpo::EXGRPO_VARIANT {

constexpr int64_t kDepth = 512;         // of a packed panel of the weight along the vocabulary
constexpr int64_t kGroup = 16;          // panels of the weight that share the second-level cache
constexpr int64_t kRowBlock = 256;      // rows per packed panel, fewer if threads would be idle
constexpr int64_t kGradientRows = 96;   // of the weight's gradient, computed together
static_assert(kGradientRows % kTileRows == 0 && kGradientRows % kWords == 0);

inline int64_t ceil_divide(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Adds a tile to a matrix, or writes it if the matrix is fresh.
inline void put_tile(const Tile& tile, int64_t rows, int64_t columns, float* matrix, int64_t stride, bool fresh) {
  for (int64_t row = 0; row < rows; ++row, matrix += stride) {
    for (int64_t j = 0; j < columns; j += kVector) {
      const __mmask16 mask = static_cast<__mmask16>(first_words(smaller(kVector, columns - j)));
      __m512 value = _mm512_load_ps(&tile.values[row][j]);
      if (!fresh) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, matrix + j));
      _mm512_mask_storeu_ps(matrix + j, mask, value);
    }
  }
}

// Writes a tile, rounded, to a fresh matrix.
inline void put_tile(const Tile& tile, int64_t rows, int64_t columns, uint16_t* matrix, int64_t stride, bool) {
  for (int64_t row = 0; row < rows; ++row, matrix += stride) {
    const __m512 low = _mm512_load_ps(&tile.values[row][0]), high = _mm512_load_ps(&tile.values[row][kVector]);
    const __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm512_mask_storeu_epi16(matrix, first_words(columns), words);
  }
}

inline void entropy_gradient(uint16_t* matrix, int64_t rows, int64_t columns, int64_t stride,
                             const EntropyFactors& factors, const Parallel& parallel) {
  for_parts(parallel, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const __m512 log_prob = _mm512_set1_ps(factors.log_prob[row]), entropy = _mm512_set1_ps(factors.entropy[row]);
      const __m512 mean = _mm512_set1_ps(factors.mean[row]);
      uint16_t* const line = matrix + row * stride;
      for (int64_t k = 0; k < columns; k += kWords) {
        const __mmask32 mask = first_words(columns - k);
        const __m512i words = _mm512_maskz_loadu_epi16(mask, line + k);
        const __m512 low = entropy_factor(widen(_mm512_castsi512_si256(words)), log_prob, entropy, mean);
        const __m512 high = entropy_factor(widen(_mm512_extracti64x4_epi64(words, 1)), log_prob, entropy, mean);
        _mm512_mask_storeu_epi16(line + k, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
      }
      if (factors.target[row] >= 0) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_set1_ps(factors.at_target[row]));
        line[factors.target[row]] = static_cast<uint16_t>(_mm256_extract_epi16(reinterpret_cast<__m256i>(rounded), 0));
      }
    }
  });
}

// Some rows of gradient @ weight, for a group of panels of the weight's columns.
class HiddenGradient {
 public:
  HiddenGradient(const Bfloat16Matrix& gradient, const Bfloat16Matrix& weight, float* total)
      : gradient_(gradient), weight_(weight), total_(total), panels_(kGroup * kDepth * kTileColumns) {}

  void compute(int64_t first_row, int64_t last_row, int64_t first_column, int64_t last_column) const {
    for (int64_t first = 0; first < weight_.rows; first += kDepth) {
      const int64_t last = smaller(first + kDepth, weight_.rows), depth = round_up(last - first, kDepthStep);
      for (int64_t column = first_column; column < last_column; column += kTileColumns) {
        pack_rows(weight_, first, last, column, panel(column - first_column, depth));
      }
      const auto add = [&](const uint16_t* left, int64_t stride) {
        for (int64_t row = first_row; row < last_row; row += kTileRows, left += kTileRows * stride) {
          const int64_t rows = smaller(kTileRows, last_row - row);
          for (int64_t column = first_column; column < last_column; column += kTileColumns) {
            Tile tile;
            multiply(rows, left, stride, panel(column - first_column, depth), depth, tile);
            put_tile(tile, rows, smaller(kTileColumns, last_column - column), total_ + row * weight_.columns + column,
                     weight_.columns, first == 0);
          }
        }
      };
      if (depth == last - first) {
        add(gradient_.data + first_row * gradient_.stride + first, gradient_.stride);
      } else {
        const Padded padded(gradient_, first_row, last_row, first, last);
        add(padded.row(0), padded.stride);
      }
    }
  }

 private:
  uint16_t* panel(int64_t column, int64_t depth) const { return panels_ + column * depth; }

  const Bfloat16Matrix& gradient_;
  const Bfloat16Matrix& weight_;
  float* const total_;
  const Scratch<uint16_t> panels_;
};

inline void hidden_gradient(const Bfloat16Matrix& gradient, const Bfloat16Matrix& weight, float* total,
                            const Parallel& parallel) {
  const int64_t rows = gradient.rows, width = weight.columns;
  if (weight.rows == 0) std::memset(total, 0, rows * width * sizeof(float));
  if (weight.rows == 0 || rows == 0 || width == 0) return;
  const int64_t panels = ceil_divide(width, kTileColumns), groups = ceil_divide(panels, kGroup);
  int64_t blocks = ceil_divide(rows, kRowBlock);
  while (blocks * groups % parallel.threads != 0 && blocks * kTileRows < rows) ++blocks;
  const int64_t step = round_up(ceil_divide(rows, blocks), kTileRows);
  blocks = ceil_divide(rows, step);  // of whole tiles, fewer may cover all rows
  for_parts(parallel, blocks * groups, [&](int64_t begin, int64_t end) {
    const HiddenGradient part(gradient, weight, total);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / blocks, row = i % blocks * step;
      part.compute(row, smaller(row + step, rows), panels * group / groups * kTileColumns,
                   smaller(panels * (group + 1) / groups * kTileColumns, width));
    }
  });
}

// The total is float, or uint16_t if it is fresh.
template <class Entry>
void weight_gradient(const Bfloat16Matrix& gradient, const Bfloat16Matrix& hidden, const float* factor, Entry* total,
                     bool fresh, const Parallel& parallel) {
  const int64_t vocabulary = gradient.columns, width = hidden.columns, depth = round_up(hidden.rows, kDepthStep);
  const int64_t stride = spread_stride(hidden.rows), size = depth * kTileColumns;
  const int64_t panels = ceil_divide(width, kTileColumns);
  const Scratch<uint16_t> scaled(panels * size);
  for_parts(parallel, panels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack_scaled_rows(hidden, factor, i * kTileColumns, scaled + i * size);
  });
  for_parts(parallel, ceil_divide(vocabulary, kGradientRows), [&](int64_t begin, int64_t end) {
    const Scratch<uint16_t> transposed(kGradientRows * stride);
    for (int64_t first = begin * kGradientRows; first < smaller(end * kGradientRows, vocabulary);
         first += kGradientRows) {
      const int64_t last = smaller(first + kGradientRows, vocabulary);
      if (fresh) make_pages(total + first * width, (last - first) * width * sizeof(Entry));
      for (int64_t word = first; word < last; word += kWords) {
        transpose_columns(gradient, word, transposed + (word - first) * stride, stride);
      }
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t column = i * kTileColumns;
        for (int64_t word = first; word < last; word += kTileRows) {
          Tile tile;
          const int64_t rows = smaller(kTileRows, last - word);
          multiply(rows, transposed + (word - first) * stride, stride, scaled + i * size, depth, tile);
          put_tile(tile, rows, smaller(kTileColumns, width - column), total + word * width + column, width, fresh);
        }
      }
    }
  });
}

}  // namespace exgrpo::EXGRPO_VARIANT
