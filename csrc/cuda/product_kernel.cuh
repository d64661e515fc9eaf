// hidden @ weight.T whose epilogue is the softmax: the logits stay in registers. One thread has the operands' tiles
// copied to shared memory; two warpgroups take the result's tiles in turn, one multiplying while the other is at its
// epilogue. The blocks of a cluster have tiles of the same columns at the same time: they share what is read of the
// weight.
//
// x_v is a raw product, z_v = x_v + b_v the logit, y the target, a the row's anchor, d_v = (z_v - a) / tau. As
// triton_chunks/fused_kernels.py.
#ifndef EXGRPO_CUDA_PRODUCT_KERNEL_CUH
#define EXGRPO_CUDA_PRODUCT_KERNEL_CUH

#include "hopper.cuh"
#include "product.h"

namespace exgrpo {

constexpr float UNDERFLOWN = -1e4f;  // stands for every d below it, as in chunks/softmax.py
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

constexpr int WARPGROUP = 128;
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;
constexpr int BLOCKS_OF_ROWS = TILE_ROWS / 64;  // rows of one matrix instruction
constexpr int INSTRUCTION_DEPTH = 16;

// Numbers of hardware barriers: the first of CONSUMERS each.
constexpr int TURN = 1;                    // the other's main loop is over
constexpr int STAGED = TURN + CONSUMERS;   // a consumer's own threads

struct SharedTiles {
  unsigned char* base;

