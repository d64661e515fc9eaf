// The barriers of csrc/cuda/product_kernel.cuh in all interleavings. Whoever changes one there changes it here, and the
// list of modelled statements in test_cuda_pipeline.py:
//
//   kernel                                        model
//   product_kernel: barrier_init                  Pipeline::initial, expected_at_empty
//   product_kernel: first cluster_wait            initialise, started
//   product_kernel: last cluster_wait             threads_ended, exit
//   produce                                       produce, expect
//   load_box, load_box_for                        copy where they begin, land where their bytes have come
//   consume: the tiles of a consumer              begin_tile
//   main_loop, up to products_commit              multiply
//   main_loop, from products_wait<1> on           settle
//   consume: products_wait<0>, release            finish
//   consume: numbered_sync, numbered_arrive       begin_tile, pass_turn, arrive_at_turn
//   release                                       release
//   epilogue                                      the time in EPILOGUE; its own barriers are in cuda_staging_model.h
//
// The parties are the blocks of one cluster, in each the thread that produces and every warp of the consumers by
// itself. A copy is under way from its call until it lands, products from their start until they have ended; both take
// any time. It is a violation that a copy begins where products still read, that products read what is not their
// round's, that a barrier gets arrivals which it does not expect, and that anything reaches a block before its first
// or after its last barrier. Each run must end where all blocks have exited and all barriers are at rest.
//
// Three things keep the number of states small and hide no violation:
// - An arrival belongs to the action before it. Arrivals only open waits; that none closes an open one is checked.
// - Products end when they are waited for. Earlier ends only allow more.
// - A copy that does not complete its barrier's phase lands at once. Nobody notices, for another part of the stage is
//   still missing.
// `every_event` gives up the last two, for small sizes. The epilogue shares no barrier and no memory with the rest.
//
// Not modelled: the order in which memory sees what is written (fences, proxies; the cluster's last barrier is taken
// to follow all arrivals that were sent before it), descriptors and addresses within a stage, the schedule of tiles,
// registers.
#include <algorithm>

#include "cuda_model_search.h"
#include "cuda_pipeline_state.h"
#include "cuda_staging_model.h"

using namespace exgrpo;
using namespace model;
using namespace pipeline;

namespace {

class Pipeline {
 public:
  Pipeline(const Sizes& sizes, Defect defect, bool every_event)
      : sizes_(sizes), rounds_(sizes.steps * sizes.tiles), defect_(defect), every_event_(every_event) {}

  Cluster initial() const {
    Cluster all{};
    for (Block& block : all) {
      for (int stage = 0; stage < sizes_.stages; ++stage) {
        block.full[stage].pending = 1;
        block.empty[stage].pending = expected_at_empty();
        block.stages[stage].fill(NO_ROUND);
      }
      for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        for (int i = 0; i < sizes_.warps; ++i) {
          block.consumers[consumer][i] = {static_cast<uint8_t>(consumer), 0, 0, {NO_ROUND, NO_ROUND}};
          begin_tile(block, consumer, block.consumers[consumer][i]);
        }
      }
    }
    return all;
  }

  template <typename Attempt>
  void each_action(const Cluster& all, const Attempt& attempt) const {
    for (int b = 0; b < CLUSTER; ++b) {
      attempt(Action{"initialises its barriers", b, -1, -1, -1}, [&](Cluster& next) { return initialise(next, b); });
      attempt(Action{"exits", b, -1, -1, -1}, [&](Cluster& next) { return exit(next, b); });
      if (!started(all, b)) continue;
      attempt(Action{"copies for round", b, -1, -1, all[b].round}, [&](Cluster& next) { return produce(next, b); });
      for (int stage = 0; stage < sizes_.stages; ++stage) {
        for (int part = 0; part < PARTS; ++part) {
          attempt(
              Action{part ? "receives weight in stage" : "receives hidden in stage", b, -1, -1, stage},
              [&](Cluster& next) { return land(next, b, stage, part); });
        }
      }
      for (int c = 0; c < CONSUMERS; ++c) {
        for (int w = 0; w < sizes_.warps; ++w) each_action_of(all, b, c, w, attempt);
      }
    }
  }

