// A CUDA machine for tests, in place of csrc/cuda/device.cuh: every CUDA thread is a fiber, and fibers take turns at
// barriers alone. Each may be run first or last, and what the machine does on its own is put off for as long as a
// kernel allows it: until it is waited for, or until nobody else can go on.
#ifndef EXGRPO_CUDA_DEVICE_CUH
#define EXGRPO_CUDA_DEVICE_CUH

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

namespace exgrpo::emulation {

constexpr size_t STACK = 64 << 10;
constexpr size_t SHARED_ALIGNMENT = 1024;

struct Index {
  unsigned x;
};

struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  float values[32];
};

// Of the kind that lies in shared memory.
struct CountingBarrier {
  int expected, pending;
  int bytes = 0;  // announced, less those that have come
  uint32_t phase = 0;
};

struct Block {
  Index index;
  unsigned rank;
  unsigned running;       // threads that have not ended
  unsigned char* shared;  // aligned; what device code calls a shared address is an offset into it
  std::vector<unsigned char> memory;
  std::vector<Warp> warps;
  std::map<int, Barrier> barriers;  // by number
  std::map<uint32_t, CountingBarrier> counting;  // by shared address
};

// What a kernel must not depend on.
struct Schedule {
  bool backwards;  // the last thread begins
  bool eager;      // copies are done at once
};

struct Fiber {
  Block* block;
  Index thread;
  ucontext_t context;
  jmp_buf resumed;
  std::unique_ptr<unsigned char[]> stack;
  bool started = false, finished = false;
  int64_t cluster_generation = -1;  // that this thread has arrived in
  std::deque<std::function<void()>> products;  // of this thread's part of a matrix product, not executed yet
  unsigned uncommitted = 0;
  std::deque<unsigned> committed;
  std::vector<std::function<void()>> copies;  // that this thread alone can wait for
};

struct Machine {
  Index block_size, grid_size;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier cluster;
  Schedule schedule;
  std::deque<std::function<void()>> copies;  // not executed yet
  uint64_t progress = 0;
  std::string error;
  std::function<void()> kernel;
  jmp_buf scheduler;
};

inline Machine* machine;
inline Fiber* fiber;

inline void entry() {
  try {
    machine->kernel();
  } catch (const std::exception& error) {
    machine->error = error.what();
  }
  for (const auto& copy : fiber->copies) copy();
  fiber->finished = true;
  --fiber->block->running;
  ++machine->progress;
  _longjmp(machine->scheduler, 1);
}

inline void yield() {
  if (!_setjmp(fiber->resumed)) _longjmp(machine->scheduler, 1);
}

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
}

inline void resume(Fiber& next) {
  fiber = &next;
  if (_setjmp(machine->scheduler)) return;
  if (next.started) _longjmp(next.resumed, 1);
  next.started = true;
  getcontext(&next.context);
  next.stack = std::make_unique<unsigned char[]>(STACK);
  next.context.uc_stack.ss_sp = next.stack.get();
  next.context.uc_stack.ss_size = STACK;
  makecontext(&next.context, entry, 0);
  setcontext(&next.context);
}

// A block of the cluster, which must not have ended.
inline Block& block_of(unsigned rank) {
  for (const auto& block : machine->blocks) {
    if (block->rank == rank && block->running) return *block;
  }
  throw std::runtime_error("there is no block of this rank, or it has ended");
}

// Arrives and returns the generation to wait for the end of.
inline unsigned arrive(Barrier& barrier, unsigned expected) {
  const unsigned generation = barrier.generation;
  ++machine->progress;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return generation;
}

inline void sync(Barrier& barrier, unsigned expected) {
  const unsigned generation = arrive(barrier, expected);
  wait_until([&] { return barrier.generation != generation; });
}

inline void add_block(unsigned index, unsigned rank, size_t shared_bytes) {
  Machine& m = *machine;
  m.blocks.push_back(std::make_unique<Block>());
  Block& block = *m.blocks.back();
  block.index = {index};
  block.rank = rank;
  block.running = m.block_size.x;
  block.memory.assign(shared_bytes + SHARED_ALIGNMENT, 0xff);  // NaN, whatever is read of it
  void* start = block.memory.data();
  size_t room = block.memory.size();
  block.shared = static_cast<unsigned char*>(std::align(SHARED_ALIGNMENT, shared_bytes, start, room));
  block.warps.resize(m.block_size.x / 32);
  for (unsigned thread = 0; thread < m.block_size.x; ++thread) {
    m.fibers.push_back(std::make_unique<Fiber>());
    m.fibers.back()->block = &block;
    m.fibers.back()->thread = {thread};
  }
}

