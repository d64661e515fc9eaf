// Products of bfloat16 matrices with float32 sums, in tiles that are processed while in the cache.
//
// The logits z = hidden @ weight.T + bias [rows, V] exist a tile at a time: exp(d), d = (z - anchor) / temperature, and
// its sums remain. exp(d), or a gradient computed from it, is the left operand of the other two products.
#pragma once

#include <cstdint>

namespace exgrpo {

// Entries of a row are contiguous; the next row begins `stride` entries further.
struct Bfloat16Matrix {
  const uint16_t* data;
  int64_t rows;
  int64_t columns;
  int64_t stride;
};

// Threads: run calls body(begin, end, context) for parts that partition [0, count).
struct Parallel {
  int64_t threads;
  void (*run)(int64_t count, void (*body)(int64_t begin, int64_t end, void* context), void* context);
};

struct Logits {
  Bfloat16Matrix hidden;  // [rows, D]
  Bfloat16Matrix weight;  // [V, D]
  const float* bias;      // [V]; null: 0
};

// Parameters that turn the logits of each row into d.
struct Shift {
  const int64_t* target;     // [rows], a row of the weight; -1 if another rank has it
  const float* anchor;       // [rows]
  const float* temperature;  // [rows]; null: 1
};

// Parameters that turn exp(d) of each row into the gradient F = exp(d) (c + h (d - U)), all [rows].
struct EntropyFactors {
  const int64_t* target;
  const float* mean;       // U
  const float* log_prob;   // c
  const float* entropy;    // h
  const float* at_target;  // F at the target
};

// Results are bitwise equal for any number of threads.
struct Product {
  // Sums of exp(d) and of exp(d) d over the vocabulary without the target; if out is not null, exp(d) is written to
  // each row's memory in it, 0 at the target.
  void (*sums)(const Logits&, const Shift&, uint16_t* const* out, float* rest, float* moment, const Parallel&);
  // Largest logit of each row; -inf without a vocabulary.
  void (*largest)(const Logits&, float* result, const Parallel&);
  // Logit of each row's target; -inf if another rank has it.
  void (*target_logits)(const Logits&, const int64_t* target, float* result, const Parallel&);
  // Replaces exp(d) [rows, columns] by F in place.
  void (*entropy_gradient)(uint16_t* matrix, int64_t rows, int64_t columns, int64_t stride, const EntropyFactors&,
                           const Parallel&);
  // gradient [rows, V] @ weight into total [rows, D].
  void (*hidden_gradient)(const Bfloat16Matrix& gradient, const Bfloat16Matrix& weight, float* total, const Parallel&);
  // gradient.T [V, rows] @ (factor * hidden) [rows, D], added to total [V, D], or written to it if `fresh`.
  void (*weight_gradient)(const Bfloat16Matrix& gradient, const Bfloat16Matrix& hidden, const float* factor,
                          float* total, bool fresh, const Parallel&);
  // The same, rounded to bfloat16 and written to the total.
  void (*rounded_weight_gradient)(const Bfloat16Matrix& gradient, const Bfloat16Matrix& hidden, const float* factor,
                                  uint16_t* total, bool fresh, const Parallel&);
};

#ifdef HAVE_AVX512BF16
namespace avx512bf16 {
extern const Product product;
}
#endif
#ifdef HAVE_AMX
namespace amx {
extern const Product product;
}
#endif

}  // namespace exgrpo
