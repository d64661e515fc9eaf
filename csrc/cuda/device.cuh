// Thin wrappers of hardware features that every kernel uses: threads, shared memory, clusters.
#ifndef EXGRPO_CUDA_DEVICE_CUH
#define EXGRPO_CUDA_DEVICE_CUH

#include <cuda_runtime.h>

#include <cstdint>

namespace exgrpo {

constexpr int WARP = 32;

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(~0u, value, lanes); }

__device__ __forceinline__ bool any_lane(bool condition) { return __any_sync(~0u, condition); }

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Two numbers rounded to bfloat16, the first one in the lower half.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace exgrpo

#endif
