// Error messages of launchers: the failed call and its reason, valid until the thread's next failure.
#ifndef EXGRPO_CUDA_LAUNCH_CUH
#define EXGRPO_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <cstdio>

namespace exgrpo {

inline const char* failure(const char* call, const char* reason) {
  thread_local char text[256];
  std::snprintf(text, sizeof text, "%s: %s", call, reason);
  return text;
}

// Null if there is no error.
inline const char* failure(const char* call, cudaError_t error) {
  return error == cudaSuccess ? nullptr : failure(call, cudaGetErrorString(error));
}

}  // namespace exgrpo

#endif
