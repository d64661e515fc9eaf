// Scratch memory and threads.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "product_pack.h"

namespace exgrpo::EXGRPO_VARIANT {

// Uninitialised memory aligned to a cache line.
template <class Entry>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : data_(static_cast<Entry*>(std::aligned_alloc(64, round_up((size + 1) * sizeof(Entry), 64)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  operator Entry*() const { return data_; }

 private:
  Entry* data_;
};

// Calls function(begin, end) for parts of [0, count), each on some thread.
template <class Function>
void for_parts(const Parallel& parallel, int64_t count, const Function& function) {
  const auto body = [](int64_t begin, int64_t end, void* context) {
    const TileRegisters registers;
    (*static_cast<const Function*>(context))(begin, end);
  };
  if (count > 0) parallel.run(count, body, const_cast<Function*>(&function));
}

// Lets the system allocate missing pages of memory that will be written: a page fault for each takes
// longer. This is optional, so errors are ignored.
inline void make_pages(void* begin, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t page = 4096;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(begin) + bytes - first, MADV_POPULATE_WRITE);
#endif
}

// A part of a matrix, padded with 0 to a multiple of kDepthStep columns, with rows that do not conflict in the cache.
class Padded {
 public:
  Padded(const Bfloat16Matrix& matrix, int64_t first_row, int64_t last_row, int64_t first, int64_t last)
      : stride(spread_stride(last - first)),
        depth(round_up(last - first, kDepthStep)),
        data_((last_row - first_row) * stride) {
    copy_columns(matrix, first_row, last_row, first, last, data_, stride);
  }
  const uint16_t* row(int64_t i) const { return data_ + i * stride; }

  const int64_t stride, depth;

 private:
  const Scratch<uint16_t> data_;
};

}  // namespace exgrpo::EXGRPO_VARIANT
