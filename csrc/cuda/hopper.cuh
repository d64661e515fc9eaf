// Thin wrappers of Hopper's features: barriers in shared memory, tensor copies, warpgroup matrix products.
#ifndef EXGRPO_CUDA_HOPPER_CUH
#define EXGRPO_CUDA_HOPPER_CUH

#include <cuda.h>

#include "device.cuh"

namespace exgrpo {

using TensorMap = CUtensorMap;
using SharedBarrier = uint64_t;

__device__ __forceinline__ void barrier_init(SharedBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Call before the cluster's barrier, to make initialised barriers visible to other blocks and to copies.
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(SharedBarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier of another block of the cluster, or of this one.
__device__ __forceinline__ void barrier_arrive(SharedBarrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(SharedBarrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "waiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra waiting;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Hardware barriers by number, among some of the block's warps; 0 is the whole block's.
__device__ __forceinline__ void numbered_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void numbered_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at (x, y) to shared memory, zeros beyond the tensor; its bytes are counted by the barrier.
__device__ __forceinline__ void load_box(
    const TensorMap& map, unsigned char* shared, SharedBarrier* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// The same to this place in all blocks of the cluster whose bits are set, counted by the barrier of each.
__device__ __forceinline__ void load_box_for(
    uint16_t blocks, const TensorMap& map, unsigned char* shared, SharedBarrier* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

// Copies a box from shared memory to (x, y), except the part beyond the tensor.
__device__ __forceinline__ void store_box(const TensorMap& map, const unsigned char* shared, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(shared_address(shared))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Commits an empty group of stores, which counts as a group.
__device__ __forceinline__ void store_nothing() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory read by this thread's stores, except the last PENDING ones, may be overwritten.
template <int PENDING>
__device__ __forceinline__ void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Makes this thread's writes to shared memory visible to copies after a barrier.
__device__ __forceinline__ void visible_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
__device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// x [64, 192] (+)= a [64, 16] @ b [192, 16]^T of bfloat16; thread t of the warpgroup has row 16 (t / 32) + t % 32 / 4
// in x[0], x[1], x[4], x[5], ... and the eighth row after it in the others, columns 8 j + 2 (t % 4) and the next in
// x[4 j + ...].
#define EXGRPO_4(i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define EXGRPO_16(i) EXGRPO_4(i), EXGRPO_4(i + 4), EXGRPO_4(i + 8), EXGRPO_4(i + 12)
__device__ __forceinline__ void multiply(float (&x)[96], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "%96, %97, add, 1, 1, 0, 0;\n"
      "}\n"
      : EXGRPO_16(0), EXGRPO_16(16), EXGRPO_16(32), EXGRPO_16(48), EXGRPO_16(64), EXGRPO_16(80)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef EXGRPO_16
#undef EXGRPO_4

// exp2 with subnormal results flushed to 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger number; NaN if one of them is NaN.
__device__ __forceinline__ float larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace exgrpo

#endif
