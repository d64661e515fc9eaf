#include "kept.h"

#include "vector.h"

namespace exgrpo::EXGRPO_VARIANT {
namespace {

constexpr int chains = 4;  // of independent additions

typedef uint16_t Halves __attribute__((vector_size(EXGRPO_VECTOR_BYTES / 2)));

inline Vector<float> widened(const float* from) { return load(from); }

inline Vector<double> widened(const double* from) { return load(from); }

inline Vector<float> widened(const uint16_t* from) {
  Halves bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return (Vector<float>)(__builtin_convertvector(bits, Bits<float>) << 16);
}

template <class T>
inline T widened_one(T value) {
  return value;
}

inline float widened_one(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

template <class T>
inline T narrowed(T value, T) {
  return value;
}

// Rounds to the nearest bfloat16 number, ties to even; NaN stays NaN.
inline uint16_t narrowed(float value, uint16_t) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<uint16_t>((value == value ? rounded : bits | 0x400000) >> 16);
}

template <class E, class T>
T dot(const E* a, const E* b, int64_t size) {
  constexpr int64_t step = chains * lanes<T>;
  Vector<T> sums[chains] = {};
  int64_t i = 0;
  for (; i + step <= size; i += step) {
#pragma GCC unroll 4
    for (int k = 0; k < chains; ++k) {
      sums[k] += widened(a + i + k * lanes<T>) * widened(b + i + k * lanes<T>);
    }
  }
  for (; i + lanes<T> <= size; i += lanes<T>) {
    sums[0] += widened(a + i) * widened(b + i);
  }
  const Vector<T> together = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  T total = 0;
  for (int k = 0; k < lanes<T>; ++k) {
    total += together[k];
  }
  for (; i < size; ++i) {
    total += widened_one(a[i]) * widened_one(b[i]);
  }
  return total;
}

template <class E, class T>
void add(T* total, const E* row, T factor, int64_t size) {
  int64_t i = 0;
  for (; i + lanes<T> <= size; i += lanes<T>) {
    store(total + i, load(total + i) + factor * widened(row + i));
  }
  for (; i < size; ++i) {
    total[i] += factor * widened_one(row[i]);
  }
}

template <class E, class T>
void add_rows(T* total, const E* rows, int64_t stride, const T* factors, int64_t count, int64_t size) {
  const int64_t whole = size - size % lanes<T>;
  for (; count >= chains; count -= chains, rows += chains * stride, factors += chains) {
    for (int64_t i = 0; i < whole; i += lanes<T>) {
      Vector<T> sum = load(total + i);
#pragma GCC unroll 4
      for (int k = 0; k < chains; ++k) {  // reading several rows at once is faster
        sum += factors[k] * widened(rows + k * stride + i);
      }
      store(total + i, sum);
    }
    for (int k = 0; k < chains; ++k) {
      add(total + whole, rows + k * stride + whole, factors[k], size - whole);
    }
  }
  for (; count > 0; --count, rows += stride, ++factors) {
    add(total, rows, *factors, size);
  }
}

template <class E, class T>
void put(E* row, const T* total, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    row[i] = narrowed(total[i], E{});
  }
}

}  // namespace

template <class E, class T>
KeptKernels<E, T> kept_kernels() {
  return {dot<E, T>, add<E, T>, add_rows<E, T>, put<E, T>};
}

template KeptKernels<uint16_t, float> kept_kernels<uint16_t, float>();
template KeptKernels<float, float> kept_kernels<float, float>();
template KeptKernels<double, double> kept_kernels<double, double>();

}  // namespace exgrpo::EXGRPO_VARIANT