  bool finished(const Cluster& all) const {
    for (const Block& block : all) {
      if (block.life != EXITED) return false;
      for (int stage = 0; stage < sizes_.stages; ++stage) {
        const CountingBarrier &full = block.full[stage], &empty = block.empty[stage];
        if (full.pending != 1 || full.size != 0 || empty.pending != expected_at_empty()) {
          throw Violation{"a barrier is left in the middle of a phase"};
        }
      }
      for (const int arrived : block.turn) {
        if (arrived) throw Violation{"arrivals are left at a turn"};
      }
    }
    return true;
  }

  // Warps of a consumer are equal, and so are blocks: it is the same for all orders of them.
  uint64_t key(const Cluster& all) const {
    std::array<int, CLUSTER> order;
    for (int b = 0; b < CLUSTER; ++b) order[b] = b;
    uint64_t least = ~0ull;
    do {
      Cluster renamed;
      for (int b = 0; b < CLUSTER; ++b) {
        Block& block = renamed[b] = all[order[b]];
        for (auto& warps : block.consumers) std::sort(warps.begin(), warps.end());
        for (int stage = 0; stage < sizes_.stages; ++stage) {
          for (int other = 0; other < CLUSTER; ++other) {
            block.stages[stage][1 + other] = all[order[b]].stages[stage][1 + order[other]];
          }
        }
      }
      least = std::min(least, hash(renamed));
    } while (std::next_permutation(order.begin(), order.end()));
    return least;
  }

 private:
  int8_t expected_at_empty() const {
    const int all = CLUSTER * sizes_.warps;
    return static_cast<int8_t>(
        defect_ == too_few_expected_at_empty ? all / CLUSTER : defect_ == too_many_expected_at_empty ? all + 1 : all);
  }

  int round_of(const Warp& warp) const { return warp.tile * sizes_.steps + warp.step; }
  int filled_parity(int round) const {
    return (round / sizes_.stages & 1) ^ (defect_ == consumers_wait_for_other_phase ? 1 : 0);
  }
  int emptied_parity(int round) const {
    return (round / sizes_.stages & 1) ^ (defect_ == producer_waits_for_other_phase ? 0 : 1);
  }

  // The blocks' lives.

  static bool initialise(Cluster& all, int b) {
    if (all[b].life != STARTING) return false;
    all[b].life = RUNNING;
    return true;
  }

  bool started(const Cluster& all, int b) const {
    if (defect_ == no_start_barrier) return all[b].life != STARTING;
    return std::all_of(all.begin(), all.end(), [](const Block& block) { return block.life != STARTING; });
  }

  bool threads_ended(const Block& block) const {
    bool ended = block.round == rounds_ && !block.must_expect;
    for (const auto& warps : block.consumers) {
      for (int w = 0; w < sizes_.warps; ++w) ended = ended && warps[w].at == DONE;
    }
    return ended;
  }

  bool exit(Cluster& all, int b) const {
    if (all[b].life != RUNNING) return false;
    for (int other = 0; other < CLUSTER; ++other) {
      if (!threads_ended(all[other]) && (other == b || defect_ != no_exit_barrier)) return false;
    }
    all[b].life = EXITED;
    return true;
  }

  // Barriers in shared memory.

  void advance_full(Block& block, int stage) const {
    if (!advance(block.full[stage], 1)) return;
    for (const auto& warps : block.consumers) {
      for (int w = 0; w < sizes_.warps; ++w) {
        const int round = round_of(warps[w]);
        if (warps[w].at != AT_FULL || round % sizes_.stages != stage) continue;
        if (block.full[stage].phase == filled_parity(round)) throw Violation{"an open wait is closed again"};
      }
    }
  }

  void release(Cluster& all, int b, int round) const {
    const int stage = round % sizes_.stages;
    for (int target = 0; target < CLUSTER; ++target) {
      if (target != b && defect_ == releases_in_its_own_block_only) continue;
      Block& block = reach(all, target);
      --block.empty[stage].pending;
      if (!advance(block.empty[stage], expected_at_empty())) continue;
      if (block.round == rounds_ || block.round % sizes_.stages != stage) continue;
      if (block.empty[stage].phase == emptied_parity(block.round)) throw Violation{"an open wait is closed again"};
    }
  }

