// Operations on one row of logits; symbols as in exgrpo/kernels/chunks/softmax.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace exgrpo {

constexpr float underflown = -1e4f;  // replaces every d below it: exp is 0, and 0 * d must be 0 even if d is -inf

template <class T>
struct RowSums {
  T rest;    // S
  T moment;  // sum_{v != y} exp(d_v) d_v
};

template <class T>
struct RowGradient {
  T log_prob, entropy;  // c and h, the upstream gradients
  T mean;               // U
  T at_target;          // F at the target, without the slope of the cap
  T softcap;            // 0: no cap, and the rest is unused
  T gap, anchor, temperature;
};

template <class T>
struct RowKernels {
  // Adds the bias (or nullptr) and caps (softcap 0: no cap), in place; returns the largest logit, -inf of none.
  T (*largest)(T* row, int64_t size, const T* bias, T softcap);
  // The sums of exp(d) over all but `target` (-1: on another rank); `write`: replace the logits by exp(d), 0 at the
  // target; otherwise only the target's logit is overwritten.
  RowSums<T> (*sums)(T* row, int64_t size, int64_t target, T anchor, T temperature, bool write);
  // F in place of exp(d).
  void (*gradient)(T* row, int64_t size, int64_t target, const RowGradient<T>& terms);
};

EXGRPO_DECLARE(template <class T> RowKernels<T> row_kernels();)

}  // namespace exgrpo
