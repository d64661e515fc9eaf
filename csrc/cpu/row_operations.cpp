// The operators over the rows of a chunk of logits.
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "kept.h"
#include "rows.h"

namespace exgrpo {
namespace {

constexpr int64_t entries_of_a_thread = 32768;  // minimum, which takes a few microseconds
constexpr int64_t columns_of_a_part = 64;       // whose rows are summed by one thread
constexpr int64_t columns_at_once = 2048;       // whose sums fit the first-level cache
constexpr int64_t rows_at_once = 64;            // summed before their sum is added

template <class T>
RowKernels<T> kernels() {
  EXGRPO_PICK(row_kernels<T>())
}

template <class E, class T>
auto adding() {
  EXGRPO_PICK(kept_kernels<E, T>().add_rows)
}

template <class T>
struct Rows {
  T* first;
  int64_t rows, size, stride;

  explicit Rows(const Tensor& matrix, const char* name) {
    check(matrix.is_cpu() && matrix.dim() == 2 && (matrix.stride(1) == 1 || matrix.size(1) < 2), name,
          "a matrix on the CPU with unit stride along its rows");
    first = static_cast<T*>(matrix.data_ptr());
    rows = matrix.size(0);
    size = matrix.size(1);
    stride = matrix.stride(0);
  }

  // Calls function(row, its number) on threads; each row is processed by one thread.
  template <class F>
  void each(const F& function) const {
    const int64_t grain = std::max<int64_t>(1, entries_of_a_thread / std::max<int64_t>(1, size));
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        function(first + i * stride, i);
      }
    });
  }

  const int64_t* targets(const Tensor& target) const {
    const int64_t* index = values<int64_t>(target, rows, "target");
    const bool within = std::all_of(index, index + rows, [this](int64_t y) { return y >= -1 && y < size; });
    check(within, "target", "columns of the matrix, or -1");
    return index;
  }
};

Tensor row_largest(Tensor logits, OptionalTensor bias, std::optional<double> softcap) {
  return for_type_of(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> matrix(logits, "logits");
    const T* added = values<T>(bias, matrix.size, "bias");
    const auto largest = kernels<T>().largest;
    Tensor result = new_tensor(logits, {matrix.rows});
    T* out = values<T>(result, matrix.rows, "result");
    matrix.each([&](T* row, int64_t i) { out[i] = largest(row, matrix.size, added, softcap.value_or(0)); });
    return result;
  });
}

Tensor row_sums(Tensor logits, OptionalTensor bias, std::optional<double> softcap, Tensor target,
                OptionalTensor temperature, OptionalTensor anchor, bool write) {
  return for_type_of(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> matrix(logits, "logits");
    const int64_t rows = matrix.rows, *index = matrix.targets(target);
    const T* added = values<T>(bias, matrix.size, "bias");
    const T* divisor = values<T>(temperature, rows, "temperature");
    const T* given = values<T>(anchor, rows, "anchor");
    const RowKernels<T> run = kernels<T>();
    const bool changes = bias || softcap;
    Tensor result = new_tensor(logits, {4, rows});
    T* out = values<T>(result, 4 * rows, "result");
    matrix.each([&](T* row, int64_t i) {
      T a = given == nullptr ? T(0) : given[i];
      if (given == nullptr || changes) {
        const T largest = run.largest(row, matrix.size, added, softcap.value_or(0));
        a = given == nullptr ? largest : a;
      }
      const T tau = divisor == nullptr ? T(1) : divisor[i];
      out[i] = a;
      out[rows + i] = index[i] < 0 ? -std::numeric_limits<T>::infinity() : (row[index[i]] - a) / tau;
      const RowSums<T> sums = run.sums(row, matrix.size, index[i], a, tau, write);
      out[2 * rows + i] = sums.rest;
      out[3 * rows + i] = sums.moment;
    });
    return result;
  });
}