  // The producer.

  bool produce(Cluster& all, int b) const {
    Block& block = all[b];
    if (block.must_expect) {
      block.must_expect = 0;
      expect(block, block.round++ % sizes_.stages);
      return true;
    }
    if (block.round == rounds_) return false;
    const int stage = block.round % sizes_.stages;
    if (block.empty[stage].phase == emptied_parity(block.round)) return false;
    if (defect_ != expects_after_the_copies) expect(block, stage);
    copy(all, b, stage, 0, block.round);
    for (int target = 0; target < CLUSTER; ++target) copy(all, target, stage, 1 + b, block.round);
    if (defect_ == expects_after_the_copies) block.must_expect = 1;
    else ++block.round;
    land_unnoticed(all);
    return true;
  }

  void expect(Block& block, int stage) const {
    --block.full[stage].pending;
    if (defect_ == arrives_before_it_expects) advance_full(block, stage);
    int size = STEP_BYTES / KIB;
    if (defect_ == expects_own_bytes_only) size -= (CLUSTER - 1) * part_size(1);
    block.full[stage].size = static_cast<int8_t>(block.full[stage].size + size);
    advance_full(block, stage);
  }

  void copy(Cluster& all, int target, int stage, int part, int round) const {
    Block& block = reach(all, target);
    for (const auto& warps : block.consumers) {
      for (int w = 0; w < sizes_.warps; ++w) {
        for (const int read : warps[w].running) {
          if (read != NO_ROUND && read % sizes_.stages == stage) {
            throw Violation{"a copy overwrites what products read"};
          }
        }
      }
    }
    uint8_t& place = block.stages[stage][part];
    if (place & IN_FLIGHT) throw Violation{"two copies go to the same place"};
    place = static_cast<uint8_t>(round | IN_FLIGHT);
  }

  bool land(Cluster& all, int b, int stage, int part) const {
    if (!(all[b].stages[stage][part] & IN_FLIGHT)) return false;
    Block& block = reach(all, b);
    block.stages[stage][part] &= static_cast<uint8_t>(~IN_FLIGHT);
    block.full[stage].size = static_cast<int8_t>(block.full[stage].size - part_size(part));
    advance_full(block, stage);
    return true;
  }

  void land_unnoticed(Cluster& all) const {
    if (every_event_) return;
    for (int b = 0; b < CLUSTER; ++b) {
      for (int stage = 0; stage < sizes_.stages; ++stage) {
        for (int part = 0; part < PARTS; ++part) {
          const CountingBarrier& full = all[b].full[stage];
          if (full.pending || full.size != part_size(part)) land(all, b, stage, part);
        }
      }
    }
  }

  // The consumers.

  template <typename Attempt>
  void each_action_of(const Cluster& all, int b, int c, int w, const Attempt& attempt) const {
    static const char* const names[] = {
        "waits for its turn", "multiplies round", "has multiplied all but round", "ends with round",
        "is at the epilogue of round"};
    const Warp& warp = all[b].consumers[c][w];
    if (every_event_ && warp.running[0] != NO_ROUND) {
      attempt(Action{"has multiplied round", b, c, w, warp.running[0]}, [&](Cluster& next) {
        end_products(next[b].consumers[c][w]);
        return true;
      });
    }
    if (warp.at == AT_TURN || warp.at == DONE) return;
    attempt(Action{names[warp.at], b, c, w, round_of(warp)}, [&](Cluster& next) {
      Warp& self = next[b].consumers[c][w];
      switch (self.at) {
        case AT_FULL: return multiply(next[b], self);
        case AT_PRODUCTS: return settle(next, b, c, self);
        case AT_LAST_PRODUCTS: return finish(next, b, self);
        default: return end_epilogue(next[b], c, self);
      }
    });
  }

  void begin_tile(Block& block, int consumer, Warp& warp) const {
    const bool has_turn = warp.tile == 0 && defect_ != waits_for_a_first_turn;
    if (warp.tile >= sizes_.tiles) warp.at = DONE;
    else if (has_turn || defect_ == no_turn) warp.at = AT_FULL;
    else {
      warp.at = AT_TURN;
      arrive_at_turn(block, consumer);
    }
  }

