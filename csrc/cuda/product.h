// Arguments and tile sizes of the product. Plain C++, because the host needs both.
#ifndef EXGRPO_CUDA_PRODUCT_H
#define EXGRPO_CUDA_PRODUCT_H

#include <cstdint>

namespace exgrpo {

// Must match exgrpo.kernels.cuda_chunks.cuda_fused.ProductArguments field by field.
struct ProductArguments {
  int64_t rows;
  int64_t vocabulary;
  int64_t width;
  const void* hidden;        // [rows, D] bfloat16; the inner stride is 1, also of weight and out
  int64_t hidden_stride;
  const void* weight;        // [V, D] bfloat16
  int64_t weight_stride;
  void* out;                 // [rows, V] bfloat16, receives exp(d), 0 at the target, or F; null: forward only
  int64_t out_stride;
  const float* bias;         // [V]; null: none
  const int64_t* target;     // [rows]; -1 if the weight does not have it
  const float* anchor;       // [rows]
  const float* temperature;  // [rows]; null: 1
  float* rests;              // [column tiles, rows], result: S over the tile's columns
  float* moments;            // [column tiles, rows], result: M over the tile's columns
  const float* at_target;    // [rows], F at the target: out receives F = exp(d) (intercept + slope d), and there are no
                             // sums; null: exp(d)
  const float* intercept;    // [rows]; null, as slope: 1 and 0
  const float* slope;        // [rows]
};

// What a call writes beside, or instead of, the sums of tiles.
enum Result { SUMS, EXPONENTIALS, GRADIENT };

constexpr int TILE_ROWS = 128;
constexpr int TILE_COLUMNS = 192;  // limit of a warpgroup's registers; larger means fewer copies
constexpr int TILE_DEPTH = 64;     // step along D: the 128 bytes over which shared memory is swizzled
constexpr int STAGES = 4;          // steps whose copies are in flight
constexpr int CONSUMERS = 2;       // warpgroups that alternate tiles
constexpr int CLUSTER = 2;         // blocks with tiles of the same columns: each copies a part of the weight for all
constexpr int BAND_ROWS = CLUSTER * TILE_ROWS;
constexpr int GROUP_BANDS = 8;  // that pass over the vocabulary together: they and as much weight fit the L2 cache
constexpr int PRODUCT_THREADS = 128 * (1 + CONSUMERS);

constexpr int HIDDEN_BYTES = TILE_ROWS * TILE_DEPTH * 2;  // of a step
constexpr int WEIGHT_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;
constexpr int STEP_BYTES = HIDDEN_BYTES + WEIGHT_BYTES;
constexpr int WEIGHT_ROWS = TILE_COLUMNS / CLUSTER;  // copied by a block per step
constexpr int PIECE = 64;                            // rows and columns of the result per copy
constexpr int PIECE_BYTES = PIECE * PIECE * 2;
constexpr int PLACES = TILE_COLUMNS / PIECE;  // buffers for a consumer's pieces until they are copied
constexpr int BARRIERS_AT = STAGES * STEP_BYTES + CONSUMERS * PLACES * PIECE_BYTES;
constexpr int PRODUCT_SHARED = BARRIERS_AT + 2 * STAGES * 8;
static_assert(STAGES >= 2, "a step's place is free when the next one is under way");
static_assert(PRODUCT_SHARED <= 227 << 10, "what a block of Hopper may have");

// A cluster's share of the result is BAND_ROWS by TILE_COLUMNS; these functions count shares.
struct Tiles {
  int bands, columns, count;
};

}  // namespace exgrpo

#endif
