// The pieces of one consumer's results and their copies to memory, in all interleavings: Pieces and the end of consume
// in csrc/cuda/product_kernel.cuh.
//
//   kernel                                        model
//   Pieces::begin: stores_read, numbered_sync     Staging::begin
//   exponentials, Pieces::end: numbered_sync      Staging::write
//   Pieces::end: store_box, store_nothing         Staging::store, by the first warp
//   consume: the last stores_read                 Staging::end
//
// A store reads its place from its call on, for any time; stores may end in any order. A warp writes its part of a
// piece at one moment: the barriers before and after enclose it. Any piece may be beyond the vocabulary. Arrivals at
// the consumer's barrier belong to the action before them, since they only open waits.
#ifndef EXGRPO_CUDA_STAGING_MODEL_H
#define EXGRPO_CUDA_STAGING_MODEL_H

#include <algorithm>
#include <array>

#include "cuda_model_search.h"

namespace staging {

using model::Action;
using model::Violation;

#define STAGING_DEFECTS(X)                                                                                        \
  X(none) X(no_wait_for_stores) X(waits_for_one_store_less) X(no_barrier_before_writing) X(no_barrier_before_store) \
  X(no_empty_group) X(no_wait_at_the_end)
#define STAGING_NAMED(name) name,
#define STAGING_TEXT(name) #name,
enum Defect { STAGING_DEFECTS(STAGING_NAMED) };
constexpr const char* NAMES[] = {STAGING_DEFECTS(STAGING_TEXT)};

constexpr int WARPS = 4, PLACES_AT_MOST = 4;
constexpr uint8_t NOTHING = 0xff;

enum At : uint8_t { BEGINS, AT_FIRST_BARRIER, WRITES, AT_SECOND_BARRIER, STORES, ENDS, ENDED };

struct Warp {
  uint8_t at, piece;
  std::array<uint8_t, PLACES_AT_MOST> written;  // the piece that each place has from this warp

  bool operator<(const Warp& other) const { return std::memcmp(this, &other, sizeof *this) < 0; }
};

struct Consumer {
  std::array<Warp, WARPS> warps;
  uint8_t arrived;                               // at the consumer's barrier
  std::array<uint8_t, PLACES_AT_MOST + 1> read;  // places of the latest groups of stores, the latest first
};

struct Sizes {
  int places, pieces, warps;
};

class Staging {
 public:
  Staging(const Sizes& sizes, Defect defect) : sizes_(sizes), defect_(defect) {}

  Consumer initial() const {
    Consumer consumer{};
    consumer.read.fill(NOTHING);
    for (int w = 0; w < sizes_.warps; ++w) consumer.warps[w].written.fill(NOTHING);
    return consumer;
  }

  template <typename Attempt>
  void each_action(const Consumer& consumer, const Attempt& attempt) const {
    for (const int place : consumer.read) {
      if (place == NOTHING) continue;
      attempt(Action{"has stored what was in place", -1, -1, -1, place}, [&](Consumer& next) {
        std::replace(next.read.begin(), next.read.end(), static_cast<uint8_t>(place), NOTHING);
        return true;
      });
    }
    for (int w = 0; w < sizes_.warps; ++w) {
      const int piece = consumer.warps[w].piece;
      switch (consumer.warps[w].at) {
        case BEGINS:
          attempt(Action{"begins piece", -1, -1, w, piece}, [&](Consumer& next) { return begin(next, w); });
          break;
        case WRITES:
          attempt(Action{"writes piece", -1, -1, w, piece}, [&](Consumer& next) { return write(next, w); });
          break;
        case STORES:
          attempt(Action{"stores piece", -1, -1, w, piece}, [&](Consumer& next) { return store(next, w, true); });
          attempt(Action{"leaves out piece", -1, -1, w, piece}, [&](Consumer& next) { return store(next, w, false); });
          break;
        case ENDS:
          attempt(Action{"ends", -1, -1, w, -1}, [&](Consumer& next) { return end(next, w); });
      }
    }
  }

