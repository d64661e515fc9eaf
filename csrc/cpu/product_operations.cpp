// The operators over products of bfloat16 matrices; symbols as in product.h.
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "arguments.h"
#include "product.h"

namespace exgrpo {
namespace {

struct Variant {
  const char* name;
  const Product* product;  // null: not in this build
  bool (*supported)();     // by the processor and the system
};

bool has_avx512bf16() {
#ifdef HAVE_AVX512BF16
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_amx() {
#if defined(HAVE_AMX) && defined(__linux__)
  // A process must request the matrix registers from Linux; its threads inherit the permission.
  constexpr long request_permission = 0x1023, matrix_data = 18;
  static const bool granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                              syscall(SYS_arch_prctl, request_permission, matrix_data) == 0;
  return granted && has_avx512bf16();
#else
  return false;
#endif
}

// The fastest first.
constexpr Variant variants[] = {
#ifdef HAVE_AMX
    {"amx", &amx::product, has_amx},
#else
    {"amx", nullptr, has_amx},
#endif
#ifdef HAVE_AVX512BF16
    {"avx512bf16", &avx512bf16::product, has_avx512bf16},
#else
    {"avx512bf16", nullptr, has_avx512bf16},
#endif
};

std::string missing(const Variant& variant) {
  if (variant.product == nullptr) return "the extension was built without " + std::string(variant.name);
  return variant.supported() ? "" : "this processor or its system has no " + std::string(variant.name);
}

struct Choice {
  const Product* product;  // null: none is available
  std::string reason;      // why
};

// Throws if the environment requests an unavailable one.
Choice choose() {
  const char* asked = std::getenv("EXGRPO_CPU_PRODUCT");
  if (asked == nullptr || *asked == '\0') {
    for (const Variant& variant : variants) {
      if (missing(variant).empty()) return {variant.product, ""};
    }
    return {nullptr, missing(variants[1])};
  }
  const std::string name = asked, setting = "EXGRPO_CPU_PRODUCT=" + name;
  if (name == "none") return {nullptr, setting + " forbids it"};
  for (const Variant& variant : variants) {
    if (name != variant.name) continue;
    const std::string reason = missing(variant);
    if (!reason.empty()) throw std::runtime_error(setting + ": " + reason + "; unset it, or take another");
    return {variant.product, ""};
  }
  throw std::runtime_error(setting + ": expected amx, avx512bf16 or none");
}

// Why no product is available; empty if one is.
std::string unavailable() { return choose().reason; }

const Product& product() {
  const Choice choice = choose();
  if (choice.product == nullptr) throw std::runtime_error("no product of bfloat16 matrices: " + choice.reason);
  return *choice.product;
}

Parallel parallel() {
  const auto run = [](int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) { body(begin, end, context); });
  };
  return {torch::stable::get_num_threads(), run};
}

Bfloat16Matrix matrix_of(const Tensor& tensor, const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 2 && tensor.scalar_type() == ScalarType::BFloat16, name,
        "a bfloat16 matrix on the CPU");
  check(tensor.size(1) < 2 || tensor.stride(1) == 1, name, "unit stride along its rows");
  return {static_cast<const uint16_t*>(tensor.data_ptr()), tensor.size(0), tensor.size(1), tensor.stride(0)};
}

Logits logits_of(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias) {
  const Logits logits = {matrix_of(hidden, "hidden"), matrix_of(weight, "weight"),
                         values<float>(bias, weight.size(0), "bias")};
  check(logits.hidden.columns == logits.weight.columns, "weight", "rows as long as those of hidden");
  return logits;
}

const int64_t* targets_of(const Tensor& target, int64_t rows, int64_t vocabulary) {
  const int64_t* index = values<int64_t>(target, rows, "target");
  const bool within = std::all_of(index, index + rows, [=](int64_t y) { return y >= -1 && y < vocabulary; });
  check(within, "target", "rows of the weight, or -1");
  return index;
}

// Destination of each row's exponentials: the row of the same number, or the one given by `places`.
std::vector<uint16_t*> rows_of(const OptionalTensor& out, const OptionalTensor& places, const Logits& logits) {
  if (!out) return {};
  const Bfloat16Matrix matrix = matrix_of(*out, "out");
  const int64_t rows = logits.hidden.rows, *place = values<int64_t>(places, rows, "rows");
  check(matrix.columns == logits.weight.rows, "out", "a column for each row of the weight");
  std::vector<uint16_t*> pointers(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = place == nullptr ? i : place[i];
    check(row >= 0 && row < matrix.rows, "rows", "rows of out, as many as hidden has where none are named");
    pointers[i] = const_cast<uint16_t*>(matrix.data) + row * matrix.stride;
  }
  return pointers;
}

std::tuple<Tensor, Tensor> product_sums(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor target, Tensor anchor,
                                        OptionalTensor temperature, OptionalTensor out, OptionalTensor rows) {
  const Logits logits = logits_of(hidden, weight, bias);
  const int64_t count = logits.hidden.rows;
  const Shift shift = {targets_of(target, count, logits.weight.rows), values<float>(anchor, count, "anchor"),
                       values<float>(temperature, count, "temperature")};
  const std::vector<uint16_t*> pointers = rows_of(out, rows, logits);
  Tensor rest = new_tensor(anchor, {count}), moment = new_tensor(anchor, {count});
  product().sums(logits, shift, out ? pointers.data() : nullptr, values<float>(rest, count, "rest"),
                 values<float>(moment, count, "moment"), parallel());
  return {rest, moment};
}

