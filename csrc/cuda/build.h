// Versions that the library was built with and finds. Plain C++.
#ifndef EXGRPO_CUDA_BUILD_H
#define EXGRPO_CUDA_BUILD_H

#include <cstdint>

namespace exgrpo {

// Must match exgrpo.kernels.extension.CudaBuild field by field. CUDA versions are 1000 major + 10 minor.
struct Build {
  int32_t runtime;  // linked CUDA runtime
  int32_t driver;   // newest CUDA version that the driver supports; 0: no driver
};

}  // namespace exgrpo

#endif
