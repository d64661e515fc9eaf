// One reading and one writing of each row of a chunk's logits: a cluster of blocks holds the row in its shared memory
// while the sums are found, the objective is evaluated and F is written.
//
// x_v is a raw product, z_v = cap(x_v + b_v) the logit, y the target, a the row's anchor, d_v = (z_v - a) / tau;
// S = sum_{v != y} exp(d_v), M = sum_{v != y} exp(d_v) d_v. See chunks/softmax.py.
#ifndef EXGRPO_CUDA_ROWS_KERNEL_CUH
#define EXGRPO_CUDA_ROWS_KERNEL_CUH

#include "device.cuh"
#include "objective.cuh"
#include "rows.h"

namespace exgrpo {

constexpr float LARGEST_SUM = 64.0f;  // of S with the target as anchor, as in triton_chunks/kernels.py

// The columns [first, first + count) of a row that a block holds, and the row's own numbers.
struct Part {
  int64_t row;
  int64_t first;
  int count;
  float* z;       // in shared memory, `columns` of them, -inf beyond `count`
  float* slots;   // [SLOTS, SLOT_WIDTH] in shared memory
  int target;     // relative to `first`; -1 where another block holds it
  float inverse;  // 1 / tau
};

__device__ inline Part part_of(const RowsArguments& given, int columns) {
  Part part{};
  part.row = blockIdx.x / cluster_size();
  part.first = static_cast<int64_t>(cluster_rank()) * columns;
  const int64_t left = given.vocabulary - part.first;
  part.count = left < 0 ? 0 : left < columns ? static_cast<int>(left) : columns;
  part.z = reinterpret_cast<float*>(shared_memory());
  part.slots = part.z + columns;
  const int64_t target = given.target[part.row] - part.first;
  part.target = target < 0 || target >= part.count ? -1 : static_cast<int>(target);
  part.inverse = given.temperature == nullptr ? 1.0f : 1.0f / given.temperature[part.row];
  return part;
}

__device__ __forceinline__ bool divides_16(const void* pointer, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(stride_bytes)) % 16 == 0;
}

__device__ __forceinline__ float shaped(const RowsArguments& given, float x, int64_t column) {
  if (given.bias != nullptr) x += given.bias[column];
  // tanh by one exponential, which may overflow: the quotient is 0 then.
  if (given.softcap != 0) x = given.softcap - 2 * given.softcap / (1 + expf(x * (2 / given.softcap)));
  return x;
}

// Fills the block's shared memory with z. Each thread has its own columns here, four at a time.
__device__ inline void load(const RowsArguments& given, const Part& part, int columns) {
  const float* row = given.logits + part.row * given.stride + part.first;
  const bool wide = divides_16(given.logits, given.stride * 4);
  const int step = 4 * blockDim.x;
  for (int column = 4 * threadIdx.x; column < columns; column += step) {
    if (wide && column + 4 <= part.count) {
      copy_async<16>(part.z + column, row + column);
      continue;
    }
    for (int i = column; i < column + 4; ++i) {
      if (i < part.count) copy_async<4>(part.z + i, row + i);
      else part.z[i] = -INFINITY;
    }
  }
  copies_wait();
  if (given.bias == nullptr && given.softcap == 0) return;
  for (int column = 4 * threadIdx.x; column < part.count; column += step) {
    for (int i = column; i < column + 4 && i < part.count; ++i) part.z[i] = shaped(given, part.z[i], part.first + i);
  }
}