  __device__ unsigned char* hidden(int stage) const { return base + stage * 2 * STEP_BYTES; }
  __device__ unsigned char* weight(int stage) const { return hidden(stage) + STEP_BYTES; }
  __device__ unsigned char* staged(int consumer) const {
    return base + STAGES * 2 * STEP_BYTES + consumer * STAGED_BYTES;
  }
  __device__ SharedBarrier* full(int stage) const {
    return reinterpret_cast<SharedBarrier*>(base + BARRIERS_AT) + stage;
  }
  __device__ SharedBarrier* empty(int stage) const { return full(STAGES) + stage; }
};

struct Tile {
  int row, column;  // the first ones
};

// This block's tile of the cluster's index-th share: GROUP_BANDS bands in turn, then the same with the next columns.
__device__ inline Tile tile_at(int index, const Tiles& tiles) {
  const int group = index / (GROUP_BANDS * tiles.columns);
  const int left = tiles.bands - group * GROUP_BANDS;
  const int height = left < GROUP_BANDS ? left : GROUP_BANDS;
  const int within = index - group * GROUP_BANDS * tiles.columns;
  const int band = group * GROUP_BANDS + within % height;
  return {band * BAND_ROWS + static_cast<int>(cluster_rank()) * TILE_ROWS, within / height * TILE_COLUMNS};
}

__device__ inline int first_share() { return blockIdx.x / CLUSTER; }
__device__ inline int shares_at_once() { return gridDim.x / CLUSTER; }

// One thread: all tiles of this block, step after step, into whichever stage is free in all blocks.
__device__ inline void produce(
    const TensorMap& hidden, const TensorMap& weight, const SharedTiles& shared, const Tiles& tiles, int steps) {
  const int part = static_cast<int>(cluster_rank());
  uint32_t round = 0;
  for (int index = first_share(); index < tiles.count; index += shares_at_once()) {
    const Tile tile = tile_at(index, tiles);
    for (int step = 0; step < steps; ++step, ++round) {
      const int stage = round % STAGES;
      barrier_wait(shared.empty(stage), (round / STAGES & 1) ^ 1);
      barrier_expect(shared.full(stage), 2 * STEP_BYTES);
      load_box(hidden, shared.hidden(stage), shared.full(stage), step * TILE_DEPTH, tile.row);
      // The barrier may hear of another block's part before it is told to expect it: it waits for that, too.
      load_box_for(
          (1 << CLUSTER) - 1, weight, shared.weight(stage) + part * WEIGHT_BYTES, shared.full(stage), step * TILE_DEPTH,
          tile.column + part * WEIGHT_ROWS);
    }
  }
}

// A matrix in shared memory whose rows are 128 bytes, swizzled, eight rows after eight. The offset between groups of
// eight rows is in bits 32 to 45, the kind of swizzle in 62 and 63; all addresses without their lowest four bits.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

using Accumulator = float[BLOCKS_OF_ROWS][64];

// The stage of a round may be filled anew, as far as this warp is concerned; by all blocks, since all fill it.
__device__ inline void release(const SharedTiles& shared, uint32_t round) {
  const int lane = threadIdx.x % WARP;
  if (lane < CLUSTER) barrier_arrive(shared.empty(round % STAGES), lane);
}

// Starts all products of a tile; those of its last step may still be unfinished.
__device__ inline void main_loop(Accumulator& x, const SharedTiles& shared, uint32_t first_round, int steps) {
  for (int step = 0; step < steps; ++step) {
    const uint32_t round = first_round + step;
    const int stage = round % STAGES;
    barrier_wait(shared.full(stage), round / STAGES & 1);
    const uint32_t hidden = shared_address(shared.hidden(stage));
    const uint32_t weight = shared_address(shared.weight(stage));
    products_begin();
#pragma unroll
    for (int depth = 0; depth < TILE_DEPTH; depth += INSTRUCTION_DEPTH) {
#pragma unroll
      for (int block = 0; block < BLOCKS_OF_ROWS; ++block) {
        const uint32_t rows = hidden + block * 64 * TILE_DEPTH * 2;
        multiply(x[block], describe(rows + depth * 2), describe(weight + depth * 2), step > 0 || depth > 0);
      }
    }
    products_commit();
    products_wait<1>();
    if (step > 0) release(shared, round - 1);
  }
}

struct Row {
  float anchor, scale;  // what turns z - a into d / ln 2: powers of 2 are what the machine has
  int target;           // relative to the tile
  float rest, moment;
};

__device__ inline Row row_at(const ProductArguments& given, int row, int first_column) {
  Row found{0.0f, LOG2_E, -1, 0.0f, 0.0f};
  if (row >= given.rows) return found;
  found.anchor = given.anchor[row];
  if (given.temperature != nullptr) found.scale /= given.temperature[row];
  const int64_t target = given.target[row] - first_column;
  if (target >= 0 && target < TILE_COLUMNS) found.target = static_cast<int>(target);
  return found;
}

// exp(d), 0 at the target and beyond the vocabulary; counted in the row's sums.
__device__ __forceinline__ float exponential(Row& row, float z, int column, int columns) {
  float d = (z - row.anchor) * row.scale;
  if (d < UNDERFLOWN) d = UNDERFLOWN;  // not fmaxf: NaN stays NaN
  const float e = column == row.target || column >= columns ? 0.0f : exp2f(d);
  row.rest += e;
  row.moment += e * d;
  return e;
}

__device__ inline float over_four_lanes(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// The swizzled place of a pair of results: 16-byte pieces of a 128-byte row trade places by the row's number.
__device__ __forceinline__ unsigned char* place(unsigned char* staged, int row, int column) {
  const int half = column / HALF_COLUMNS, byte = column % HALF_COLUMNS * 2;
  return staged + half * HALF_BYTES + row * 128 + (byte ^ (row % 8 << 4));
}

// Exponentials and sums of a tile; the exponentials, if wanted, to `staged`.
__device__ inline void epilogue(
    const ProductArguments& given, const Accumulator& x, const Tile& tile, unsigned char* staged) {
  const int thread = threadIdx.x % WARPGROUP;
  const int first_row = thread / WARP * 16 + thread % WARP / 4;
  const int first_column = thread % 4 * 2;
  const int64_t left = given.vocabulary - tile.column;
  const int columns = left < TILE_COLUMNS ? static_cast<int>(left) : TILE_COLUMNS;
#pragma unroll
  for (int block = 0; block < BLOCKS_OF_ROWS; ++block) {
    const int upper = block * 64 + first_row, lower = upper + 8;
    Row rows[2] = {row_at(given, tile.row + upper, tile.column), row_at(given, tile.row + lower, tile.column)};
#pragma unroll
    for (int j = 0; j < TILE_COLUMNS / 8; ++j) {
      const int column = 8 * j + first_column;
      float bias[2] = {};
      if (given.bias != nullptr) {
        if (column < columns) bias[0] = given.bias[tile.column + column];
        if (column + 1 < columns) bias[1] = given.bias[tile.column + column + 1];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = exponential(rows[i], x[block][4 * j + 2 * i] + bias[0], column, columns);
        const float high = exponential(rows[i], x[block][4 * j + 2 * i + 1] + bias[1], column + 1, columns);
        if (given.out == nullptr) continue;
        *reinterpret_cast<uint32_t*>(place(staged, upper + 8 * i, column)) = pack_bfloat16(low, high);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float rest = over_four_lanes(rows[i].rest), moment = over_four_lanes(rows[i].moment);
      const int row = tile.row + upper + 8 * i;
      if (thread % 4 != 0 || row >= given.rows) continue;
      const int64_t partial = static_cast<int64_t>(tile.column / TILE_COLUMNS) * given.rows + row;
      given.rests[partial] = rest;
      given.moments[partial] = moment * LN_2;
    }
  }
}

// What is staged, to memory; whoever stages next waits for `stores_read` of the warpgroup's first thread.
__device__ inline void store(
    const ProductArguments& given, const TensorMap& out, const unsigned char* staged, const Tile& tile) {
  for (int half = 0; half * HALF_COLUMNS < TILE_COLUMNS; ++half) {
    const int column = tile.column + half * HALF_COLUMNS;
    if (column < given.vocabulary) store_box(out, staged + half * HALF_BYTES, column, tile.row);
  }
}

// One warpgroup: every other tile of this block.
__device__ inline void consume(
    const ProductArguments& given, const TensorMap& out, const SharedTiles& shared, const Tiles& tiles, int steps,
    int consumer) {
  unsigned char* staged = shared.staged(consumer);
  const bool first = threadIdx.x % WARPGROUP == 0;
  int number = 0;
  for (int index = first_share(); index < tiles.count; index += shares_at_once(), ++number) {
    if (number % CONSUMERS != consumer) continue;
    const Tile tile = tile_at(index, tiles);
    const uint32_t round = static_cast<uint32_t>(number) * steps;
    Accumulator x;
    if (number > 0) numbered_sync(TURN + consumer, 2 * WARPGROUP);
    main_loop(x, shared, round, steps);
    if (index + shares_at_once() < tiles.count) {
      numbered_arrive(TURN + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
    }
    products_wait<0>();
    release(shared, round + steps - 1);
    if (given.out != nullptr) {
      if (first) stores_read();
      numbered_sync(STAGED + consumer, WARPGROUP);
    }
    epilogue(given, x, tile, staged);
    if (given.out != nullptr) {
      visible_to_copies();
      numbered_sync(STAGED + consumer, WARPGROUP);
      if (first) store(given, out, staged, tile);
    }
  }
  if (given.out != nullptr && first) stores_read();
}

__global__ void __launch_bounds__(PRODUCT_THREADS, 1) product_kernel(
    const __grid_constant__ TensorMap hidden, const __grid_constant__ TensorMap weight,
    const __grid_constant__ TensorMap out, const __grid_constant__ ProductArguments given, const Tiles tiles) {
  const SharedTiles shared{shared_memory()};
  const int steps = static_cast<int>((given.width + TILE_DEPTH - 1) / TILE_DEPTH);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), CLUSTER * WARPGROUP / WARP);
    }
    barriers_visible();
    prefetch(hidden);
    prefetch(weight);
  }
  cluster_arrive();
  cluster_wait();
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == CONSUMERS) {
    registers_give<PRODUCER_REGISTERS>();
    if (threadIdx.x % WARPGROUP == 0) produce(hidden, weight, shared, tiles, steps);
  } else {
    registers_take<CONSUMER_REGISTERS>();
    consume(given, out, shared, tiles, steps, warpgroup);
  }
  // The other blocks may still copy to this one, and arrive at its barriers.
  cluster_arrive();
  cluster_wait();
}

}  // namespace exgrpo

#endif
