// Vectors as wide as the instruction set that the file is compiled for, by the compiler's vector extensions, and the
// functions that the kernels use. For files that are compiled once per instruction set.
//
// NaN propagates everywhere: comparisons are written so that they are false for it.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#define EXGRPO_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define EXGRPO_VECTOR_BYTES 32
#else
#define EXGRPO_VECTOR_BYTES 16
#endif

namespace exgrpo::EXGRPO_VARIANT {

constexpr long double ln2 = 0.693147180559945309417232121458176568L;

template <class T>
struct Format;

template <>
struct Format<float> {
  using Signed = int32_t;
  using Unsigned = uint32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float to_integer = 0x1.8p23f;   // adding it leaves no fractional bits
  static constexpr float lowest_exponent = -87.3f;  // exp below it is 0 instead of subnormal
  static constexpr int ln2_bits = 15;                // n ln2_high is exact
  static constexpr int exp_degree = 7, log_degree = 4;
};

template <>
struct Format<double> {
  using Signed = int64_t;
  using Unsigned = uint64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double to_integer = 0x1.8p52;
  static constexpr double lowest_exponent = -708.3;
  static constexpr int ln2_bits = 40;
  static constexpr int exp_degree = 13, log_degree = 10;
};

template <class T>
struct Types {
  typedef T Vector __attribute__((vector_size(EXGRPO_VECTOR_BYTES)));
  typedef typename Format<T>::Signed Mask __attribute__((vector_size(EXGRPO_VECTOR_BYTES)));
  typedef typename Format<T>::Unsigned Bits __attribute__((vector_size(EXGRPO_VECTOR_BYTES)));
};

template <class T>
using Vector = typename Types<T>::Vector;
template <class T>
using Mask = typename Types<T>::Mask;  // -1 in lanes whose comparison is true, else 0
template <class T>
using Bits = typename Types<T>::Bits;

template <class T>
constexpr int lanes = EXGRPO_VECTOR_BYTES / sizeof(T);

template <class T>
constexpr T ln2_high = static_cast<T>(static_cast<int64_t>(ln2 * (int64_t{1} << Format<T>::ln2_bits))) /
                       static_cast<T>(int64_t{1} << Format<T>::ln2_bits);
template <class T>
constexpr T ln2_low = static_cast<T>(ln2 - static_cast<long double>(ln2_high<T>));

template <class T>
inline Vector<T> fill(T value) {
  return Vector<T>{} + value;
}

template <class T>
inline Vector<T> load(const T* from) {
  Vector<T> value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

// The first `count` lanes; `rest` in the others.
template <class T>
inline Vector<T> load(const T* from, int64_t count, T rest) {
  if (count >= lanes<T>) {
    return load(from);
  }
  Vector<T> value = fill(rest);
  __builtin_memcpy(&value, from, count * sizeof(T));
  return value;
}

template <class T>
inline void store(T* to, Vector<T> value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

template <class T>
inline void store(T* to, Vector<T> value, int64_t count) {
  if (count >= lanes<T>) {
    store(to, value);
  } else {
    __builtin_memcpy(to, &value, count * sizeof(T));
  }
}

template <class T>
inline Vector<T> at_least(Vector<T> x, T bound) {
  return x < bound ? fill(bound) : x;
}

template <class T>
inline Vector<T> at_most(Vector<T> x, T bound) {
  return x > bound ? fill(bound) : x;
}

template <class T>
inline Vector<T> magnitude(Vector<T> x) {
  return x < T(0) ? -x : x;
}

// exp of x <= 80, to an ulp: 2^n times the series of the remainder, which is at most ln(2) / 2.
template <class T>
inline Vector<T> exponential(Vector<T> x) {
  using F = Format<T>;
  const Vector<T> shifted = x * static_cast<T>(1 / ln2) + F::to_integer;
  const Vector<T> n = shifted - F::to_integer;
  const Vector<T> r = (x - n * ln2_high<T>)-n * ln2_low<T>;
  long double inverse_factorial = 1;
  for (int k = 2; k <= F::exp_degree; ++k) {
    inverse_factorial /= k;
  }
  Vector<T> series = fill(static_cast<T>(inverse_factorial));
#pragma GCC unroll 16
  for (int k = F::exp_degree; k > 0; --k) {
    inverse_factorial *= k;
    series = series * r + static_cast<T>(inverse_factorial);
  }
  const Bits<T> power = (Bits<T>)shifted - (Bits<T>)fill(F::to_integer) + F::bias;
  const Vector<T> scale = (Vector<T>)(power << F::mantissa);
  return x < F::lowest_exponent ? Vector<T>{} : series * scale;
}

// log of a normal number x > 0, to an ulp, of its own size near 1 too: log(2^e (1 + f)) with 1 + f around 1 and, in
// s = f / (2 + f), log(1 + f) = 2 (s + s^3/3 + s^5/5 + ...) = f - s (f - 2 (s^2/3 + s^4/5 + ...)).
template <class T>
inline Vector<T> logarithm(Vector<T> x) {
  using F = Format<T>;
  const Bits<T> bits = (Bits<T>)x, middle = (Bits<T>)fill(static_cast<T>(0.70710678118654752L));
  const Mask<T> exponent = (Mask<T>)(bits - middle) >> F::mantissa;
  const Vector<T> f = (Vector<T>)(bits - ((Bits<T>)exponent << F::mantissa)) - T(1);
  const Vector<T> s = f / (f + T(2));
  const Vector<T> square = s * s;
  Vector<T> series = fill(T(2) / T(2 * F::log_degree + 3));
#pragma GCC unroll 16
  for (int k = F::log_degree; k > 0; --k) {
    series = series * square + T(2) / T(2 * k + 1);
  }
  const Vector<T> e = __builtin_convertvector(exponent, Vector<T>);
  const Vector<T> small = f - s * (f - series * square);
  return x == x ? e * ln2_high<T> + (small + e * ln2_low<T>) : x;
}

// log(1 + x), x >= 0, to an ulp or two of its own size: the part of x lost in 1 + x is added.
template <class T>
inline Vector<T> logarithm_plus_one(Vector<T> x) {
  const Vector<T> u = x + T(1);
  return logarithm<T>(u) + (x - (u - T(1))) / u;
}

// exp(x) - 1, x <= 0, to an ulp or two of its own size: with u near exp(x), exp(x) is u + u (x - log u).
template <class T>
inline Vector<T> exponential_minus_one(Vector<T> x) {
  const Vector<T> bounded = at_least(x, T(-50));  // its exp is negligible against 1
  const Vector<T> u = exponential<T>(bounded);
  return (u - T(1)) + u * (bounded - logarithm<T>(u));
}

template <class T>
inline Vector<T> hyperbolic_tangent(Vector<T> x) {
  const Vector<T> t = exponential_minus_one<T>(T(-2) * magnitude<T>(x));
  const Vector<T> size = -t / (t + T(2));
  return x < T(0) ? -size : size;
}

// 1 / (1 + exp(-x))
template <class T>
inline Vector<T> sigmoid(Vector<T> x) {
  const Vector<T> small = exponential<T>(-magnitude<T>(x));
  return (x < T(0) ? small : fill(T(1))) / (small + T(1));
}

}  // namespace exgrpo::EXGRPO_VARIANT
