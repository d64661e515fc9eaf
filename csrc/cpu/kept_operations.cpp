// The operators over kept sets. The pairs of some rows are concatenated, [P]: row i has the pairs
// [bounds[i], bounds[i + 1]), and their words are ids[starts[i]], ids[starts[i] + 1], ... Words are token ids of the
// whole vocabulary; `first` is the id of the weight's first row.
#include <algorithm>
#include <limits>
#include <vector>

#include "arguments.h"
#include "kept.h"
#include "rows.h"

namespace exgrpo {
namespace {

constexpr int64_t products_of_a_thread = 65536;  // minimum of multiplications, which take a few microseconds
constexpr int64_t bytes_of_a_thread = 1 << 20;   // minimum of bytes set to 0

template <class E, class T>
KeptKernels<E, T> kernels() {
  EXGRPO_PICK(kept_kernels<E, T>())
}

template <class T>
RowKernels<T> row_kernels_of() {
  EXGRPO_PICK(row_kernels<T>())
}

struct Sets {
  const int32_t* ids;
  const int64_t *starts, *bounds;
  int64_t rows, pairs;

  Sets(const Tensor& ids_of_all, const Tensor& starts_of, const Tensor& bounds_of) {
    const bool fits = ids_of_all.is_cpu() && ids_of_all.scalar_type() == ScalarType::Int && ids_of_all.is_contiguous();
    check(fits, "ids", "a contiguous int32 tensor on the CPU");
    ids = static_cast<const int32_t*>(ids_of_all.data_ptr());
    rows = starts_of.numel();
    starts = values<int64_t>(starts_of, rows, "starts");
    bounds = values<int64_t>(bounds_of, rows + 1, "bounds");
    pairs = bounds[rows];
    bool within = bounds[0] == 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t count = bounds[i + 1] - bounds[i];
      within = within && count >= 0 && starts[i] >= 0 && starts[i] + count <= ids_of_all.numel();
    }
    check(within, "bounds", "sets within the ids");
  }

  const int32_t* words(int64_t row) const { return ids + starts[row]; }
  int64_t size(int64_t row) const { return bounds[row + 1] - bounds[row]; }

  // The place of a word in its row's set; -1 if it is not there.
  int64_t place(int64_t row, int64_t word) const {
    const int32_t* begin = words(row);
    const int64_t count = size(row);
    const int32_t* found = std::find(begin, begin + count, static_cast<int32_t>(word));
    return found == begin + count ? -1 : found - begin;
  }

  int64_t row_of(int64_t pair) const { return std::upper_bound(bounds, bounds + rows, pair) - bounds - 1; }

  // Calls function(row) on threads with equal numbers of pairs; a row is processed by one thread.
  template <class F>
  void each(int64_t columns, const F& function) const {
    const int64_t grain = std::max<int64_t>(1, products_of_a_thread / std::max<int64_t>(1, columns));
    torch::stable::parallel_for(0, pairs, grain, [&](int64_t begin, int64_t end) {
      const int64_t *from = std::lower_bound(bounds, bounds + rows, begin);
      for (int64_t i = from - bounds; i < rows && bounds[i] < end; ++i) {
        if (size(i) > 0) function(i);
      }
    });
  }
};

Tensor kept_logits(Tensor hidden, Tensor weight, OptionalTensor bias, std::optional<double> softcap, Tensor ids,
                   int64_t first, Tensor starts, Tensor bounds) {
  return for_entries_of(weight, "weight", [&](auto entry, auto zero) {
    using E = decltype(entry);
    using T = decltype(zero);
    const Matrix<E> states(hidden, "hidden", weight.scalar_type()), words(weight, "weight", weight.scalar_type());
    check(states.columns == words.columns, "weight", "rows as long as those of hidden");
    const Sets sets(ids, starts, bounds);
    check(sets.rows == states.rows, "starts", "a number for each row of hidden");
    const T* added = values<T>(bias, words.rows, "bias");
    const auto dot = kernels<E, T>().dot;
    const auto largest = row_kernels_of<T>().largest;
    Tensor result = new_tensor(hidden, {sets.pairs}, scalar_type<T>);
    T* out = values<T>(result, sets.pairs, "result");
    sets.each(words.columns, [&](int64_t i) {
      const int32_t* own = sets.words(i);
      T* logits = out + sets.bounds[i];
      for (int64_t j = 0; j < sets.size(i); ++j) {
        const int64_t word = own[j] - first;
        const bool held = word >= 0 && word < words.rows;
        logits[j] = held ? dot(states.row(i), words.row(word), words.columns) + (added == nullptr ? T(0) : added[word])
                         : -std::numeric_limits<T>::infinity();
      }
      if (softcap) {
        // Words of other ranks result in -softcap.
        largest(logits, sets.size(i), nullptr, static_cast<T>(*softcap));
        for (int64_t j = 0; j < sets.size(i); ++j) {
          const int64_t word = own[j] - first;
          if (word < 0 || word >= words.rows) logits[j] = -std::numeric_limits<T>::infinity();
        }
      }
    });
    return result;
  });
}

// Anchor, gap, S and sum of exp(d) d of each row, [4, rows]; 0 of a row without pairs. `write`: exp(d) over the logits.
Tensor kept_sums(Tensor logits, Tensor ids, Tensor starts, Tensor bounds, Tensor target, OptionalTensor temperature,
                 OptionalTensor anchor, bool write) {
  return for_type_of(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const Sets sets(ids, starts, bounds);
    const int64_t rows = sets.rows, *words = values<int64_t>(target, rows, "target");
    T* all = values<T>(logits, sets.pairs, "logits");
    const T* divisor = values<T>(temperature, rows, "temperature");
    const T* given = values<T>(anchor, rows, "anchor");
    const RowKernels<T> run = row_kernels_of<T>();
    Tensor result = new_tensor(logits, {4, rows});
    T* out = values<T>(result, 4 * rows, "result");
    std::fill(out, out + 4 * rows, T(0));
    sets.each(1, [&](int64_t i) {
      T* row = all + sets.bounds[i];
      const int64_t size = sets.size(i), place = sets.place(i, words[i]);
      const T a = given == nullptr ? run.largest(row, size, nullptr, T(0)) : given[i];
      const T tau = divisor == nullptr ? T(1) : divisor[i];
      out[i] = a;
      out[rows + i] = place < 0 ? -std::numeric_limits<T>::infinity() : (row[place] - a) / tau;
      const RowSums<T> sums = run.sums(row, size, place, a, tau, write);
      out[2 * rows + i] = sums.rest;
      out[3 * rows + i] = sums.moment;
    });
    return result;
  });
}

