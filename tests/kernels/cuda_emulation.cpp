// The row kernel's source on an emulated machine; clusters and blocks of any size: small rows have ragged parts, too.
#include "cuda_emulation.h"

#include "rows_kernel.cuh"

using namespace exgrpo;

extern "C" RowsPlan exgrpo_rows_plan(int64_t vocabulary) { return plan_rows(vocabulary); }

extern "C" const char* emulated_rows(
    const RowsArguments* given, int cluster, int threads, int columns, bool backwards) {
  const auto kernel = [&]() -> void (*)(RowsArguments, int) {
    if (given->output == NOTHING) return rows_kernel<NOTHING, float>;
    if (given->output == EXPONENTIALS) {
      return given->out_is_bfloat16 ? rows_kernel<EXPONENTIALS, uint16_t> : rows_kernel<EXPONENTIALS, float>;
    }
    return given->out_is_bfloat16 ? rows_kernel<GRADIENT, uint16_t> : rows_kernel<GRADIENT, float>;
  }();
  const size_t shared = columns * 4 + SLOTS * SLOT_WIDTH * 4;
  const auto blocks = static_cast<unsigned>(given->rows * cluster);
  return emulation::reported(
      emulation::launch(blocks, threads, cluster, shared, {backwards, false}, [=] { kernel(*given, columns); }));
}
