// hidden @ weight.T with the softmax as its epilogue: the logits stay in registers. One thread starts the copies of
// the operands' tiles to shared memory; two warpgroups alternate the result's tiles, one multiplying while the other
// runs its epilogue. The blocks of a cluster compute tiles of the same columns at the same time and share their reads
// of the weight.
//
// x_v is a raw product, z_v = x_v + b_v the logit, y the target, a the row's anchor, d_v = (z_v - a) / tau, as in
// triton_chunks/fused_kernels.py.
#ifndef EXGRPO_CUDA_PRODUCT_KERNEL_CUH
#define EXGRPO_CUDA_PRODUCT_KERNEL_CUH

#include "hopper.cuh"
#include "product.h"

namespace exgrpo {

constexpr float UNDERFLOWN = -1e4f;  // replaces every d below it, as in chunks/softmax.py
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

constexpr int WARPGROUP = 128;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
constexpr int BLOCKS_OF_ROWS = TILE_ROWS / PIECE;  // one matrix instruction has PIECE rows
constexpr int INSTRUCTION_DEPTH = 16;

// Numbers of hardware barriers, the first of CONSUMERS each.
constexpr int TURN = 1;                    // the other consumer's main loop has ended
constexpr int STAGED = TURN + CONSUMERS;   // among a consumer's threads

struct SharedTiles {
  unsigned char* base;

  __device__ unsigned char* hidden(int stage) const { return base + stage * STEP_BYTES; }
  __device__ unsigned char* weight(int stage) const { return hidden(stage) + HIDDEN_BYTES; }
  __device__ unsigned char* staged(int consumer) const {
    return base + STAGES * STEP_BYTES + consumer * PLACES * PIECE_BYTES;
  }
  __device__ SharedBarrier* full(int stage) const {
    return reinterpret_cast<SharedBarrier*>(base + BARRIERS_AT) + stage;
  }
  __device__ SharedBarrier* empty(int stage) const { return full(STAGES) + stage; }
};

struct Tile {
  int row, column;  // the first ones
};

// This block's tile of the cluster's index-th share: GROUP_BANDS bands in turn, then their next columns.
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

// Run by one thread: copies all tiles of this block, step by step, into a stage that is free in all blocks.
__device__ inline void produce(
    const TensorMap& hidden, const TensorMap& weight, const SharedTiles& shared, const Tiles& tiles, int steps) {
  const int part = static_cast<int>(cluster_rank());
  uint32_t round = 0;
  for (int index = first_share(); index < tiles.count; index += shares_at_once()) {
    const Tile tile = tile_at(index, tiles);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ++round) {
      const int stage = round % STAGES;
      barrier_wait(shared.empty(stage), (round / STAGES & 1) ^ 1);
      barrier_expect(shared.full(stage), STEP_BYTES);
      load_box(hidden, shared.hidden(stage), shared.full(stage), step * TILE_DEPTH, tile.row);
      // Another block's part may arrive before the barrier is set to expect it; the barrier counts it anyway.
      load_box_for(
          (1 << CLUSTER) - 1, weight, shared.weight(stage) + part * (WEIGHT_BYTES / CLUSTER), shared.full(stage),
          step * TILE_DEPTH, tile.column + part * WEIGHT_ROWS);
    }
  }
}

// A matrix in shared memory with swizzled rows of 128 bytes in groups of eight. The offset between groups of
// eight rows is in bits 32 to 45, the kind of swizzle in 62 and 63; all addresses without their lowest four bits.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

using Accumulator = float[BLOCKS_OF_ROWS][TILE_COLUMNS / 2];

// Signals, for this warp, that the stage of a round may be refilled; to all blocks, since all of them fill it.
__device__ inline void release(const SharedTiles& shared, uint32_t round) {
  const int lane = threadIdx.x % WARP;
  if (lane < CLUSTER) barrier_arrive(shared.empty(round % STAGES), lane);
}

// Starts all products of a tile; those of its last step may be unfinished on return.
__device__ inline void main_loop(Accumulator& x, const SharedTiles& shared, uint32_t first_round, int steps) {
#pragma unroll 1
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
        const uint32_t rows = hidden + block * PIECE * TILE_DEPTH * 2;
        multiply(x[block], describe(rows + depth * 2), describe(weight + depth * 2), step > 0 || depth > 0);
      }
    }
    products_commit();
    products_wait<1>();
    if (step > 0) release(shared, round - 1);
  }
}

