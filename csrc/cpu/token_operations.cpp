// The operators over tokens, responses and sequences.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "tokens.h"

namespace exgrpo {
namespace {

constexpr int64_t tokens_of_a_block = 4096;  // summed sequentially, independent of the number of threads
constexpr int64_t tokens_of_a_thread = 4096;
constexpr double std_epsilon = 1e-6;

template <class T>
TokenKernels<T> kernels() {
  EXGRPO_PICK(token_kernels<T>())
}

template <class T>
Clipping<T> clipping(std::optional<double> low, std::optional<double> high, std::optional<double> beta,
                     const OptionalTensor& replayed) {
  check(low.has_value() == high.has_value(), "clip_low", "a number if clip_high is one");
  const bool shapes = beta && replayed;
  return {low.has_value(), shapes, T(low.value_or(0)), T(high.value_or(0)), T(shapes ? std::log(*beta) : 0)};
}

template <class T>
SumVectors<T> sum_vectors(const Tensor& gap, const Tensor& rest, const Tensor& moment) {
  const int64_t rows = gap.numel();
  return {values<T>(gap, rows, "gap"), values<T>(rest, rows, "rest"), values<T>(moment, rows, "moment")};
}

template <class T>
TokenVectors<T> token_vectors(const Tensor& old_log_prob, const Tensor& advantage, const OptionalTensor& replayed,
                              int64_t tokens) {
  return {values<T>(old_log_prob, tokens, "old_log_prob"), values<T>(advantage, tokens, "advantage"),
          values<bool>(replayed, tokens, "replayed")};
}

Tensor finish(Tensor gap, Tensor rest, Tensor moment) {
  return for_type_of(gap, "gap", [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = gap.numel();
    const auto sums = sum_vectors<T>(gap, rest, moment);
    Tensor results = new_tensor(gap, {3, rows});
    T* out = values<T>(results, 3 * rows, "results");
    const auto run = kernels<T>().finish;
    torch::stable::parallel_for(0, rows, tokens_of_a_thread,
                                [&](int64_t begin, int64_t end) { run(sums, out, rows, begin, end); });
    return results;
  });
}

Tensor policy_rows(Tensor gap, Tensor rest, Tensor moment, Tensor old_log_prob, Tensor advantage,
                   OptionalTensor replayed, OptionalTensor temperature, Tensor normalizer,
                   std::optional<double> clip_low, std::optional<double> clip_high, std::optional<double> beta,
                   double entropy_coef, bool plain) {
  return for_type_of(gap, "gap", [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = gap.numel();
    const auto sums = sum_vectors<T>(gap, rest, moment);
    const auto own = token_vectors<T>(old_log_prob, advantage, replayed, rows);
    const Clipping<T> bounds = clipping<T>(clip_low, clip_high, beta, replayed);
    const T divisor = *values<T>(normalizer, 1, "normalizer");
    const RowTerms<T> terms = {bounds, divisor, T(entropy_coef), values<T>(temperature, rows, "temperature"), plain};
    Tensor results = new_tensor(gap, {9, rows});
    T* out = values<T>(results, 9 * rows, "results");
    const auto run = kernels<T>().policy_rows;
    torch::stable::parallel_for(0, rows, tokens_of_a_thread,
                                [&](int64_t begin, int64_t end) { run(sums, own, terms, out, rows, begin, end); });
    return results;
  });
}

std::tuple<Tensor, Tensor, Tensor> token_objective(Tensor log_prob, OptionalTensor entropy, Tensor old_log_prob,
                                                   Tensor advantage, OptionalTensor replayed, OptionalTensor mask,
                                                   std::optional<double> clip_low, std::optional<double> clip_high,
                                                   std::optional<double> beta) {
  return for_type_of(log_prob, "log_prob", [&](auto zero) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = decltype(zero);
    const int64_t tokens = log_prob.numel(), blocks = (tokens + tokens_of_a_block - 1) / tokens_of_a_block;
    const T *current = values<T>(log_prob, tokens, "log_prob"), *spread = values<T>(entropy, tokens, "entropy");
    const auto own = token_vectors<T>(old_log_prob, advantage, replayed, tokens);
    const bool* counted = values<bool>(mask, tokens, "mask");
    const Clipping<T> bounds = clipping<T>(clip_low, clip_high, beta, replayed);
    Tensor sums = new_tensor(log_prob, {3}, ScalarType::Double), results = new_tensor(log_prob, {4, tokens});
    Tensor derivatives = new_tensor(log_prob, {tokens});
    T *out = values<T>(results, 4 * tokens, "results"), *slope = values<T>(derivatives, tokens, "derivatives");
    const auto run = kernels<T>().objective;
    std::vector<TokenSums> parts(blocks);
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * tokens_of_a_block, last = std::min(tokens, first + tokens_of_a_block);
        parts[i] = run(current, spread, own, counted, bounds, out, slope, tokens, first, last);
      }
    });
    double* total = values<double>(sums, 3, "sums");
    std::fill(total, total + 3, 0.0);
    for (const TokenSums& part : parts) {
      total[0] += part.value;
      total[1] += part.entropy;
      total[2] += part.count;
    }
    return {sums, results, derivatives};
  });
}

