// Operations on the rows of a pair of a token and a word of its set: a row of hidden states and a row of the
// weight. Symbols as in exgrpo/kernels/chunks/softmax.py.
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
  // The same for `count` rows, one after the other, `stride` entries apart, each with its own factor.
  void (*add_rows)(T* total, const E* rows, int64_t stride, const T* factors, int64_t count, int64_t size);
  // row = total, rounded
  void (*put)(E* row, const T* total, int64_t size);
};

EXGRPO_DECLARE(template <class E, class T> KeptKernels<E, T> kept_kernels();)

}  // namespace exgrpo