struct Row {
  float anchor, scale;  // turn z - a into d / ln 2, because the hardware computes powers of 2
  int target;           // relative to the tile
  float rest, moment;
  float intercept, slope;  // turn d / ln 2 into F / exp(d)
};

template <Result RESULT>
__device__ inline Row row_at(const ProductArguments& given, int row, int first_column) {
  Row found{0.0f, LOG2_E, -1, 0.0f, 0.0f, 1.0f, 0.0f};
  if (row >= given.rows) return found;
  found.anchor = given.anchor[row];
  if (given.temperature != nullptr) found.scale /= given.temperature[row];
  if (RESULT == GRADIENT && given.slope != nullptr) {
    found.intercept = given.intercept[row];
    found.slope = given.slope[row] * LN_2;
  }
  const int64_t target = given.target[row] - first_column;
  if (target >= 0 && target < TILE_COLUMNS) found.target = static_cast<int>(target);
  return found;
}

// Returns exp(d) and adds it to the row's sums; or F.
template <Result RESULT>
__device__ __forceinline__ float exponential(Row& row, float z) {
  const float d = larger((z - row.anchor) * row.scale, UNDERFLOWN);
  const float e = power_of_two(d);
  if constexpr (RESULT == GRADIENT) return e * (row.intercept + row.slope * d);
  row.rest += e;
  row.moment += e * d;
  return e;
}

// Masks logits at the rows' targets and beyond the vocabulary: their exponentials are 0.
__device__ inline void leave_out(float (&x)[TILE_COLUMNS / 2], const Row (&rows)[2], int columns) {
#pragma unroll
  for (int j = 0; j < TILE_COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * j + threadIdx.x % 4 * 2 + i % 2;
      if (column == rows[i / 2].target || column >= columns) x[4 * j + i] = -INFINITY;
    }
  }
}

__device__ inline void add_bias(float (&x)[TILE_COLUMNS / 2], const float* bias, int columns) {
#pragma unroll
  for (int j = 0; j < TILE_COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * j + threadIdx.x % 4 * 2 + i;
      if (column >= columns) continue;
      x[4 * j + i] += bias[column];
      x[4 * j + 2 + i] += bias[column];
    }
  }
}

__device__ inline float over_four_lanes(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// Staging buffer from which a consumer's pieces of the result are copied to memory, one after the other.
template <Result RESULT>
struct Pieces {
  unsigned char* base;
  int barrier;  // of the consumer's threads

  // The swizzled place of a pair of results: 16-byte parts of a 128-byte row are permuted by the row's number.
  __device__ __forceinline__ unsigned char* place(int number, int row, int column) const {
    return base + number % PLACES * PIECE_BYTES + row * 128 + (column * 2 ^ (row % 8 << 4));
  }

  // Waits until the next buffer may be written.
  __device__ __forceinline__ void begin() const {
    if constexpr (RESULT == SUMS) return;
    if (threadIdx.x % WARPGROUP == 0) stores_read<PLACES - 1>();
    numbered_sync(barrier, WARPGROUP);
  }

  // Starts the copy of the written buffer to (column, row) of the result.
  __device__ __forceinline__ void end(int number, const TensorMap& out, int64_t vocabulary, int row, int column) const {
    if constexpr (RESULT == SUMS) return;
    visible_to_copies();
    numbered_sync(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
      if (column < vocabulary) store_box(out, base + number % PLACES * PIECE_BYTES, column, row);
      else store_nothing();
    }
  }
};

// Exponentials of PIECE columns of a tile, added to the sums and staged for their copy; or F.
template <Result RESULT>
__device__ __forceinline__ void exponentials(
    const float* x, Row (&rows)[2], const Pieces<RESULT>& pieces, int number, int first_row) {
#pragma unroll
  for (int j = 0; j < PIECE / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = exponential<RESULT>(rows[i], x[4 * j + 2 * i]);
      const float high = exponential<RESULT>(rows[i], x[4 * j + 2 * i + 1]);
      if constexpr (RESULT != SUMS) {
        // The row eight further has its parts in the same order.
        unsigned char* place = pieces.place(number, first_row, 8 * j + threadIdx.x % 4 * 2) + i * 8 * 128;
        *reinterpret_cast<uint32_t*>(place) = pack_bfloat16(low, high);
      }
    }
  }
}