void row_gradient(Tensor exponential, Tensor target, OptionalTensor temperature, std::optional<double> softcap,
                  Tensor anchor, Tensor gap, Tensor mean, Tensor at_target, Tensor log_prob, Tensor entropy) {
  for_type_of(exponential, "exponential", [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> matrix(exponential, "exponential");
    const int64_t rows = matrix.rows, *index = matrix.targets(target);
    const T* divisor = values<T>(temperature, rows, "temperature");
    const T *a = values<T>(anchor, rows, "anchor"), *d = values<T>(gap, rows, "gap");
    const T *u = values<T>(mean, rows, "mean"), *f = values<T>(at_target, rows, "at_target");
    const T *c = values<T>(log_prob, rows, "log_prob"), *h = values<T>(entropy, rows, "entropy");
    const T cap = softcap.value_or(0);
    const auto gradient = kernels<T>().gradient;
    matrix.each([&](T* row, int64_t i) {
      const T tau = divisor == nullptr ? T(1) : divisor[i];
      gradient(row, matrix.size, index[i], {c[i], h[i], u[i], f[i], cap, d[i], a[i], tau});
    });
  });
}

// Adds matrix.T @ factor to total. One thread sums a column, in an order that depends only on the number of rows.
void add_column_sums(Tensor matrix, Tensor factor, Tensor total) {
  for_entries_of(matrix, "matrix", [&](auto entry, auto zero) {
    using E = decltype(entry);
    using T = decltype(zero);
    const Matrix<E> terms(matrix, "matrix", matrix.scalar_type());
    const int64_t rows = terms.rows, columns = terms.columns;
    const T* factors = values<T>(factor, rows, "factor");
    T* out = values<T>(total, columns, "total");
    const auto add_rows = adding<E, T>();
    const int64_t parts = (columns + columns_of_a_part - 1) / columns_of_a_part;
    const int64_t grain = std::max<int64_t>(1, entries_of_a_thread / (columns_of_a_part * std::max<int64_t>(1, rows)));
    torch::stable::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(columns, end * columns_of_a_part);
      std::vector<T> sums(columns_at_once);
      for (int64_t first = begin * columns_of_a_part; first < last; first += columns_at_once) {
        const int64_t size = std::min(columns_at_once, last - first);
        for (int64_t row = 0; row < rows; row += rows_at_once) {
          std::fill(sums.begin(), sums.end(), T(0));
          const int64_t count = std::min(rows_at_once, rows - row);
          add_rows(sums.data(), terms.row(row) + first, terms.stride, factors + row, count, size);
          for (int64_t j = 0; j < size; ++j) out[first + j] += sums[j];
        }
      }
    });
  });
}

void advise_huge_pages(Tensor memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t{2} << 20;
  const auto start = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const uintptr_t first = (start + page - 1) / page * page;
  const uintptr_t last = (start + memory.numel() * memory.element_size()) / page * page;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // if it is refused, pages are small
  }
#endif
}

}  // namespace
}  // namespace exgrpo

STABLE_TORCH_LIBRARY_FRAGMENT(exgrpo_C, library) {
  library.def("row_largest(Tensor(a!) logits, Tensor? bias, float? softcap) -> Tensor");
  library.def(
      "row_sums(Tensor(a!) logits, Tensor? bias, float? softcap, Tensor target, Tensor? temperature, Tensor? anchor, "
      "bool write) -> Tensor");
  library.def(
      "row_gradient(Tensor(a!) exponential, Tensor target, Tensor? temperature, float? softcap, Tensor anchor, "
      "Tensor gap, Tensor mean, Tensor at_target, Tensor log_prob, Tensor entropy) -> ()");
  library.def("add_column_sums(Tensor matrix, Tensor factor, Tensor(a!) total) -> ()");
  library.def("advise_huge_pages(Tensor(a!) memory) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CPU, library) {
  library.impl("row_largest", TORCH_BOX(&exgrpo::row_largest));
  library.impl("row_sums", TORCH_BOX(&exgrpo::row_sums));
  library.impl("row_gradient", TORCH_BOX(&exgrpo::row_gradient));
  library.impl("add_column_sums", TORCH_BOX(&exgrpo::add_column_sums));
  library.impl("advise_huge_pages", TORCH_BOX(&exgrpo::advise_huge_pages));
}