Tensor centre_groups(Tensor reward, Tensor group, bool scale_by_std) {
  const int64_t responses = reward.numel();
  const double* given = values<double>(reward, responses, "reward");
  const int64_t* id = values<int64_t>(group, responses, "group");
  Tensor result = new_tensor(reward, {responses});
  double* centred = values<double>(result, responses, "result");
  std::vector<int64_t> order(responses);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [id](int64_t a, int64_t b) { return id[a] != id[b] ? id[a] < id[b] : a < b; });
  for (auto first = order.begin(); first != order.end();) {
    const auto last = std::find_if(first, order.end(), [&](int64_t i) { return id[i] != id[*first]; });
    const double members = static_cast<double>(last - first);
    double total = 0, squares = 0;
    std::for_each(first, last, [&](int64_t i) { total += given[i]; });
    const double mean = total / members;
    for (auto i = first; i != last; ++i) {
      centred[*i] = given[*i] - mean;
      squares += centred[*i] * centred[*i];
    }
    if (scale_by_std) {
      const double deviation = std::sqrt(squares / std::max(members - 1, 1.0)) + std_epsilon;
      std::for_each(first, last, [&](int64_t i) { centred[i] /= deviation; });
    }
    first = last;
  }
  return result;
}

Tensor segment_mean(Tensor of, Tensor counted, Tensor offsets) {
  return for_type_of(of, "values", [&](auto zero) {
    using T = decltype(zero);
    const int64_t tokens = of.numel(), segments = offsets.numel() - 1;
    const T* given = values<T>(of, tokens, "values");
    const bool* kept = values<bool>(counted, tokens, "counted");
    const int64_t* bound = values<int64_t>(offsets, segments + 1, "offsets");
    const bool within = segments >= 0 && bound[0] >= 0 && bound[segments] <= tokens;
    check(within && std::is_sorted(bound, bound + segments + 1), "offsets", "ascending positions among the values");
    Tensor result = new_tensor(of, {segments});
    T* means = values<T>(result, segments, "result");
    const int64_t grain = std::max<int64_t>(1, tokens_of_a_thread * segments / std::max<int64_t>(1, tokens));
    torch::stable::parallel_for(0, segments, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double total = 0, count = 0;
        for (int64_t t = bound[i]; t < bound[i + 1]; ++t) {
          total += kept[t] ? static_cast<double>(given[t]) : 0.0;
          count += kept[t];
        }
        means[i] = static_cast<T>(total / std::max(count, 1.0));
      }
    });
    return result;
  });
}

}  // namespace
}  // namespace exgrpo

STABLE_TORCH_LIBRARY_FRAGMENT(exgrpo_C, library) {
  library.def("finish(Tensor gap, Tensor rest, Tensor moment) -> Tensor");
  library.def(
      "policy_rows(Tensor gap, Tensor rest, Tensor moment, Tensor old_log_prob, Tensor advantage, Tensor? replayed, "
      "Tensor? temperature, Tensor normalizer, float? clip_low, float? clip_high, float? beta, float entropy_coef, "
      "bool plain) -> Tensor");
  library.def(
      "token_objective(Tensor log_prob, Tensor? entropy, Tensor old_log_prob, Tensor advantage, Tensor? replayed, "
      "Tensor? mask, float? clip_low, float? clip_high, float? beta) -> (Tensor, Tensor, Tensor)");
  library.def("centre_groups(Tensor reward, Tensor group, bool scale_by_std) -> Tensor");
  library.def("segment_mean(Tensor values, Tensor counted, Tensor offsets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CPU, library) {
  library.impl("finish", TORCH_BOX(&exgrpo::finish));
  library.impl("policy_rows", TORCH_BOX(&exgrpo::policy_rows));
  library.impl("token_objective", TORCH_BOX(&exgrpo::token_objective));
  library.impl("centre_groups", TORCH_BOX(&exgrpo::centre_groups));
  library.impl("segment_mean", TORCH_BOX(&exgrpo::segment_mean));
}
