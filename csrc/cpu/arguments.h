// Tensors as the kernels take them.
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

// The values of a contiguous tensor with this many of them; nullptr where there is no tensor.
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

}  // namespace exgrpo
