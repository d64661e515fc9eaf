#include "rows.h"

#include "vector.h"

namespace exgrpo::EXGRPO_VARIANT {
namespace {

constexpr int accumulators = 4;
constexpr int block_vectors = 64;  // summed in T before the sum is added to one in double

template <class T>
struct Totals {
  double sum[lanes<T>] = {};

  void add(const Vector<T> (&parts)[accumulators]) {
    const Vector<T> together = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (int i = 0; i < lanes<T>; ++i) {
      sum[i] += together[i];
    }
  }

  T value() const {
    double total = 0;
    for (int i = 0; i < lanes<T>; ++i) {
      total += sum[i];
    }
    return static_cast<T>(total);
  }
};

template <class T>
Vector<T> larger(Vector<T> a, Vector<T> b) {
  return a > b ? a : b;
}

template <class T>
void shape(T* row, int64_t size, const T* bias, T softcap) {
  for (int64_t i = 0; i < size; i += lanes<T>) {
    const int64_t count = size - i;
    Vector<T> z = load(row + i, count, T(0));
    if (bias != nullptr) {
      z += load(bias + i, count, T(0));
    }
    if (softcap != 0) {
      z = softcap * hyperbolic_tangent<T>(z / softcap);
    }
    store(row + i, z, count);
  }
}

template <class T>
T largest(T* row, int64_t size, const T* bias, T softcap) {
  constexpr T lowest = -__builtin_inff();
  constexpr int64_t step = accumulators * lanes<T>;
  if (bias != nullptr || softcap != 0) {
    shape(row, size, bias, softcap);
  }
  Vector<T> most[accumulators] = {fill(lowest), fill(lowest), fill(lowest), fill(lowest)};
  int64_t i = 0;
  for (; i + step <= size; i += step) {
    for (int k = 0; k < accumulators; ++k) {
      most[k] = larger<T>(load(row + i + k * lanes<T>), most[k]);
    }
  }
  for (; i < size; i += lanes<T>) {
    most[0] = larger<T>(load(row + i, size - i, lowest), most[0]);
  }
  const Vector<T> all = larger<T>(larger<T>(most[0], most[1]), larger<T>(most[2], most[3]));
  T result = all[0];
  for (int k = 1; k < lanes<T>; ++k) {
    result = all[k] > result ? all[k] : result;
  }
  return result;
}

// Adds exp(d) of the first `count` lanes of a vector to the sums.
template <class T, bool SCALED, bool WRITE>
inline void add_vector(T* at, int64_t count, T anchor, T temperature, Vector<T>& rest, Vector<T>& moment) {
  Vector<T> d = load(at, count, T(-__builtin_inff())) - anchor;
  if (SCALED) {
    d /= temperature;
  }
  d = at_least(d, T(underflown));
  const Vector<T> e = exponential<T>(d);
  rest += e;
  moment += e * d;
  if (WRITE) {
    store(at, e, count);
  }
}

template <class T, bool SCALED, bool WRITE>
RowSums<T> sums_of(T* row, int64_t size, T anchor, T temperature) {
  constexpr int64_t step = accumulators * lanes<T>, block = block_vectors * lanes<T>;
  Totals<T> rest_total, moment_total;
  for (int64_t start = 0; start < size; start += block) {
    const int64_t end = start + block < size ? start + block : size;
    Vector<T> rest[accumulators] = {}, moment[accumulators] = {};
    int64_t i = start;
    for (; i + step <= end; i += step) {
#pragma GCC unroll 4
      for (int k = 0; k < accumulators; ++k) {
        add_vector<T, SCALED, WRITE>(row + i + k * lanes<T>, lanes<T>, anchor, temperature, rest[k], moment[k]);
      }
    }
    for (; i < end; i += lanes<T>) {
      add_vector<T, SCALED, WRITE>(row + i, end - i, anchor, temperature, rest[0], moment[0]);
    }
    rest_total.add(rest);
    moment_total.add(moment);
  }
  return {rest_total.value(), moment_total.value()};
}

template <class T>
RowSums<T> sums(T* row, int64_t size, int64_t target, T anchor, T temperature, bool write) {
  if (target >= 0) {
    row[target] = -__builtin_inff();
  }
  if (temperature == 1) {
    return write ? sums_of<T, false, true>(row, size, anchor, temperature)
                 : sums_of<T, false, false>(row, size, anchor, temperature);
  }
  return write ? sums_of<T, true, true>(row, size, anchor, temperature)
               : sums_of<T, true, false>(row, size, anchor, temperature);
}

template <class T, class Scalar>
inline Scalar slope(Scalar d, const RowGradient<T>& terms) {
  const Scalar capped = (d * terms.temperature + terms.anchor) / terms.softcap;
  return T(1) - capped * capped;
}

template <class T, bool CAPPED>
void gradient_of(T* row, int64_t size, const RowGradient<T>& terms) {
  constexpr T smallest = sizeof(T) == 4 ? T(0x1p-126) : T(0x1p-1022);
  for (int64_t i = 0; i < size; i += lanes<T>) {
    const int64_t count = size - i;
    const Vector<T> e = load(row + i, count, T(0));
    // log(exp(d)) is d to an ulp of 1.
    const Vector<T> d = e < smallest ? fill(T(underflown)) : logarithm<T>(e);
    Vector<T> f = e * (terms.log_prob + terms.entropy * (d - terms.mean));
    if (CAPPED) {
      f *= slope<T>(d, terms);
    }
    store(row + i, f, count);
  }
}

template <class T>
void gradient(T* row, int64_t size, int64_t target, const RowGradient<T>& terms) {
  const bool capped = terms.softcap != 0;
  (capped ? gradient_of<T, true> : gradient_of<T, false>)(row, size, terms);
  if (target >= 0) {
    row[target] = capped ? terms.at_target * slope<T>(terms.gap, terms) : terms.at_target;
  }
}

}  // namespace

template <class T>
RowKernels<T> row_kernels() {
  return {largest<T>, sums<T>, gradient<T>};
}

template RowKernels<float> row_kernels<float>();
template RowKernels<double> row_kernels<double>();

}  // namespace exgrpo::EXGRPO_VARIANT
