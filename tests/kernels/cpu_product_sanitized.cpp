// Runs the products on memory that ends where their arguments end, for the sanitizers to watch, and compares what they
// give with plain loops.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

#ifdef EXGRPO_EMULATE_AMX
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // see product_tile.h
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "cpu_emulated_amx.h"
#endif
#include "../../csrc/cpu/product.cpp"

using namespace exgrpo;

namespace {

template <class T>
using Array = std::unique_ptr<T[]>;

Array<float> numbers(int64_t count) {
  Array<float> array(new float[count]);
  for (int64_t i = 0; i < count; ++i) array[i] = static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) + 0.5f;
  return array;
}

// A matrix without memory behind its last entry; each of its rows has a gap behind it.
struct Words {
  Words(int64_t rows, int64_t columns, int64_t gap)
      : data(new uint16_t[(rows - 1) * (columns + gap) + columns]), matrix{data.get(), rows, columns, columns + gap} {
    for (int64_t i = 0; i < (rows - 1) * (columns + gap) + columns; ++i) {
      data[i] = static_cast<uint16_t>(0x3f00 + std::rand() % 256);  // around 1
    }
  }
  const Array<uint16_t> data;
  const Bfloat16Matrix matrix;
};

// Three parts, one after the other.
void run(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  for (int64_t i = 0; i < 3; ++i) {
    if (count * i / 3 < count * (i + 1) / 3) body(count * i / 3, count * (i + 1) / 3, context);
  }
}

double entry(const Bfloat16Matrix& matrix, int64_t row, int64_t column) {
  const uint32_t bits = static_cast<uint32_t>(matrix.data[row * matrix.stride + column]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// All terms are positive: an error is one of rounding.
void expect(float found, double exact, double roundings) {
  if (std::abs(found - exact) <= roundings * std::abs(exact) + 1e-30) return;
  std::printf("found %.9g, expected %.9g\n", found, exact);
  std::exit(1);
}

void check_sums(const Logits& logits, const Shift& shift, const Bfloat16Matrix& out, const float* rest) {
  for (int64_t i = 0; i < logits.hidden.rows; ++i) {
    double sum = 0;
    for (int64_t v = 0; v < logits.weight.rows; ++v) {
      double z = logits.bias == nullptr ? 0 : logits.bias[v];
      for (int64_t k = 0; k < logits.hidden.columns; ++k) z += entry(logits.hidden, i, k) * entry(logits.weight, v, k);
      const double d = (z - shift.anchor[i]) / (shift.temperature == nullptr ? 1 : shift.temperature[i]);
      const double power = v == shift.target[i] ? 0 : std::exp(d);
      expect(static_cast<float>(entry(out, i, v)), power, 1.0 / 128);
      sum += power;
    }
    expect(rest[i], sum, 1e-3);  // d, up to some hundreds, has fewer digits behind the point
  }
}

void check_gradients(const Bfloat16Matrix& gradient, const Bfloat16Matrix& weight, const Bfloat16Matrix& hidden,
                     const float* factor, const float* of_hidden, const float* of_weight) {
  for (int64_t k = 0; k < weight.columns; ++k) {
    for (int64_t i = 0; i < gradient.rows; ++i) {
      double sum = 0;
      for (int64_t v = 0; v < weight.rows; ++v) sum += entry(gradient, i, v) * entry(weight, v, k);
      expect(of_hidden[i * weight.columns + k], sum, 1e-5);
    }
    for (int64_t v = 0; v < weight.rows; ++v) {
      double sum = 0;
      for (int64_t i = 0; i < gradient.rows; ++i) sum += entry(gradient, i, v) * factor[i] * entry(hidden, i, k);
      expect(of_weight[v * weight.columns + k], sum, 1.0 / 128);  // factor * hidden is rounded
    }
  }
}

void products(int64_t rows, int64_t width, int64_t vocabulary, int64_t gap) {
  const Product& product = EXGRPO_VARIANT::product;
  const Parallel parallel = {3, run};
  const Words hidden(rows, width, gap), weight(vocabulary, width, gap), out(rows, vocabulary, gap);
  const Array<float> bias = numbers(vocabulary), row = numbers(rows), rest = numbers(rows), moment = numbers(rows);
  const Array<float> of_hidden = numbers(rows * width), of_weight = numbers(vocabulary * width);
  const Array<int64_t> target(new int64_t[rows]);
  const Array<uint16_t*> places(new uint16_t*[rows]);
  for (int64_t i = 0; i < rows; ++i) {
    target[i] = i % 3 == 2 ? -1 : vocabulary - 1;
    places[i] = out.data.get() + i * out.matrix.stride;
  }
  const Logits logits = {hidden.matrix, weight.matrix, gap == 0 ? nullptr : bias.get()};
  const Array<float> anchor = numbers(rows), factor = numbers(rows);
  const Shift shift = {target.get(), anchor.get(), gap == 0 ? nullptr : row.get()};
  product.target_logits(logits, target.get(), rest.get(), parallel);
  product.largest(logits, anchor.get(), parallel);
  product.sums(logits, shift, nullptr, rest.get(), moment.get(), parallel);
  product.sums(logits, shift, places.get(), rest.get(), moment.get(), parallel);
  check_sums(logits, shift, out.matrix, rest.get());
  product.hidden_gradient(out.matrix, weight.matrix, of_hidden.get(), parallel);
  product.weight_gradient(out.matrix, hidden.matrix, factor.get(), of_weight.get(), true, parallel);
  check_gradients(out.matrix, weight.matrix, hidden.matrix, factor.get(), of_hidden.get(), of_weight.get());
  product.weight_gradient(out.matrix, hidden.matrix, factor.get(), of_weight.get(), false, parallel);
  product.entropy_gradient(out.data.get(), rows, vocabulary, out.matrix.stride,
                           {target.get(), row.get(), row.get(), row.get(), row.get()}, parallel);
}

}  // namespace

int main() {
  for (const int64_t gap : {0, 3}) {
    for (const int64_t rows : {1, 2, 11, 12, 13, 100}) {
      for (const int64_t width : {1, 2, 31, 32, 33, 100}) {
        for (const int64_t vocabulary : {1, 15, 32, 33, 97, 601}) products(rows, width, vocabulary, gap);
      }
    }
  }
  std::puts("done");
}