  bool finished(const Consumer& consumer) const {
    if (consumer.arrived) throw Violation{"arrivals are left at the consumer's barrier"};
    return all_ended(consumer);
  }

  // All warps but the first are equal.
  uint64_t key(Consumer consumer) const {
    std::sort(consumer.warps.begin() + 1, consumer.warps.end());
    return model::hash(consumer);
  }

 private:
  bool all_ended(const Consumer& consumer) const {
    const auto first = consumer.warps.begin();
    return std::all_of(first, first + sizes_.warps, [](const Warp& warp) { return warp.at == ENDED; });
  }

  // Groups of stores older than the latest `pending` have read their places.
  static bool stores_read(const Consumer& consumer, int pending) {
    return std::all_of(
        consumer.read.begin() + pending, consumer.read.end(), [](uint8_t place) { return place == NOTHING; });
  }

  bool begin(Consumer& consumer, int w) const {
    const int pending = defect_ == waits_for_one_store_less ? sizes_.places : sizes_.places - 1;
    if (w == 0 && defect_ != no_wait_for_stores && !stores_read(consumer, pending)) return false;
    consumer.warps[w].at = AT_FIRST_BARRIER;
    if (defect_ == no_barrier_before_writing) consumer.warps[w].at = WRITES;
    else arrive(consumer);
    return true;
  }

  bool write(Consumer& consumer, int w) const {
    Warp& warp = consumer.warps[w];
    const int place = warp.piece % sizes_.places;
    if (std::count(consumer.read.begin(), consumer.read.end(), place)) {
      throw Violation{"a warp overwrites what a store reads"};
    }
    warp.written[place] = warp.piece;
    warp.at = AT_SECOND_BARRIER;
    if (defect_ == no_barrier_before_store) after_second_barrier(consumer, w);
    else arrive(consumer);
    return true;
  }

  // Both barriers of a piece are the same one: the warps at it go on from where they are.
  void arrive(Consumer& consumer) const {
    if (++consumer.arrived < sizes_.warps) return;
    consumer.arrived = 0;
    for (int w = 0; w < sizes_.warps; ++w) {
      if (consumer.warps[w].at == AT_FIRST_BARRIER) consumer.warps[w].at = WRITES;
      else if (consumer.warps[w].at == AT_SECOND_BARRIER) after_second_barrier(consumer, w);
    }
  }

  void after_second_barrier(Consumer& consumer, int w) const {
    if (w == 0) consumer.warps[w].at = STORES;
    else next_piece(consumer.warps[w]);
  }

  void next_piece(Warp& warp) const { warp.at = ++warp.piece < sizes_.pieces ? BEGINS : ENDS; }

  bool store(Consumer& consumer, int w, bool inside) const {
    Warp& warp = consumer.warps[w];
    const auto place = static_cast<uint8_t>(warp.piece % sizes_.places);
    if (inside || defect_ != no_empty_group) {
      if (consumer.read.back() != NOTHING) return false;  // as many as the model remembers
      std::copy_backward(consumer.read.begin(), consumer.read.end() - 1, consumer.read.end());
      consumer.read[0] = inside ? place : NOTHING;
    }
    for (int other = 0; inside && other < sizes_.warps; ++other) {
      if (consumer.warps[other].written[place] != warp.piece) {
        throw Violation{"a store reads what a warp has not written"};
      }
    }
    next_piece(warp);
    return true;
  }

  bool end(Consumer& consumer, int w) const {
    if (w == 0 && defect_ != no_wait_at_the_end && !stores_read(consumer, 0)) return false;
    consumer.warps[w].at = ENDED;
    if (all_ended(consumer) && !stores_read(consumer, 0)) throw Violation{"a store reads after the consumer's end"};
    return true;
  }

  Sizes sizes_;
  Defect defect_;
};

}  // namespace staging

#endif