Tensor product_largest(Tensor hidden, Tensor weight, OptionalTensor bias) {
  const Logits logits = logits_of(hidden, weight, bias);
  Tensor result = new_tensor(hidden, {logits.hidden.rows}, ScalarType::Float);
  product().largest(logits, values<float>(result, logits.hidden.rows, "result"), parallel());
  return result;
}

Tensor product_target_logits(Tensor hidden, Tensor weight, OptionalTensor bias, Tensor target) {
  const Logits logits = logits_of(hidden, weight, bias);
  const int64_t rows = logits.hidden.rows, *index = targets_of(target, rows, logits.weight.rows);
  Tensor result = new_tensor(hidden, {rows}, ScalarType::Float);
  product().target_logits(logits, index, values<float>(result, rows, "result"), parallel());
  return result;
}

void product_entropy_gradient(Tensor exponential, Tensor target, Tensor mean, Tensor log_prob, Tensor entropy,
                              Tensor at_target) {
  const Bfloat16Matrix matrix = matrix_of(exponential, "exponential");
  const int64_t rows = matrix.rows;
  const EntropyFactors factors = {targets_of(target, rows, matrix.columns), values<float>(mean, rows, "mean"),
                                  values<float>(log_prob, rows, "log_prob"), values<float>(entropy, rows, "entropy"),
                                  values<float>(at_target, rows, "at_target")};
  product().entropy_gradient(const_cast<uint16_t*>(matrix.data), rows, matrix.columns, matrix.stride, factors,
                             parallel());
}

Tensor product_hidden_gradient(Tensor gradient, Tensor weight) {
  const Bfloat16Matrix left = matrix_of(gradient, "gradient"), right = matrix_of(weight, "weight");
  check(left.columns == right.rows, "weight", "a row for each column of gradient");
  Tensor result = new_tensor(gradient, {left.rows, right.columns}, ScalarType::Float);
  product().hidden_gradient(left, right, static_cast<float*>(result.data_ptr()), parallel());
  return result;
}

void product_weight_gradient(Tensor gradient, Tensor hidden, Tensor factor, Tensor total, bool fresh) {
  const Bfloat16Matrix left = matrix_of(gradient, "gradient"), right = matrix_of(hidden, "hidden");
  check(left.rows == right.rows, "hidden", "as many rows as gradient has");
  check(total.dim() == 2 && total.size(0) == left.columns && total.size(1) == right.columns, "total",
        "a row for each column of gradient, and the columns of hidden");
  const float* const factors = values<float>(factor, left.rows, "factor");
  if (total.scalar_type() == ScalarType::BFloat16) {
    check(fresh && total.is_contiguous(), "total", "float32 where something is added to it, and contiguous rows");
    auto* const rounded = static_cast<uint16_t*>(total.data_ptr());
    product().rounded_weight_gradient(left, right, factors, rounded, fresh, parallel());
  } else {
    product().weight_gradient(left, right, factors, values<float>(total, total.numel(), "total"), fresh, parallel());
  }
}

}  // namespace
}  // namespace exgrpo

STABLE_TORCH_LIBRARY_FRAGMENT(exgrpo_C, library) {
  library.def("product_unavailable() -> str");
  library.def(
      "product_sums(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor anchor, Tensor? temperature, "
      "Tensor(a!)? out, Tensor? rows) -> (Tensor, Tensor)");
  library.def("product_largest(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor");
  library.def("product_target_logits(Tensor hidden, Tensor weight, Tensor? bias, Tensor target) -> Tensor");
  library.def(
      "product_entropy_gradient(Tensor(a!) exponential, Tensor target, Tensor mean, Tensor log_prob, Tensor entropy, "
      "Tensor at_target) -> ()");
  library.def("product_hidden_gradient(Tensor gradient, Tensor weight) -> Tensor");
  library.def(
      "product_weight_gradient(Tensor gradient, Tensor hidden, Tensor factor, Tensor(a!) total, bool fresh) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CompositeExplicitAutograd, library) {
  library.impl("product_unavailable", TORCH_BOX(&exgrpo::unavailable));
}

STABLE_TORCH_LIBRARY_IMPL(exgrpo_C, CPU, library) {
  library.impl("product_sums", TORCH_BOX(&exgrpo::product_sums));
  library.impl("product_largest", TORCH_BOX(&exgrpo::product_largest));
  library.impl("product_target_logits", TORCH_BOX(&exgrpo::product_target_logits));
  library.impl("product_entropy_gradient", TORCH_BOX(&exgrpo::product_entropy_gradient));
  library.impl("product_hidden_gradient", TORCH_BOX(&exgrpo::product_hidden_gradient));
  library.impl("product_weight_gradient", TORCH_BOX(&exgrpo::product_weight_gradient));
}
