// Runs the kernels of rows, kept sets and tokens on memory that ends where their arguments end, for the sanitizers to watch.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>

#include "../../csrc/cpu/kept.cpp"
#include "../../csrc/cpu/rows.cpp"
#include "../../csrc/cpu/tokens.cpp"

using namespace exgrpo;
using namespace exgrpo::EXGRPO_VARIANT;

namespace {

template <class T>
using Array = std::unique_ptr<T[]>;

template <class T>
Array<T> numbers(int64_t count, T low, T high) {
  Array<T> array(new T[count]);
  for (int64_t i = 0; i < count; ++i) {
    array[i] = low + (high - low) * static_cast<T>(std::rand()) / static_cast<T>(RAND_MAX);
  }
  return array;
}

Array<bool> flags(int64_t count) {
  Array<bool> array(new bool[count]);
  for (int64_t i = 0; i < count; ++i) {
    array[i] = std::rand() % 2 == 0;
  }
  return array;
}

template <class T>
void rows(int64_t size) {
  const RowKernels<T> run = row_kernels<T>();
  const Array<T> bias = numbers<T>(size, -1, 1);
  for (int64_t target : {int64_t{-1}, size - 1}) {
    for (T softcap : {T(0), T(5)}) {
      for (bool write : {false, true}) {
        Array<T> row = numbers<T>(size, -200, 200);
        if (size > 2) {
          row[0] = std::numeric_limits<T>::quiet_NaN();
          row[1] = -std::numeric_limits<T>::infinity();
        }
        const T anchor = run.largest(row.get(), size, bias.get(), softcap);
        run.sums(row.get(), size, target, anchor, write ? T(0.5) : T(1), write);
        run.gradient(row.get(), size, target, {1, 2, -3, 4, softcap, -1, anchor, T(0.5)});
      }
    }
  }
}

template <class E, class T>
void kept(int64_t size) {
  const KeptKernels<E, T> run = kept_kernels<E, T>();
  const Array<E> a(new E[size]), b(new E[size]);
  const Array<T> total = numbers<T>(size, -1, 1);
  T expected = 0;
  for (int64_t i = 0; i < size; ++i) {
    const T value = static_cast<T>(i % 7) - 3;  // which bfloat16 has
    run.put(a.get() + i, &value, 1);
    run.put(b.get() + i, &value, 1);
    total[i] = 1;
    expected += value * value;
  }
  run.add(total.get(), a.get(), T(2), size);
  const int64_t count = 5;
  const Array<E> several(new E[count * size]);
  const T factors[count] = {1, 2, 3, 4, 5};
  for (int64_t i = 0; i < count * size; ++i) several[i] = a[i % size];
  run.add_rows(total.get(), several.get(), size, factors, count, size);
  bool right = run.dot(a.get(), b.get(), size) == expected;
  for (int64_t i = 0; i < size; ++i) {
    right = right && total[i] == 1 + 17 * (static_cast<T>(i % 7) - 3);
  }
  if (!right) {
    std::puts("wrong");
  }
}

template <class T>
void tokens(int64_t count) {
  const TokenKernels<T> run = token_kernels<T>();
  const Array<T> gap = numbers<T>(count, -1000, 0), rest = numbers<T>(count, 1, 100);
  const Array<T> moment = numbers<T>(count, -100, 0), temperature = numbers<T>(count, 1, 2);
  const Array<T> old = numbers<T>(count, -1000, 0), advantage = numbers<T>(count, -1, 1);
  const Array<bool> replayed = flags(count), mask = flags(count);
  const Array<T> results(new T[9 * count]), derivative(new T[count]);
  const SumVectors<T> sums = {gap.get(), rest.get(), moment.get()};
  for (const bool all : {false, true}) {
    const TokenVectors<T> own = {old.get(), advantage.get(), all ? replayed.get() : nullptr};
    const Clipping<T> clipping = {all, all, T(0.8), T(1.2), T(-2)};
    const RowTerms<T> terms = {clipping, T(7), T(0.5), all ? temperature.get() : nullptr, !all};
    run.finish(sums, results.get(), count, count / 2, count);
    run.policy_rows(sums, own, terms, results.get(), count, 0, count);
    run.objective(gap.get(), all ? rest.get() : nullptr, own, all ? mask.get() : nullptr, clipping, results.get(),
                  derivative.get(), count, 0, count);
  }
}

}  // namespace

int main() {
  for (int64_t size = 0; size < 150; ++size) {
    rows<float>(size);
    rows<double>(size);
    kept<uint16_t, float>(size);
    kept<float, float>(size);
    kept<double, double>(size);
    tokens<float>(size);
    tokens<double>(size);
  }
  rows<float>(5001);
  std::puts("done");
}