// F in place of exp(d); without log_prob and entropy it is exp(d) but at the target.
void kept_gradient(Tensor exponential, Tensor ids, Tensor starts, Tensor bounds, Tensor target,
                   OptionalTensor temperature, std::optional<double> softcap, Tensor anchor, Tensor gap, Tensor mean,
                   Tensor at_target, OptionalTensor log_prob, OptionalTensor entropy) {
  for_type_of(exponential, "exponential", [&](auto zero) {
    using T = decltype(zero);
    const Sets sets(ids, starts, bounds);
    const int64_t rows = sets.rows, *words = values<int64_t>(target, rows, "target");
    T* all = values<T>(exponential, sets.pairs, "exponential");
    const T* divisor = values<T>(temperature, rows, "temperature");
    const T *a = values<T>(anchor, rows, "anchor"), *d = values<T>(gap, rows, "gap");
    const T *u = values<T>(mean, rows, "mean"), *f = values<T>(at_target, rows, "at_target");
    const T *c = values<T>(log_prob, rows, "log_prob"), *h = values<T>(entropy, rows, "entropy");
    check((c == nullptr) == (h == nullptr), "entropy", "a tensor if log_prob is one");
    const auto gradient = row_kernels_of<T>().gradient;
    sets.each(1, [&](int64_t i) {
      T* row = all + sets.bounds[i];
      const int64_t place = sets.place(i, words[i]);
      const T tau = divisor == nullptr ? T(1) : divisor[i];
      if (c != nullptr) {
        gradient(row, sets.size(i), place, {c[i], h[i], u[i], f[i], T(softcap.value_or(0)), d[i], a[i], tau});
      } else if (place >= 0) {
        row[place] = f[i];
      }
    });
  });
}

// Sum over each row's words of F times their rows of the weight, [rows, D].
Tensor kept_hidden_gradient(Tensor factors, Tensor weight, Tensor ids, int64_t first, Tensor starts, Tensor bounds) {
  return for_entries_of(weight, "weight", [&](auto entry, auto zero) {
    using E = decltype(entry);
    using T = decltype(zero);
    const Matrix<E> words(weight, "weight", weight.scalar_type());
    const Sets sets(ids, starts, bounds);
    const T* f = values<T>(factors, sets.pairs, "factors");
    const auto add = kernels<E, T>().add;
    Tensor result = new_tensor(factors, {sets.rows, words.columns});
    T* out = values<T>(result, sets.rows * words.columns, "result");
    std::fill(out, out + sets.rows * words.columns, T(0));
    sets.each(words.columns, [&](int64_t i) {
      for (int64_t j = 0; j < sets.size(i); ++j) {
        const int64_t word = sets.words(i)[j] - first;
        if (word >= 0 && word < words.rows) {
          add(out + i * words.columns, words.row(word), f[sets.bounds[i] + j], words.columns);
        }
      }
    });
    return result;
  });
}

// The pairs with nonzero factor and a word of this rank, sorted by word, then by row: word << 32 | pair.
template <class T>
std::vector<uint64_t> ordered(const Sets& sets, const T* factors, const T* scale, int64_t first, int64_t vocabulary) {
  std::vector<uint64_t> keys;
  keys.reserve(sets.pairs);
  for (int64_t i = 0; i < sets.rows; ++i) {
    for (int64_t j = 0; j < sets.size(i); ++j) {
      const int64_t pair = sets.bounds[i] + j, word = sets.words(i)[j] - first;
      if (word >= 0 && word < vocabulary && factors[pair] * scale[i] != 0) {
        keys.push_back(static_cast<uint64_t>(word) << 32 | static_cast<uint64_t>(pair));
      }
    }
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

int64_t word_of(uint64_t key) { return static_cast<int64_t>(key >> 32); }
int64_t pair_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffff); }

