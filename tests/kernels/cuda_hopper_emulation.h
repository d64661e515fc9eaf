// Hopper's own machinery for tests, in place of csrc/cuda/hopper.cuh. Copies come when nobody else can go on, or at
// once; matrix products are executed when they are waited for, from what shared memory holds then.
#ifndef EXGRPO_CUDA_HOPPER_CUH
#define EXGRPO_CUDA_HOPPER_CUH

#include "cuda_emulation.h"

namespace exgrpo {

struct TensorMap {
  unsigned char* matrix;  // of 2-byte numbers
  int64_t rows, columns, stride;
  int box_rows, box_columns;
};

using SharedBarrier = uint64_t;

namespace emulation {

inline CountingBarrier& counting(Block& block, uint32_t address) {
  const auto found = block.counting.find(address);
  if (found == block.counting.end()) throw std::runtime_error("a barrier that nobody has initialised");
  return found->second;
}

inline void advance(CountingBarrier& barrier) {
  ++machine->progress;
  if (barrier.pending < 0) throw std::runtime_error("more arrivals than a barrier expects");
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  ++barrier.phase;
}

// Where the 16-byte pieces of 128-byte rows lie.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline float element(uint64_t description, int row, int depth) {
  if (description >> 62 != 1) throw std::runtime_error("a description of another swizzle");
  const uint32_t start = (description & 0x3fff) << 4, groups = (description >> 32 & 0x3fff) << 4;
  const uint32_t address = swizzled(start + row / 8 * groups + row % 8 * 128 + depth * 2);
  uint16_t bits;
  std::memcpy(&bits, shared_memory() + address, 2);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Calls f(place in shared memory, place in the matrix) for a box; null from column ``last`` on and where rows have ended.
template <typename Function>
void over_box(const TensorMap& map, int64_t last, uint32_t address, int x, int y, Function f) {
  if (address % SHARED_ALIGNMENT) throw std::runtime_error("a box that is not aligned");
  for (int row = 0; row < map.box_rows; ++row) {
    for (int column = 0; column < map.box_columns; ++column) {
      const bool inside = y + row < map.rows && x + column < last;
      f(swizzled(address + (row * map.box_columns + column) * 2),
        inside ? map.matrix + ((y + row) * map.stride + x + column) * 2 : nullptr);
    }
  }
}

}  // namespace emulation

inline void barrier_init(SharedBarrier* barrier, int arrivals) {
  emulation::fiber->block->counting[shared_address(barrier)] = {arrivals, arrivals};
}

inline void barriers_visible() {}
inline void visible_to_copies() {}
inline void products_begin() {}
inline void prefetch(const TensorMap&) {}

template <int COUNT>
void registers_give() {}

template <int COUNT>
void registers_take() {}

inline void barrier_expect(SharedBarrier* barrier, int bytes) {
  auto& counting = emulation::counting(*emulation::fiber->block, shared_address(barrier));
  counting.bytes += bytes;
  --counting.pending;
  emulation::advance(counting);
}

inline void barrier_arrive(SharedBarrier* barrier, int rank) {
  auto& counting = emulation::counting(emulation::block_of(rank), shared_address(barrier));
  --counting.pending;
  emulation::advance(counting);
}

inline void barrier_wait(SharedBarrier* barrier, uint32_t parity) {
  auto& counting = emulation::counting(*emulation::fiber->block, shared_address(barrier));
  emulation::wait_until([&] { return counting.phase % 2 != parity; });
}

inline void numbered_sync(int number, int threads) {
  emulation::sync(emulation::fiber->block->barriers[number], threads);
}

inline void numbered_arrive(int number, int threads) {
  emulation::arrive(emulation::fiber->block->barriers[number], threads);
}

inline void load_box_for(
    unsigned blocks, const TensorMap& map, unsigned char* shared, SharedBarrier* barrier, int x, int y) {
  const uint32_t address = shared_address(shared), barrier_address = shared_address(barrier);
  for (unsigned rank = 0; blocks >> rank; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    const auto copy = [=, &map] {
      auto& block = emulation::block_of(rank);
      emulation::over_box(map, map.columns, address, x, y, [&](uint32_t place, const unsigned char* from) {
        if (from) std::memcpy(block.shared + place, from, 2);
        else std::memset(block.shared + place, 0, 2);
      });
      auto& counting = emulation::counting(block, barrier_address);
      counting.bytes -= map.box_rows * map.box_columns * 2;
      emulation::advance(counting);
    };
    if (emulation::machine->schedule.eager) copy();
    else emulation::machine->copies.push_back(copy);
  }
}

inline void load_box(const TensorMap& map, unsigned char* shared, SharedBarrier* barrier, int x, int y) {
  load_box_for(1u << cluster_rank(), map, shared, barrier, x, y);
}

inline void store_box(const TensorMap& map, const unsigned char* shared, int x, int y) {
  const unsigned char* base = shared_memory();
  const uint32_t address = shared_address(shared);
  const int64_t ended = (map.columns + 7) / 8 * 8;  // as seen on an H100: of a row's last 16 bytes all are written
  const auto copy = [=, &map] {
    emulation::over_box(map, ended, address, x, y, [=](uint32_t place, unsigned char* to) {
      if (to) std::memcpy(to, base + place, 2);
    });
  };
  if (emulation::machine->schedule.eager) copy();
  else emulation::fiber->copies.push_back(copy);
}

inline void store_nothing() {
  if (!emulation::machine->schedule.eager) emulation::fiber->copies.push_back([] {});
}

template <int PENDING>
void stores_read() {
  auto& copies = emulation::fiber->copies;
  for (; copies.size() > PENDING; copies.erase(copies.begin())) copies.front()();
}

inline float power_of_two(float x) { return std::exp2(x); }
inline float larger(float x, float y) { return std::isnan(x) || x > y ? x : y; }

template <int COUNT>
void multiply(float (&x)[COUNT], uint64_t a, uint64_t b, int accumulate) {
  const int thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  ++emulation::fiber->uncommitted;
  emulation::fiber->products.push_back([=, &x] {
    for (int i = 0; i < COUNT; ++i) {
      if (!accumulate) x[i] = 0;
    }
    for (int depth = 0; depth < 16; ++depth) {
      const float of_rows[] = {emulation::element(a, row, depth), emulation::element(a, row + 8, depth)};
      for (int i = 0; i < COUNT; i += 4) {
        const float first = emulation::element(b, i * 2 + column, depth);
        const float second = emulation::element(b, i * 2 + column + 1, depth);
        x[i] += of_rows[0] * first;
        x[i + 1] += of_rows[0] * second;
        x[i + 2] += of_rows[1] * first;
        x[i + 3] += of_rows[1] * second;
      }
    }
  });
}

inline void products_commit() {
  emulation::fiber->committed.push_back(emulation::fiber->uncommitted);
  emulation::fiber->uncommitted = 0;
}

template <int PENDING>
void products_wait() {
  auto& fiber = *emulation::fiber;
  for (; fiber.committed.size() > PENDING; fiber.committed.pop_front()) {
    for (unsigned i = 0; i < fiber.committed.front(); ++i) {
      fiber.products.front()();
      fiber.products.pop_front();
    }
  }
}

}  // namespace exgrpo

#endif
