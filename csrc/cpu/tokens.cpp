#include "tokens.h"

#include <limits>

#include "rows.h"
#include "vector.h"

namespace exgrpo::EXGRPO_VARIANT {
namespace {

template <class T>
constexpr T max_log_ratio = 20;

// -1 in lanes with the flag set; in all lanes without flags.
template <class T>
Mask<T> load_flags(const bool* flags, int64_t count) {
  Mask<T> set = {};
  for (int i = 0; i < lanes<T> && i < count; ++i) {
    set[i] = flags == nullptr || flags[i] ? -1 : 0;
  }
  return set;
}

template <class T>
struct Finished {
  Vector<T> partition, mean, log_prob, entropy;
};

template <class T>
Finished<T> finished(Vector<T> gap, Vector<T> rest, Vector<T> moment) {
  const Vector<T> bounded = at_least(gap, T(underflown));
  const Vector<T> excess = rest + exponential_minus_one<T>(gap);
  const Vector<T> partition = excess + T(1);
  const Vector<T> mean = (moment + exponential<T>(bounded) * bounded) / partition;
  const Vector<T> log_partition = logarithm_plus_one<T>(excess);
  return {partition, mean, gap - log_partition, log_partition - mean};
}

template <class T>
struct Objective {
  Vector<T> value, derivative, ratio;
  Mask<T> clipped;
};

template <class T>
Objective<T> objective_of(Vector<T> log_prob, Vector<T> old_log_prob, Vector<T> advantage, Mask<T> replayed,
                          const Clipping<T>& clipping) {
  const Vector<T> zero = {};
  const Mask<T> present = old_log_prob == fill(std::numeric_limits<T>::infinity());  // marks the current policy
  const Vector<T> log_ratio = log_prob - (present ? log_prob : old_log_prob);
  const Vector<T> ratio = exponential<T>(at_most(log_ratio, max_log_ratio<T>));
  Vector<T> value = ratio * advantage;
  Vector<T> derivative = log_ratio > max_log_ratio<T> ? zero : value;
  Mask<T> clipped = {};
  if (clipping.clips) {
    const Mask<T> above = (advantage > T(0)) & (ratio > clipping.high);
    const Mask<T> below = (advantage < T(0)) & (ratio < clipping.low);
    clipped = (above | below) & ~replayed;
    value = clipped ? (above ? fill(clipping.high) : fill(clipping.low)) * advantage : value;
    derivative = clipped ? zero : derivative;
  }
  if (clipping.shapes) {
    const Vector<T> logit = log_ratio - clipping.log_beta;
    const Vector<T> shaped = advantage * sigmoid<T>(logit);
    value = replayed ? shaped : value;
    derivative = replayed ? shaped * sigmoid<T>(-logit) : derivative;
  }
  return {value, derivative, ratio, clipped};
}

template <class T>
Vector<T> one_where(Mask<T> set) {
  return set ? fill(T(1)) : Vector<T>{};
}

template <class T>
Mask<T> load_replayed(const bool* replayed, int64_t i, int64_t count) {
  return replayed == nullptr ? Mask<T>{} : load_flags<T>(replayed + i, count);
}

template <class T>
Finished<T> load_finished(SumVectors<T> sums, int64_t i, int64_t count) {
  return finished<T>(load(sums.gap + i, count, T(0)), load(sums.rest + i, count, T(0)),
                     load(sums.moment + i, count, T(0)));
}

// The first fields of a matrix of results, for some tokens.
template <class T, int FIELDS>
void put(T* results, int64_t tokens, int64_t i, int64_t count, const Vector<T> (&fields)[FIELDS]) {
  for (int k = 0; k < FIELDS; ++k) {
    store(results + k * tokens + i, fields[k], count);
  }
}

template <class T>
void finish(SumVectors<T> sums, T* results, int64_t tokens, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += lanes<T>) {
    const Finished<T> row = load_finished<T>(sums, i, end - i);
    put<T>(results, tokens, i, end - i, {row.mean, row.log_prob, row.entropy});
  }
}

template <class T>
void policy_rows(SumVectors<T> sums, TokenVectors<T> own, const RowTerms<T>& terms, T* results, int64_t tokens,
                 int64_t begin, int64_t end) {
  const T h = -terms.entropy_coef / terms.normalizer;
  for (int64_t i = begin; i < end; i += lanes<T>) {
    const int64_t count = end - i;
    const Finished<T> row = load_finished<T>(sums, i, count);
    const Objective<T> token = objective_of<T>(row.log_prob, load(own.old_log_prob + i, count, T(0)),
                                               load(own.advantage + i, count, T(0)),
                                               load_replayed<T>(own.replayed, i, count), terms.clipping);
    const Vector<T> c = -token.derivative / terms.normalizer;
    const Vector<T> rest = load(sums.rest + i, count, T(0));
    const Vector<T> gap = at_least(load(sums.gap + i, count, T(0)), T(underflown));
    Vector<T> scale = T(-1) / row.partition;
    if (terms.temperature != nullptr) {
      scale /= load(terms.temperature + i, count, T(1));
    }
    const Vector<T> at_target = terms.plain ? -rest : h * exponential<T>(gap) * (gap - row.mean) - rest * c;
    put<T>(results, tokens, i, count,
           {token.value, row.log_prob, row.entropy, token.ratio, one_where<T>(token.clipped), row.mean, c,
            terms.plain ? scale * c : scale, at_target});
  }
}

template <class T>
TokenSums objective(const T* log_prob, const T* entropy, TokenVectors<T> own, const bool* mask,
                    const Clipping<T>& clipping, T* results, T* derivative, int64_t tokens, int64_t begin,
                    int64_t end) {
  TokenSums sums = {0, 0, 0};
  for (int64_t i = begin; i < end; i += lanes<T>) {
    const int64_t count = end - i;
    const Mask<T> kept = load_flags<T>(mask == nullptr ? nullptr : mask + i, count);
    // Values at masked tokens, including NaN, are replaced before any arithmetic.
    const auto counted = [&](const T* from) {
      return from == nullptr ? Vector<T>{} : kept ? load(from + i, count, T(0)) : Vector<T>{};
    };
    const Vector<T> own_log_prob = counted(log_prob), own_entropy = counted(entropy);
    const Objective<T> token = objective_of<T>(own_log_prob, counted(own.old_log_prob), counted(own.advantage),
                                               load_replayed<T>(own.replayed, i, count), clipping);
    put<T>(results, tokens, i, count,
           {own_log_prob, own_entropy, kept ? token.ratio : Vector<T>{}, one_where<T>(token.clipped)});
    store(derivative + i, token.derivative, count);
    for (int k = 0; k < lanes<T>; ++k) {
      sums.value += token.value[k];
      sums.entropy += own_entropy[k];
      sums.count -= kept[k];
    }
  }
  return sums;
}

}  // namespace

template <class T>
TokenKernels<T> token_kernels() {
  return {finish<T>, policy_rows<T>, objective<T>};
}

template TokenKernels<float> token_kernels<float>();
template TokenKernels<double> token_kernels<double>();

}  // namespace exgrpo::EXGRPO_VARIANT
