// What the model of the product's pipeline knows of a cluster at a moment, and the defects that it can have.
#ifndef EXGRPO_CUDA_PIPELINE_STATE_H
#define EXGRPO_CUDA_PIPELINE_STATE_H

#include <array>

#include "cuda_model_search.h"
#include "product.h"

namespace pipeline {

using namespace exgrpo;
using model::Violation;

#define DEFECTS(X)                                                                                                    \
  X(none) X(producer_waits_for_other_phase) X(consumers_wait_for_other_phase) X(too_few_expected_at_empty)            \
  X(too_many_expected_at_empty) X(arrives_before_it_expects) X(expects_own_bytes_only) X(expects_after_the_copies)    \
  X(no_wait_for_products) X(releases_its_own_round) X(releases_in_its_own_block_only) X(no_last_wait_for_products)    \
  X(forgets_the_last_release) X(no_turn) X(waits_for_a_first_turn) X(passes_the_last_turn) X(no_start_barrier)        \
  X(no_exit_barrier)
#define NAMED(name) name,
#define TEXT(name) #name,
enum Defect { DEFECTS(NAMED) };
constexpr const char* NAMES[] = {DEFECTS(TEXT)};

constexpr int PARTS = 1 + CLUSTER;  // of a stage: the rows of hidden, and what each block copies of the weight
constexpr int WARPS = 4;            // of a consumer, at most
constexpr int KIB = 1024;
static_assert(HIDDEN_BYTES % KIB == 0 && WEIGHT_BYTES / CLUSTER % KIB == 0 && STEP_BYTES < 128 * KIB);
constexpr int part_size(int part) { return (part == 0 ? HIDDEN_BYTES : WEIGHT_BYTES / CLUSTER) / KIB; }

constexpr uint8_t NO_ROUND = 0x7f, IN_FLIGHT = 0x80;

struct CountingBarrier {
  int8_t pending;  // arrivals
  int8_t size;     // expected less what has come, in KiB
  uint8_t phase;   // its parity
};

enum At : uint8_t { AT_TURN, AT_FULL, AT_PRODUCTS, AT_LAST_PRODUCTS, EPILOGUE, DONE };

struct Warp {
  uint8_t tile, step, at;
  std::array<uint8_t, 2> running;  // rounds of unfinished products, the older one first

  bool operator<(const Warp& other) const { return std::memcmp(this, &other, sizeof *this) < 0; }
};

enum Life : uint8_t { STARTING, RUNNING, EXITED };

struct Block {
  uint8_t life;
  uint8_t round, must_expect;  // the producer's
  std::array<std::array<Warp, WARPS>, CONSUMERS> consumers;
  std::array<CountingBarrier, STAGES> full, empty;
  std::array<std::array<uint8_t, PARTS>, STAGES> stages;  // the round of each part's data, and whether it has come
  std::array<uint8_t, CONSUMERS> turn;                    // warps that have arrived
};

using Cluster = std::array<Block, CLUSTER>;

struct Sizes {
  int stages, steps, tiles, warps;
};

// True where a phase is over.
inline bool advance(CountingBarrier& barrier, int expected) {
  if (barrier.pending < 0) throw Violation{"a barrier gets more arrivals than it expects"};
  if (barrier.pending || barrier.size) return false;
  barrier.pending = static_cast<int8_t>(expected);
  barrier.phase ^= 1;
  return true;
}

// Something from outside gets to a block.
inline Block& reach(Cluster& all, int b) {
  if (all[b].life == STARTING) throw Violation{"a block is reached before its barriers are initialised"};
  if (all[b].life == EXITED) throw Violation{"a block is reached after its exit"};
  return all[b];
}

}  // namespace pipeline

#endif
