// Operands in the order in which tiles read them. Packing takes 1 % of the time of a product of a few hundred rows.
#pragma once

#include "product.h"
#include "product_tile.h"

namespace exgrpo::EXGRPO_VARIANT {

constexpr int64_t kWords = 32;  // bfloat16 entries per vector

inline __mmask32 first_words(int64_t count) {
  return count >= kWords ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

// Transposes 16 x 16 pairs.
inline void transpose(__m512i (&line)[16]) {
  __m512i by_two[16];
  for (int i = 0; i < 16; i += 2) {
    by_two[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]);
    by_two[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
  }
  __m512i by_four[16];
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      by_four[i + 2 * half] = _mm512_unpacklo_epi64(by_two[i + half], by_two[i + 2 + half]);
      by_four[i + 2 * half + 1] = _mm512_unpackhi_epi64(by_two[i + half], by_two[i + 2 + half]);
    }
  }
  // by_four[4 g + c] has in its q-th quarter column 4 q + c of rows 4 g to 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(by_four[c], by_four[4 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(by_four[c], by_four[4 + c], 0xdd);
    const __m512i high = _mm512_shuffle_i32x4(by_four[8 + c], by_four[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(by_four[8 + c], by_four[12 + c], 0xdd);
    line[c] = _mm512_shuffle_i32x4(low, high, 0x88);
    line[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    line[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    line[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

// Interleaves the entries of two vectors: of the first 16, and of the last 16.
inline void interleave(__m512i even, __m512i odd, __m512i& first, __m512i& last) {
  const __m512i low = _mm512_unpacklo_epi16(even, odd);
  const __m512i high = _mm512_unpackhi_epi16(even, odd);
  const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i order_last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  first = _mm512_permutex2var_epi64(low, order, high);
  last = _mm512_permutex2var_epi64(low, order_last, high);
}

// Entries of one row of a matrix, 0 beyond its end.
inline __m512i load_row(const Bfloat16Matrix& matrix, int64_t row, int64_t column) {
  if (row >= matrix.rows) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(first_words(matrix.columns - column), matrix.data + row * matrix.stride + column);
}

// The rows [first, first + kTileColumns) of a matrix, transposed to a panel [columns, kTileColumns]. As
// for all panels, its depth is rounded up to kDepthStep, with 0 beyond the matrix.
inline void pack_transposed(const Bfloat16Matrix& matrix, int64_t first, uint16_t* panel) {
  for (int64_t part = 0; part < kTileColumns; part += kVector) {
    for (int64_t k = 0; k < matrix.columns; k += kWords) {
      __m512i line[16];
      for (int i = 0; i < 16; ++i) line[i] = load_row(matrix, first + part + i, k);
      transpose(line);
      const int64_t pairs = smaller(16, (round_up(matrix.columns, kDepthStep) - k) / 2);
      for (int64_t i = 0; i < pairs; ++i) {
        _mm512_store_si512(panel + (k / 2 + i) * 2 * kTileColumns + 2 * part, line[i]);
      }
    }
  }
}

// [first, last) of a matrix's rows and kTileColumns of its columns as a panel [last - first, kTileColumns].
inline void pack_rows(const Bfloat16Matrix& matrix, int64_t first, int64_t last, int64_t column, uint16_t* panel) {
  const Bfloat16Matrix above = {matrix.data, last, matrix.columns, matrix.stride};
  const int64_t end = first + round_up(last - first, kDepthStep);
  for (int64_t row = first; row < end; row += 2, panel += 2 * kTileColumns) {
    __m512i left, right;
    interleave(load_row(above, row, column), load_row(above, row + 1, column), left, right);
    _mm512_store_si512(panel, left);
    _mm512_store_si512(panel + kWords, right);
  }
}

// bfloat16 entries as float32.
inline __m512 widen(__m256i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// factor[row] * matrix, rounded.
inline __m512i load_scaled(const Bfloat16Matrix& matrix, const float* factor, int64_t row, int64_t column) {
  if (row >= matrix.rows) return _mm512_setzero_si512();
  const __m512i words = load_row(matrix, row, column);
  const __m512 scale = _mm512_set1_ps(factor[row]);
  const __m512 low = _mm512_mul_ps(widen(_mm512_castsi512_si256(words)), scale);
  const __m512 high = _mm512_mul_ps(widen(_mm512_extracti64x4_epi64(words, 1)), scale);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// kTileColumns columns of factor[:, None] * matrix as a panel [rows, kTileColumns].
inline void pack_scaled_rows(const Bfloat16Matrix& matrix, const float* factor, int64_t column, uint16_t* panel) {
  for (int64_t row = 0; row < round_up(matrix.rows, kDepthStep); row += 2, panel += 2 * kTileColumns) {
    __m512i left, right;
    interleave(load_scaled(matrix, factor, row, column), load_scaled(matrix, factor, row + 1, column), left, right);
    _mm512_store_si512(panel, left);
    _mm512_store_si512(panel + kWords, right);
  }
}

// kWords columns of a matrix as the rows of its transpose [kWords, stride], with 0 beyond its last row.
inline void transpose_columns(const Bfloat16Matrix& matrix, int64_t column, uint16_t* transposed, int64_t stride) {
  for (int64_t row = 0; row < matrix.rows; row += kWords) {
    __m512i left[16], right[16];
    for (int i = 0; i < 16; ++i) {
      interleave(load_row(matrix, row + 2 * i, column), load_row(matrix, row + 2 * i + 1, column), left[i], right[i]);
    }
    transpose(left);
    transpose(right);
    for (int i = 0; i < 16; ++i) {
      _mm512_storeu_si512(transposed + i * stride + row, left[i]);
      _mm512_storeu_si512(transposed + (16 + i) * stride + row, right[i]);
    }
  }
}

// [first, last) of a matrix's columns, 0 beyond them.
inline void copy_columns(const Bfloat16Matrix& matrix, int64_t first_row, int64_t last_row, int64_t first, int64_t last,
                         uint16_t* copy, int64_t stride) {
  for (int64_t row = first_row; row < last_row; ++row, copy += stride) {
    const uint16_t* source = matrix.data + row * matrix.stride;
    for (int64_t k = first; k < last; k += kWords) {
      _mm512_storeu_si512(copy + (k - first), _mm512_maskz_loadu_epi16(first_words(last - k), source + k));
    }
  }
}

// A row's length in memory, chosen so that rows read together do not map to the same few sets of the cache.
constexpr int64_t spread_stride(int64_t columns) { return (round_up(columns, kWords) / kWords | 1) * kWords; }

}  // namespace exgrpo::EXGRPO_VARIANT
