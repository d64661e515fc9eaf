// What every kernel asks of the machine, one thin function each: threads, shared memory, clusters, asynchronous copies.
#ifndef EXGRPO_CUDA_DEVICE_CUH
#define EXGRPO_CUDA_DEVICE_CUH

#include <cuda_runtime.h>

#include <cstdint>

namespace exgrpo {

constexpr int WARP = 32;

// A 4- or 16-byte group of values, moved as one.
template <typename Value, int COUNT>
struct alignas(sizeof(Value) * COUNT) Group {
  Value values[COUNT];
};

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(~0u, value, lanes); }

__device__ __forceinline__ bool any_lane(bool condition) { return __any_sync(~0u, condition); }

__device__ __forceinline__ void block_sync() { __syncthreads(); }

// Copies of BYTES (4 or 16) into shared memory, in flight until copies_wait; seen by other threads after a barrier.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
  }
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ unsigned cluster_size() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The same place in the shared memory of another block of the cluster.
template <typename Value>
__device__ __forceinline__ Value* of_rank(Value* shared, unsigned rank) {
  Value* remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
  return remote;
}

// Two numbers rounded to bfloat16, the first one in the lower half.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace exgrpo

#endif
