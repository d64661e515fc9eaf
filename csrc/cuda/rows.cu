// Launches the row kernel. Every function returns null, or a text that names the call that failed.
#include "build.h"
#include "launch.cuh"
#include "rows_kernel.cuh"

namespace exgrpo {
namespace {

using Kernel = void (*)(RowsArguments, int);

Kernel kernel_of(const RowsArguments& given) {
  switch (given.output) {
    case NOTHING: return rows_kernel<NOTHING, float>;
    case EXPONENTIALS:
      return given.out_is_bfloat16 ? rows_kernel<EXPONENTIALS, uint16_t> : rows_kernel<EXPONENTIALS, float>;
    case GRADIENT: return given.out_is_bfloat16 ? rows_kernel<GRADIENT, uint16_t> : rows_kernel<GRADIENT, float>;
    default: return nullptr;
  }
}

const char* prepare(Kernel kernel, const RowsPlan& plan) {
  const auto function = reinterpret_cast<const void*>(kernel);
  const auto set = [function](const char* call, cudaFuncAttribute attribute, int value) {
    return failure(call, cudaFuncSetAttribute(function, attribute, value));
  };
  const char* failed = set(
      "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)", cudaFuncAttributeMaxDynamicSharedMemorySize,
      plan.shared_bytes);
  if (failed == nullptr && plan.cluster > LARGEST_PORTABLE) {
    failed = set(
        "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)", cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return failed;
}

}  // namespace
}  // namespace exgrpo

#define EXGRPO_TEXT(...) #__VA_ARGS__
#define EXGRPO_TEXT_OF(...) EXGRPO_TEXT(__VA_ARGS__)

// May be called where there is no driver, or an old one.
extern "C" exgrpo::Build exgrpo_build() {
  exgrpo::Build build{CUDART_VERSION, 0, EXGRPO_TEXT_OF(__CUDA_ARCH_LIST__)};
  if (cudaDriverGetVersion(&build.driver) != cudaSuccess) build.driver = 0;
  return build;
}

extern "C" exgrpo::RowsPlan exgrpo_rows_plan(int64_t vocabulary) { return exgrpo::plan_rows(vocabulary); }

extern "C" const char* exgrpo_rows(const exgrpo::RowsArguments* given, cudaStream_t stream) {
  using namespace exgrpo;
  if (given->rows == 0 || given->vocabulary == 0) return nullptr;
  const RowsPlan plan = plan_rows(given->vocabulary);
  if (plan.cluster == 0) return failure("exgrpo_rows", "no cluster can hold a row of so large a vocabulary");
  if (given->rows > INT32_MAX / plan.cluster) return failure("exgrpo_rows", "more rows than a grid has blocks");
  const Kernel kernel = kernel_of(*given);
  if (kernel == nullptr) return failure("exgrpo_rows", "unknown output");
  if (const char* failed = prepare(kernel, plan)) return failed;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(given->rows * plan.cluster));
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return failure("cudaLaunchKernelEx(rows)", cudaLaunchKernelEx(&config, kernel, *given, plan.columns));
}
