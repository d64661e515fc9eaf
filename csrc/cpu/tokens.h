// Operations on tokens whose sums or log-probabilities are known; symbols as in
// exgrpo/kernels/chunks/softmax.py, formulas as there and in exgrpo/kernels/objective.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace exgrpo {

template <class T>
struct Clipping {
  bool clips, shapes;
  T low, high;  // bounds of the unclipped ratios; unused unless `clips`
  T log_beta;   // unused unless `shapes`
};

// Vectors over tokens; never nullptr unless stated.
template <class T>
struct SumVectors {
  const T *gap, *rest, *moment;
};

template <class T>
struct TokenVectors {
  const T *old_log_prob, *advantage;
  const bool* replayed;  // or nullptr: none
};

template <class T>
struct RowTerms {
  Clipping<T> clipping;
  T normalizer, entropy_coef;
  const T* temperature;  // or nullptr: 1
  bool plain;            // r includes c, and F is exp(d)
};

struct TokenSums {
  double value, entropy, count;
};

// Each function processes the tokens [begin, end); results are matrices [fields, tokens].
template <class T>
struct TokenKernels {
  // U, log p_y and H.
  void (*finish)(SumVectors<T> sums, T* results, int64_t tokens, int64_t begin, int64_t end);
  // The nine fields of PolicyRows.
  void (*policy_rows)(SumVectors<T> sums, TokenVectors<T> own, const RowTerms<T>& terms, T* results, int64_t tokens,
                      int64_t begin, int64_t end);
  // Log-probability, entropy, ratio and clipped, and the derivative of the objective; entropy and mask may be nullptr.
  TokenSums (*objective)(const T* log_prob, const T* entropy, TokenVectors<T> own, const bool* mask,
                         const Clipping<T>& clipping, T* results, T* derivative, int64_t tokens, int64_t begin,
                         int64_t end);
};

EXGRPO_DECLARE(template <class T> TokenKernels<T> token_kernels();)

}  // namespace exgrpo
