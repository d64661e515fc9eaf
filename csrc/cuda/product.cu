// Launches the product. Every function returns null, or a message that names the failed call.
#include <cudaTypedefs.h>

#include "build.h"
#include "launch.cuh"
#include "product_kernel.cuh"

namespace exgrpo {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

// Looks the driver's function up at run time: without linking it, machines without a driver can load this library.
const char* find(Encode& encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const char* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const auto error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else  // older toolkits have only this one, which returns the version of the function at compile time
  const auto error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return failure("cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)", error);
  if (found == nullptr) return failure(name, "the driver does not have it; it is older than CUDA 12.0");
  encode = reinterpret_cast<Encode>(found);
  return nullptr;
}

// A bfloat16 matrix, copied in boxes of 128 bytes by `box_rows` rows.
const char* describe_matrix(
    Encode encode, TensorMap& map, const char* name, const void* matrix, int64_t rows, int64_t columns, int64_t stride,
    cuuint32_t box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[] = {TILE_DEPTH, box_rows};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : failure("cuTensorMapEncodeTiled", name);
}

const char* describe_all(const ProductArguments& given, TensorMap& hidden, TensorMap& weight, TensorMap& out) {
  Encode encode = nullptr;
  const char* failed = find(encode);
  if (failed == nullptr) {
    failed = describe_matrix(
        encode, hidden, "of hidden", given.hidden, given.rows, given.width, given.hidden_stride, TILE_ROWS);
  }
  if (failed == nullptr) {
    failed = describe_matrix(
        encode, weight, "of weight", given.weight, given.vocabulary, given.width, given.weight_stride, WEIGHT_ROWS);
  }
  if (failed == nullptr && given.out != nullptr) {
    failed = describe_matrix(
        encode, out, "of out", given.out, given.rows, given.vocabulary, given.out_stride, PIECE);
  }
  return failed;
}

// Launches as many clusters as fit on the device; each loops over its shares of the result.
const char* launch(
    const ProductArguments& given, const TensorMap& hidden, const TensorMap& weight, const TensorMap& out,
    const Tiles& tiles, cudaStream_t stream) {
  const auto kernel = given.out == nullptr         ? product_kernel<SUMS>
                      : given.at_target == nullptr ? product_kernel<EXPONENTIALS>
                                                   : product_kernel<GRADIENT>;
  const auto function = reinterpret_cast<const void*>(kernel);
  auto error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, PRODUCT_SHARED);
  if (error != cudaSuccess) return failure("cudaFuncSetAttribute(MaxDynamicSharedMemorySize)", error);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {CLUSTER, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(CLUSTER);
  config.blockDim = dim3(PRODUCT_THREADS);
  config.dynamicSmemBytes = PRODUCT_SHARED;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, function, &config);
  if (error != cudaSuccess) return failure("cudaOccupancyMaxActiveClusters(product_kernel)", error);
  if (clusters == 0) return failure("exgrpo_product", "the device has no room for a cluster");
  config.gridDim = dim3(CLUSTER * (tiles.count < clusters ? tiles.count : clusters));
  error = cudaLaunchKernelEx(&config, kernel, hidden, weight, out, given, tiles);
  return failure("cudaLaunchKernelEx(product_kernel)", error);
}

}  // namespace
}  // namespace exgrpo

// May be called without a driver, or with an old one.
extern "C" exgrpo::Build exgrpo_build() {
  exgrpo::Build build{CUDART_VERSION, 0};
  if (cudaDriverGetVersion(&build.driver) != cudaSuccess) build.driver = 0;
  return build;
}

extern "C" const char* exgrpo_product(const exgrpo::ProductArguments* given, cudaStream_t stream) {
  using namespace exgrpo;
  if (given->rows == 0 || given->vocabulary == 0 || given->width == 0) return nullptr;
  const int64_t bands = (given->rows + BAND_ROWS - 1) / BAND_ROWS;
  const int64_t columns = (given->vocabulary + TILE_COLUMNS - 1) / TILE_COLUMNS;
  if (bands > INT32_MAX / 2 / columns) return failure("exgrpo_product", "too many tiles; use smaller chunks");
  const Tiles tiles{static_cast<int>(bands), static_cast<int>(columns), static_cast<int>(bands * columns)};
  TensorMap hidden{}, weight{}, out{};
  if (const char* failed = describe_all(*given, hidden, weight, out)) return failed;
  return launch(*given, hidden, weight, out, tiles, stream);
}
