// The product kernel's source on an emulated machine.
#include "cuda_hopper_emulation.h"

#include "product_kernel.cuh"

using namespace exgrpo;

namespace {

TensorMap describe_matrix(const void* matrix, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  auto* bytes = static_cast<unsigned char*>(const_cast<void*>(matrix));
  return {bytes, rows, columns, stride, box_rows, TILE_DEPTH};
}

}  // namespace

extern "C" const char* emulated_product(const ProductArguments* given, int clusters, bool backwards, bool eager) {
  const auto hidden = describe_matrix(given->hidden, given->rows, given->width, given->hidden_stride, TILE_ROWS);
  const auto weight =
      describe_matrix(given->weight, given->vocabulary, given->width, given->weight_stride, WEIGHT_ROWS);
  const auto out = describe_matrix(given->out, given->rows, given->vocabulary, given->out_stride, PIECE);
  const int bands = static_cast<int>((given->rows + BAND_ROWS - 1) / BAND_ROWS);
  const int columns = static_cast<int>((given->vocabulary + TILE_COLUMNS - 1) / TILE_COLUMNS);
  const Tiles tiles{bands, columns, bands * columns};
  return emulation::reported(emulation::launch(
      CLUSTER * clusters, PRODUCT_THREADS, CLUSTER, PRODUCT_SHARED, {backwards, eager},
      [&] {
        const auto kernel = !given->out         ? product_kernel<SUMS>
                            : !given->at_target ? product_kernel<EXPONENTIALS>
                                                : product_kernel<GRADIENT>;
        kernel(hidden, weight, out, *given, tiles);
      }));
}