  // As many warps as two consumers have end the wait of this one.
  void arrive_at_turn(Block& block, int consumer) const {
    if (++block.turn[consumer] < 2 * sizes_.warps) return;
    block.turn[consumer] = 0;
    for (int w = 0; w < sizes_.warps; ++w) {
      Warp& warp = block.consumers[consumer][w];
      if (warp.at != AT_TURN) throw Violation{"a turn gets more arrivals than it expects"};
      warp.at = AT_FULL;
    }
  }

  void pass_turn(Block& block, int consumer, const Warp& warp) const {
    if (defect_ == no_turn || (warp.tile + 1 >= sizes_.tiles && defect_ != passes_the_last_turn)) return;
    arrive_at_turn(block, (consumer + 1) % CONSUMERS);
  }

  bool multiply(const Block& block, Warp& warp) const {
    const int round = round_of(warp), stage = round % sizes_.stages;
    if (block.full[stage].phase == filled_parity(round)) return false;
    for (const int data : block.stages[stage]) {
      if (data != round) throw Violation{"products read what is not of their round"};
    }
    if (warp.running[1] != NO_ROUND) end_products(warp);
    warp.running[warp.running[0] != NO_ROUND] = static_cast<uint8_t>(round);
    warp.at = AT_PRODUCTS;
    return true;
  }

  static void end_products(Warp& warp) { warp.running = {warp.running[1], NO_ROUND}; }

  // False where more than `pending` products are unfinished, and their ends are events of their own.
  bool products_wait(Warp& warp, int pending) const {
    while (warp.running[pending] != NO_ROUND) {
      if (every_event_) return false;
      end_products(warp);
    }
    return true;
  }

  bool settle(Cluster& all, int b, int consumer, Warp& warp) const {
    if (defect_ != no_wait_for_products && !products_wait(warp, 1)) return false;
    const int round = round_of(warp);
    if (defect_ == releases_its_own_round) release(all, b, round);
    else if (warp.step > 0) release(all, b, round - 1);
    if (warp.step + 1 < sizes_.steps) {
      ++warp.step;
      warp.at = AT_FULL;
    } else {
      warp.at = AT_LAST_PRODUCTS;
      pass_turn(all[b], consumer, warp);
    }
    return true;
  }

  bool finish(Cluster& all, int b, Warp& warp) const {
    if (defect_ != no_last_wait_for_products && !products_wait(warp, 0)) return false;
    if (defect_ != releases_its_own_round && defect_ != forgets_the_last_release) release(all, b, round_of(warp));
    warp.at = EPILOGUE;
    return true;
  }

  bool end_epilogue(Block& block, int consumer, Warp& warp) const {
    if (warp.running[0] != NO_ROUND) throw Violation{"an epilogue reads sums that products still change"};
    warp.tile = static_cast<uint8_t>(warp.tile + CONSUMERS);
    warp.step = 0;
    begin_tile(block, consumer, warp);
    return true;
  }

  Sizes sizes_;
  int rounds_;
  Defect defect_;
  bool every_event_;
};

}  // namespace

extern "C" {

extern const int kernel_stages, kernel_places, kernel_pieces;
const int kernel_stages = STAGES, kernel_places = PLACES;
const int kernel_pieces = TILE_ROWS / PIECE * (TILE_COLUMNS / PIECE);  // of a tile

Explored explore_pipeline(int stages, int steps, int tiles, int warps, bool every_event, const char* defect) {
  const int number = number_of(defect, NAMES);
  if (number < 0) return {0, "no such defect", ""};
  if (stages > STAGES || warps > WARPS || steps * tiles >= NO_ROUND) return {0, "sizes beyond the model's", ""};
  const Pipeline pipeline({stages, steps, tiles, warps}, static_cast<Defect>(number), every_event);
  return Search(pipeline).all();
}

Explored explore_staging(int places, int pieces, int warps, const char* defect) {
  const int number = number_of(defect, staging::NAMES);
  if (number < 0) return {0, "no such defect", ""};
  if (places > staging::PLACES_AT_MOST || warps > staging::WARPS) return {0, "sizes beyond the model's", ""};
  const staging::Staging model({places, pieces, warps}, static_cast<staging::Defect>(number));
  return Search(model).all();
}
}
