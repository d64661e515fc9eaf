// Conversion of tensors to kernel arguments.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace exgrpo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class T>
constexpr ScalarType scalar_type = sizeof(T) == 4 ? ScalarType::Float : ScalarType::Double;
template <>
inline constexpr ScalarType scalar_type<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType scalar_type<bool> = ScalarType::Bool;

inline void check(bool fine, const char* name, const char* expected) {
  if (!fine) {
    throw std::runtime_error(std::string(name) + ": expected " + expected);
  }
}

// The values of a contiguous tensor with `count` elements; nullptr without a tensor.
template <class T>
T* values(const OptionalTensor& tensor, int64_t count, const char* name) {
  if (!tensor) {
    return nullptr;
  }
  const bool fits = tensor->is_cpu() && tensor->scalar_type() == scalar_type<T>;
  check(fits, name, "the dtype of the other tensors, on the CPU");
  check(tensor->is_contiguous() && tensor->numel() == count, name, "a contiguous tensor of the length of the others");
  return static_cast<T*>(tensor->data_ptr());
}

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes,
                         std::optional<ScalarType> type = std::nullopt) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}

// Calls function(T{}) with the floating type T of a tensor.
template <class F>
auto for_type_of(const Tensor& tensor, const char* name, F&& function) {
  check(tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double, name,
        "float32 or float64");
  return tensor.scalar_type() == ScalarType::Float ? function(float{}) : function(double{});
}

// Calls function(E{}, T{}) with the entries of a bfloat16, float32 or float64 tensor and the type of its sums.
template <class F>
auto for_entries_of(const Tensor& tensor, const char* name, F&& function) {
  const ScalarType type = tensor.scalar_type();
  check(type == ScalarType::BFloat16 || type == ScalarType::Float || type == ScalarType::Double, name,
        "bfloat16, float32 or float64");
  if (type == ScalarType::BFloat16) return function(uint16_t{}, float{});
  return type == ScalarType::Float ? function(float{}, float{}) : function(double{}, double{});
}

template <class E>
struct Matrix {
  E* first;
  int64_t rows, columns, stride;

  Matrix(const Tensor& tensor, const char* name, ScalarType type) {
    check(tensor.is_cpu() && tensor.dim() == 2 && tensor.scalar_type() == type, name,
          "a matrix on the CPU with the dtype of the others");
    check(tensor.size(1) < 2 || tensor.stride(1) == 1, name, "unit stride along its rows");
    first = static_cast<E*>(tensor.data_ptr());
    rows = tensor.size(0);
    columns = tensor.size(1);
    stride = tensor.stride(0);
  }

  E* row(int64_t i) const { return first + i * stride; }
};

}  // namespace exgrpo