// COUNT numbers of each thread combined over the cluster, in the same order in every thread of every block.
template <int COUNT, typename Combine>
__device__ inline void over_cluster(float (&values)[COUNT], float* slots, Combine combine) {
  const int warps = blockDim.x / WARP;
  for (float& value : values) {
    for (int lanes = WARP / 2; lanes; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
  }
  if (threadIdx.x % WARP == 0) {
    for (int i = 0; i < COUNT; ++i) slots[i * SLOT_WIDTH + threadIdx.x / WARP] = values[i];
  }
  block_sync();
  if (threadIdx.x < COUNT) {
    float* own = slots + threadIdx.x * SLOT_WIDTH;
    float value = own[0];
    for (int warp = 1; warp < warps; ++warp) value = combine(value, own[warp]);
    own[SLOT_WIDTH - 1] = value;
  }
  cluster_arrive();
  cluster_wait();
  for (int i = 0; i < COUNT; ++i) {
    float* total = slots + i * SLOT_WIDTH + SLOT_WIDTH - 1;
    values[i] = *of_rank(total, 0);
    for (unsigned rank = 1; rank < cluster_size(); ++rank) values[i] = combine(values[i], *of_rank(total, rank));
  }
}

// S and M from this anchor. Four partial sums a thread: each is of a few dozen terms, which is why fp32 is enough.
__device__ inline void find_sums(const Part& part, int columns, float anchor, float (&sums)[2]) {
  float rest[4] = {}, moment[4] = {};
  for (int column = 4 * threadIdx.x; column < columns; column += 4 * blockDim.x) {
    const auto z = *reinterpret_cast<const Group<float, 4>*>(part.z + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float d = bounded((z.values[i] - anchor) * part.inverse);
      const bool counted = column + i != part.target && column + i < part.count;
      const float e = counted ? expf(d) : 0.0f;
      rest[i] += e;
      moment[i] += e * d;
    }
  }
  sums[0] = (rest[0] + rest[1]) + (rest[2] + rest[3]);
  sums[1] = (moment[0] + moment[1]) + (moment[2] + moment[3]);
  over_cluster(sums, part.slots, [](float a, float b) { return a + b; });
}

__device__ inline float largest_logit(const Part& part, int columns) {
  float largest[1] = {-INFINITY};
  for (int column = 4 * threadIdx.x; column < columns; column += 4 * blockDim.x) {
    const auto z = *reinterpret_cast<const Group<float, 4>*>(part.z + column);
    for (float value : z.values) largest[0] = fmaxf(largest[0], value);
  }
  // Not the slots of the sums: other blocks may still be reading those.
  over_cluster(largest, part.slots + 2 * SLOT_WIDTH, [](float a, float b) { return fmaxf(a, b); });
  return largest[0];
}

__device__ __forceinline__ void store(float* out, const float (&values)[4]) {
  *reinterpret_cast<Group<float, 4>*>(out) = {{values[0], values[1], values[2], values[3]}};
}

__device__ __forceinline__ void store(uint16_t* out, const float (&values)[8]) {
  Group<uint32_t, 4> packed;
  for (int i = 0; i < 4; ++i) packed.values[i] = pack_bfloat16(values[2 * i], values[2 * i + 1]);
  *reinterpret_cast<Group<uint32_t, 4>*>(out) = packed;
}

__device__ __forceinline__ void store(float* out, float value) { *out = value; }

__device__ __forceinline__ void store(uint16_t* out, float value) {
  *out = static_cast<uint16_t>(pack_bfloat16(value, 0.0f));
}

// Writes f(column of the block, z) for all of the block's columns, 16 bytes at a time where they are aligned.
template <typename Out, typename Function>
__device__ inline void write(const RowsArguments& given, const Part& part, Function f) {
  constexpr int UNIT = 16 / sizeof(Out);
  Out* row = static_cast<Out*>(given.out) + part.row * given.out_stride + part.first;
  const bool wide = divides_16(given.out, given.out_stride * sizeof(Out));
  for (int column = UNIT * threadIdx.x; column < part.count; column += UNIT * blockDim.x) {
    float values[UNIT];
#pragma unroll
    for (int quad = 0; quad < UNIT; quad += 4) {
      const auto z = *reinterpret_cast<const Group<float, 4>*>(part.z + column + quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[quad + i] = f(column + quad + i, z.values[i]);
    }
    if (wide && column + UNIT <= part.count) {
      store(row + column, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      if (column + i < part.count) store(row + column + i, values[i]);
    }
  }
}

// A cluster for each row. `columns`: of a block, as planned.
template <Output OUTPUT, typename Out>
__global__ void __launch_bounds__(ROW_THREADS, ROW_BLOCKS_PER_MULTIPROCESSOR)
    rows_kernel(const RowsArguments given, const int columns) {
  const Part part = part_of(given, columns);
  const int64_t y = given.target[part.row];
  // Read by every block: its own part may lie elsewhere. Nothing is written before all blocks have passed a barrier.
  const float at_target = y < 0 ? -INFINITY : shaped(given, given.logits[part.row * given.stride + y], y);
  load(given, part, columns);
  float anchor = at_target;
  float sums[2];
  find_sums(part, columns, anchor, sums);
  if (!(sums[0] <= LARGEST_SUM)) {
    anchor = largest_logit(part, columns);
    find_sums(part, columns, anchor, sums);
  }
  cluster_arrive();  // this block has read all that it wants from the others
  const float rest = sums[0], moment = sums[1];
  const float gap = (at_target - anchor) * part.inverse;
  const bool writes = cluster_rank() == 0 && threadIdx.x == 0;
  if (writes) {
    given.anchor[part.row] = anchor;
    given.gap[part.row] = gap;
    given.rest[part.row] = rest;
    given.moment[part.row] = moment;
  }
  if constexpr (OUTPUT == EXPONENTIALS) {
    write<Out>(given, part, [&](int column, float z) {
      return column == part.target ? -rest : expf(bounded((z - anchor) * part.inverse));
    });
  } else if constexpr (OUTPUT == GRADIENT) {
    const Factors factors = policy_row(given, part.row, part.inverse, gap, rest, moment, writes);
    write<Out>(given, part, [&](int column, float z) {
      const float d = bounded((z - anchor) * part.inverse);
      float f = expf(d) * (factors.c + factors.h * (d - factors.mean));
      if (column == part.target) f = factors.at_target;
      if (given.softcap != 0) f *= 1 - (z / given.softcap) * (z / given.softcap);
      return f;
    });
  }
  cluster_wait();
}

}  // namespace exgrpo

#endif
