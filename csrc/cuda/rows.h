// What the row kernel is given, and how a row is shared out over a cluster. Plain C++: the host needs both.
#ifndef EXGRPO_CUDA_ROWS_H
#define EXGRPO_CUDA_ROWS_H

#include <cstdint>

namespace exgrpo {

enum Output : int32_t {
  NOTHING,       // statistics alone
  EXPONENTIALS,  // F where the factor r does the rest: exp(d), and -S at the target
  GRADIENT,      // F with the gradient of an entropy or the slope of a cap, after the objective of the row
};

constexpr int RESULTS = 9;  // the fields of chunks.softmax.PolicyRows

// Field by field exgrpo.kernels.cuda_chunks.binding.RowsArguments. All tensors are contiguous but for the strides.
struct RowsArguments {
  int64_t rows;
  int64_t vocabulary;
  const float* logits;       // [rows, V], raw products
  int64_t stride;            // between rows of logits
  void* out;                 // [rows, V] float or bfloat16; may be logits
  int64_t out_stride;
  int32_t out_is_bfloat16;
  int32_t output;            // an Output
  const float* bias;         // [V]; null: none
  const int64_t* target;     // [rows]
  const float* temperature;  // [rows]; null: 1
  float softcap;             // 0: none
  float* anchor;             // [rows], results: a,
  float* gap;                // d_y,
  float* rest;               // S,
  float* moment;             // and M
  // With GRADIENT alone.
  const float* old_log_prob;  // [rows]
  const float* advantage;     // [rows]
  const uint8_t* replayed;    // [rows] bool; null: none is
  const double* normalizer;   // one number
  int32_t has_clip;
  int32_t has_beta;
  float clip_low;             // the lowest and the highest ratio that are not clipped
  float clip_high;
  float log_beta;
  float entropy_coef;
  float* results;             // [RESULTS, rows]
};

struct RowsPlan {
  int32_t cluster;       // blocks that hold a row together; 0: no cluster can
  int32_t threads;       // of a block
  int32_t columns;       // of a block, the last ones of a row have fewer
  int32_t shared_bytes;  // of a block
};

constexpr int ROW_THREADS = 256;
constexpr int ROW_BLOCKS_PER_MULTIPROCESSOR = 3;
constexpr int COLUMN_UNIT = 8;        // columns of 16 bytes of bfloat16: a block begins at a multiple of them
constexpr int SLOTS = 3;              // numbers that a block's threads find together: S, M, the largest logit
constexpr int SLOT_WIDTH = ROW_THREADS / 32 + 1;
constexpr int LARGEST_PORTABLE = 8;   // blocks of a cluster that every GPU can place
constexpr int LARGEST_CLUSTER = 16;
constexpr int MOST_SHARED = 227 << 10;
constexpr int MULTIPROCESSOR_SHARED = 228 << 10;
constexpr int RESERVED_SHARED = 1 << 10;  // that each block takes besides its own

// The smallest cluster whose blocks leave room for others on their multiprocessor: while some wait for their rows,
// others compute. Where no portable one does, the smallest of the larger ones that holds the row.
inline RowsPlan plan_rows(int64_t vocabulary) {
  const auto planned = [vocabulary](int cluster) {
    const int64_t units = (vocabulary + COLUMN_UNIT - 1) / COLUMN_UNIT;
    const int64_t columns = (units + cluster - 1) / cluster * COLUMN_UNIT;
    const int64_t bytes = columns * 4 + SLOTS * SLOT_WIDTH * 4;
    if (bytes > MOST_SHARED) return RowsPlan{};
    return RowsPlan{cluster, ROW_THREADS, static_cast<int32_t>(columns), static_cast<int32_t>(bytes)};
  };
  constexpr int roomy = MULTIPROCESSOR_SHARED / ROW_BLOCKS_PER_MULTIPROCESSOR - RESERVED_SHARED;
  for (int cluster = 1; cluster <= LARGEST_PORTABLE; cluster *= 2) {
    const RowsPlan plan = planned(cluster);
    if (plan.cluster && plan.shared_bytes <= roomy) return plan;
  }
  const RowsPlan plan = planned(LARGEST_PORTABLE);
  return plan.cluster ? plan : planned(LARGEST_CLUSTER);
}

}  // namespace exgrpo

#endif