// Calls f, which returns whether there is more to do, until there is not or it gets no further.
template <typename Function>
bool as_far_as_possible(Function f) {
  for (;;) {
    const uint64_t before = machine->progress;
    const bool left = f();
    if (!left || machine->progress == before) return left;
  }
}

// Runs some threads as far as they get without the others, each warp as far as it gets alone: a barrier that is missing
// has no better time to show. Whether any have not ended.
inline bool run_threads(size_t first, size_t last) {
  return as_far_as_possible([=] {
    bool left = false;
    for (size_t warp = first; warp < last; warp += 32) {
      left |= as_far_as_possible([=] {
        bool lanes_left = false;
        for (size_t lane = warp; lane < warp + 32; ++lane) {
          Fiber& each = *machine->fibers[lane];
          if (!each.finished) resume(each);
          lanes_left |= !each.finished;
        }
        return lanes_left;
      });
    }
    return left;
  });
}

// Runs the blocks of one cluster to their end.
inline void run_cluster() {
  Machine& m = *machine;
  if (m.schedule.backwards) std::reverse(m.fibers.begin(), m.fibers.end());
  for (bool left = true; left && m.error.empty();) {
    const uint64_t before = m.progress;
    left = false;
    const size_t block = m.block_size.x;
    for (size_t first = 0; first < m.fibers.size(); first += block) left |= run_threads(first, first + block);
    if (!left) break;
    if (m.progress != before) continue;
    if (m.copies.empty()) {
      m.error = "deadlock: every thread waits";
      return;
    }
    try {
      m.copies.front()();
    } catch (const std::exception& error) {
      m.error = error.what();
    }
    m.copies.pop_front();
  }
  bool waited_for = m.cluster.arrived;
  for (const auto& block : m.blocks) {
    for (const auto& barrier : block->barriers) waited_for |= barrier.second.arrived;
  }
  if (waited_for && m.error.empty()) m.error = "threads have arrived at a barrier that nobody waits for";
}

// Runs a kernel cluster after cluster; the text of the first error, empty if there is none.
inline std::string launch(
    unsigned blocks, unsigned threads, unsigned cluster_size, size_t shared_bytes, Schedule schedule,
    std::function<void()> kernel) {
  for (unsigned first = 0; first < blocks; first += cluster_size) {
    Machine here{};
    machine = &here;
    here.block_size = {threads};
    here.grid_size = {blocks};
    here.schedule = schedule;
    here.kernel = kernel;
    for (unsigned rank = 0; rank < cluster_size; ++rank) add_block(first + rank, rank, shared_bytes);
    run_cluster();
    if (!here.error.empty()) return here.error;
  }
  return "";
}

// Room for a text that Python reads.
inline const char* reported(std::string text) {
  static std::string last;
  last = std::move(text);
  return last.empty() ? nullptr : last.c_str();
}

}  // namespace exgrpo::emulation

#define threadIdx (exgrpo::emulation::fiber->thread)
#define blockIdx (exgrpo::emulation::fiber->block->index)
#define gridDim (exgrpo::emulation::machine->grid_size)

namespace exgrpo {

constexpr int WARP = 32;

inline unsigned char* shared_memory() { return emulation::fiber->block->shared; }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory());
}

inline float shuffle_xor(float value, int lanes) {
  auto& warp = emulation::fiber->block->warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  emulation::sync(warp.barrier, 32);
  const float received = warp.values[threadIdx.x % 32 ^ lanes];
  emulation::sync(warp.barrier, 32);
  return received;
}

inline bool any_lane(bool condition) {
  float found = condition;
  for (int lanes = 1; lanes < 32; lanes *= 2) found += shuffle_xor(found, lanes);
  return found > 0;
}

inline unsigned cluster_rank() { return emulation::fiber->block->rank; }

inline void cluster_arrive() {
  auto& machine = *emulation::machine;
  emulation::fiber->cluster_generation =
      emulation::arrive(machine.cluster, static_cast<unsigned>(machine.fibers.size()));
}

inline void cluster_wait() {
  auto& generation = emulation::fiber->cluster_generation;
  if (generation < 0) throw std::runtime_error("cluster_wait: it has not arrived");
  emulation::wait_until([&] { return emulation::machine->cluster.generation != generation; });
  generation = -1;
}

// Rounds to nearest even, as the machine does.
inline uint16_t bfloat16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint32_t pack_bfloat16(float low, float high) {
  return bfloat16_bits(low) | static_cast<uint32_t>(bfloat16_bits(high)) << 16;
}

}  // namespace exgrpo

#endif