// Calls function(begin, end) for the keys of each word, on threads; a word is processed by one thread.
template <class F>
void each_word(const std::vector<uint64_t>& keys, int64_t columns, const F& function) {
  const int64_t count = keys.size(), grain = std::max<int64_t>(1, products_of_a_thread / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    while (begin > 0 && begin < count && word_of(keys[begin]) == word_of(keys[begin - 1])) ++begin;
    while (begin < end) {
      int64_t last = begin + 1;
      while (last < count && word_of(keys[last]) == word_of(keys[begin])) ++last;
      function(begin, last);
      begin = last;
    }
  });
}

// Adds the sums of scale * F times hidden states to the words' rows of `total` [V, D]; `fresh`: writes them, and 0
// elsewhere. Rows of bfloat16 numbers are written, never added to.
void kept_weight_gradient(Tensor factors, Tensor hidden, Tensor scale, Tensor ids, int64_t first, Tensor starts,
                          Tensor bounds, Tensor total, bool fresh) {
  for_entries_of(hidden, "hidden", [&](auto entry, auto zero) {
    using E = decltype(entry);
    using T = decltype(zero);
    const Matrix<E> states(hidden, "hidden", hidden.scalar_type());
    const Sets sets(ids, starts, bounds);
    check(sets.pairs <= std::numeric_limits<uint32_t>::max(), "bounds", "less than 2^32 pairs");
    check(sets.rows == states.rows, "starts", "a number for each row of hidden");
    const T *f = values<T>(factors, sets.pairs, "factors"), *r = values<T>(scale, sets.rows, "scale");
    const int64_t columns = states.columns;
    check(total.dim() == 2 && total.size(1) == columns && total.is_contiguous(), "total", "a contiguous matrix [V, D]");
    check(fresh || total.scalar_type() == scalar_type<T>, "fresh", "true where the sums are rounded");
    const auto keys = ordered(sets, f, r, first, total.size(0));
    const KeptKernels<E, T> run = kernels<E, T>();
    if (fresh) {
      char* bytes = static_cast<char*>(total.data_ptr());
      const int64_t all = total.numel() * total.element_size();
      torch::stable::parallel_for(0, all, bytes_of_a_thread,
                                  [&](int64_t begin, int64_t end) { std::fill(bytes + begin, bytes + end, 0); });
    }
    const auto sum = [&](int64_t begin, int64_t end, T* out) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t pair = pair_of(keys[k]), row = sets.row_of(pair);
        run.add(out, states.row(row), f[pair] * r[row], columns);
      }
    };
    if (total.scalar_type() == scalar_type<T>) {
      T* out = values<T>(total, total.numel(), "total");
      each_word(keys, columns, [&](int64_t begin, int64_t end) { sum(begin, end, out + word_of(keys[begin]) * columns); });
      return;
    }
    const Matrix<E> out(total, "total", hidden.scalar_type());
    each_word(keys, columns, [&](int64_t begin, int64_t end) {
      std::vector<T> own(columns);
      sum(begin, end, own.data());
      run.put(out.row(word_of(keys[begin])), own.data(), columns);
    });
  });
}

}  // namespace
}  // namespace exgrpo

STABLE_TORCH_LIBRARY_FRAGMENT(exgrpo_C, library) {
  library.def(
      "kept_logits(Tensor hidden, Tensor weight, Tensor? bias, float? softcap, Tensor ids, int first, Tensor starts, "
      "Tensor bounds) -> Tensor");
  library.def(
      "kept_sums(Tensor(a!) logits, Tensor ids, Tensor starts, Tensor bounds, Tensor target, Tensor? temperature, "
      "Tensor? anchor, bool write) -> Tensor");
  library.def(
      "kept_gradient(Tensor(a!) exponential, Tensor ids, Tensor starts, Tensor bounds, Tensor target, "
      "Tensor? temperature, float? softcap, Tensor anchor, Tensor gap, Tensor mean, Tensor at_target, "
      "Tensor? log_prob, Tensor? entropy) -> ()");
  library.def(
      "kept_hidden_gradient(Tensor factors, Tensor weight, Tensor ids, int first, Tensor starts, Tensor bounds) -> "
      "Tensor");
  library.def(
      "kept_weight_gradient(Tensor factors, Tensor hidden, Tensor scale, Tensor ids, int first, Tensor starts, "
      "Tensor bounds, Tensor(a!) total, bool fresh) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CPU, library) {
  library.impl("kept_logits", TORCH_BOX(&exgrpo::kept_logits));
  library.impl("kept_sums", TORCH_BOX(&exgrpo::kept_sums));
  library.impl("kept_gradient", TORCH_BOX(&exgrpo::kept_gradient));
  library.impl("kept_hidden_gradient", TORCH_BOX(&exgrpo::kept_hidden_gradient));
  library.impl("kept_weight_gradient", TORCH_BOX(&exgrpo::kept_weight_gradient));
}