// Stages F at the targets among PIECE columns, by the threads that staged their pairs.
template <Result RESULT>
__device__ inline void put_targets(
    const float* at_target, const Row (&rows)[2], const Pieces<RESULT>& pieces, int number, int first_row, int part) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = rows[i].target - part * PIECE;
    if (column < 0 || column >= PIECE || column % 8 / 2 != static_cast<int>(threadIdx.x % 4)) continue;
    unsigned char* place = pieces.place(number, first_row, column / 2 * 2) + i * 8 * 128 + column % 2 * 2;
    *reinterpret_cast<uint16_t*>(place) = static_cast<uint16_t>(pack_bfloat16(at_target[8 * i], 0.0f));
  }
}

__device__ inline void store_sums(const ProductArguments& given, const Row (&rows)[2], int upper, int64_t column_tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float rest = over_four_lanes(rows[i].rest), moment = over_four_lanes(rows[i].moment);
    const int row = upper + 8 * i;
    if (threadIdx.x % 4 != 0 || row >= given.rows) continue;
    const int64_t partial = column_tile * given.rows + row;
    given.rests[partial] = rest;
    given.moments[partial] = moment * LN_2;
  }
}

// Exponentials and sums of a consumer's part of a tile; writes the exponentials if requested.
template <Result RESULT>
__device__ inline void epilogue(
    const ProductArguments& given, const TensorMap& out, Accumulator& x, const Tile& tile,
    const Pieces<RESULT>& pieces) {
  const int thread = threadIdx.x % WARPGROUP;
  const int first_row = thread / WARP * 16 + thread % WARP / 4;
  const int64_t left = given.vocabulary - tile.column;
  const int columns = left < TILE_COLUMNS ? static_cast<int>(left) : TILE_COLUMNS;
#pragma unroll
  for (int block = 0; block < BLOCKS_OF_ROWS; ++block) {
    if (given.bias != nullptr) add_bias(x[block], given.bias + tile.column, columns);
    const int upper = tile.row + block * PIECE + first_row;
    Row rows[2] = {row_at<RESULT>(given, upper, tile.column), row_at<RESULT>(given, upper + 8, tile.column)};
    if (any_lane(rows[0].target >= 0 || rows[1].target >= 0) || columns < TILE_COLUMNS) {
      leave_out(x[block], rows, columns);
    }
#pragma unroll
    for (int part = 0; part < TILE_COLUMNS / PIECE; ++part) {
      const int number = block * (TILE_COLUMNS / PIECE) + part;
      pieces.begin();
      exponentials(x[block] + part * (PIECE / 2), rows, pieces, number, first_row);
      if constexpr (RESULT == GRADIENT) put_targets(given.at_target + upper, rows, pieces, number, first_row, part);
      pieces.end(number, out, given.vocabulary, tile.row + block * PIECE, tile.column + part * PIECE);
    }
    if constexpr (RESULT != GRADIENT) store_sums(given, rows, upper, tile.column / TILE_COLUMNS);
  }
}

// Run by one warpgroup: every other tile of this block.
template <Result RESULT>
__device__ inline void consume(
    const ProductArguments& given, const TensorMap& out, const SharedTiles& shared, const Tiles& tiles, int steps,
    int consumer) {
  const Pieces<RESULT> pieces{shared.staged(consumer), STAGED + consumer};
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
    epilogue(given, out, x, tile, pieces);
  }
  if (RESULT != SUMS && threadIdx.x % WARPGROUP == 0) stores_read<0>();
}

template <Result RESULT>
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
    consume<RESULT>(given, out, shared, tiles, steps, warpgroup);
  }
  // Other blocks may still copy to this one and arrive at its barriers, so its shared memory must outlive them.
  cluster_arrive();
  cluster_wait();
}

}  // namespace exgrpo

#endif
