// What is done with the rows that a pair of a token and a word of its set needs: a row of hidden states and one of the
// weight. The symbols are those of exgrpo/kernels/chunks/softmax.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace exgrpo {

// E is an entry of a row: float, double, or uint16_t for the bits of a bfloat16 number; T is float, or double for double.
template <class E, class T>
struct KeptKernels {
  // The product of two rows.
  T (*dot)(const E* a, const E* b, int64_t size);
  // total += factor * row
  void (*add)(T* total, const E* row, T factor, int64_t size);
  // The same of `count` rows, one after the other, each `stride` entries behind the one before, with factors of their own.
  void (*add_rows)(T* total, const E* rows, int64_t stride, const T* factors, int64_t count, int64_t size);
  // row = total, rounded
  void (*put)(E* row, const T* total, int64_t size);
};

EXGRPO_DECLARE(template <class E, class T> KeptKernels<E, T> kept_kernels();)

}  // namespace exgrpo
