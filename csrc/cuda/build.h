// What the library was built with, and what it finds. Plain C++.
#ifndef EXGRPO_CUDA_BUILD_H
#define EXGRPO_CUDA_BUILD_H

#include <cstdint>

namespace exgrpo {

// Field by field exgrpo.kernels.cuda_chunks.binding.Build. Versions of CUDA are 1000 major + 10 minor.
struct Build {
  int32_t runtime;  // that is linked in
  int32_t driver;   // the newest that the driver supports; 0: no driver
};

}  // namespace exgrpo

#endif
