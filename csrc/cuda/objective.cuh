// The objective of a row whose sums are known, and the factors of its gradient: chunks/softmax.py, objective.py.
#ifndef EXGRPO_CUDA_OBJECTIVE_CUH
#define EXGRPO_CUDA_OBJECTIVE_CUH

#include "device.cuh"
#include "rows.h"

namespace exgrpo {

constexpr float UNDERFLOWN = -1e4f;     // stands for every d below it, as in chunks/softmax.py
constexpr float MAX_LOG_RATIO = 20.0f;  // as in objective.py

// NaN stays NaN, which fmaxf would not let it.
__device__ __forceinline__ float bounded(float distance) { return distance < UNDERFLOWN ? UNDERFLOWN : distance; }

struct Objective {
  float value, coefficient, ratio, clipped;
};

struct Factors {
  float mean;      // U
  float c;         // gradient with respect to the log-probability
  float h;         // and to the entropy
  float at_target; // F at the target but for the slope of the cap
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline Objective policy_objective(const RowsArguments& given, int64_t row, float log_prob) {
  const float advantage = given.advantage[row];
  const bool replayed = given.replayed != nullptr && given.replayed[row];
  const float old = given.old_log_prob[row];
  const float log_ratio = log_prob - (old == INFINITY ? log_prob : old);  // inf stands for the present policy
  Objective found{};
  found.ratio = expf(log_ratio > MAX_LOG_RATIO ? MAX_LOG_RATIO : log_ratio);
  found.value = found.ratio * advantage;
  found.coefficient = log_ratio > MAX_LOG_RATIO ? 0.0f : found.value;
  if (replayed && given.has_beta) {
    const float logit = log_ratio - given.log_beta;
    found.value = advantage * sigmoid(logit);
    found.coefficient = found.value * sigmoid(-logit);
  } else if (!replayed && given.has_clip) {
    const bool above = advantage > 0 && found.ratio > given.clip_high;
    const bool below = advantage < 0 && found.ratio < given.clip_low;
    if (above || below) {
      found.value = (above ? given.clip_high : given.clip_low) * advantage;
      found.coefficient = 0;
      found.clipped = 1;
    }
  }
  return found;
}

// `inverse`: 1 / tau. `writes`: this thread stores the row's results.
__device__ inline Factors policy_row(
    const RowsArguments& given, int64_t row, float inverse, float gap, float rest, float moment, bool writes) {
  const float at_target = expf(gap);
  const float excess = rest + expm1f(gap);
  const float mean = (moment + at_target * bounded(gap)) / (1.0f + excess);
  const float log_z = log1pf(excess);
  const float log_prob = gap - log_z;
  const Objective objective = policy_objective(given, row, log_prob);
  const float normalizer = static_cast<float>(*given.normalizer);
  const float c = -objective.coefficient / normalizer;
  const float h = -given.entropy_coef / normalizer;
  const Factors factors{mean, c, h, h * at_target * (bounded(gap) - mean) - rest * c};
  if (writes) {
    const float scale = -inverse / (1.0f + excess);
    const float results[RESULTS] = {
        objective.value, log_prob, log_z - mean, objective.ratio, objective.clipped, mean, c, scale, factors.at_target};
    for (int field = 0; field < RESULTS; ++field) given.results[field * given.rows + row] = results[field];
  }
  return factors;
}

}  // namespace exgrpo

#endif
