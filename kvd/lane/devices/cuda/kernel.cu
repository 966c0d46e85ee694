// Moves many short runs of bytes between device memory and mapped host memory.
//
// The copy engine needs long runs; below some length its cost per run is what one sees.
// Which length that is depends on device, driver and number of runs: calibration.py
// measures it, and the kernel is used only where it is faster.
//
// A kernel shares the device by time. Without MPS, contexts of different processes take turns:
// while this one runs, the engine's kernels stand still, however few multiprocessors it
// occupies; the copy engines disturb nobody. So it is made to end soon. With MPS both
// run side by side, and the few blocks of this one leave most multiprocessors to the engine.
//
// What limits it is the way across the bus, a microsecond or two for each access. So there
// are many accesses on their way at any time: each warp has a run of its own, and eight
// accesses of 16 bytes per thread of it, 4 KiB. 128 warps have 512 KiB on their way.
//
// kernel.ptx holds what the compiler makes of this file. To make it anew:
//   nvcc -ptx -arch=compute_75 kernel.cu
// then lower the header to ".version 6.4" and ".target sm_70": nothing newer is used,
// and drivers since CUDA 10.1 take it, for every device since Volta.

#include <cstdint>

constexpr uint32_t WARP = 32;
constexpr uint32_t AT_ONCE = 8;  // accesses of one thread
constexpr uint32_t ALL = 0xffffffff;

// One warp moves one run: 16 bytes per access where both sides have the same alignment,
// single bytes at the edges and elsewhere.
__device__ void move(const char* src, char* dst, uint64_t nbytes, uint32_t lane) {
  uint64_t done = 0;
  if (((reinterpret_cast<uint64_t>(src) ^ reinterpret_cast<uint64_t>(dst)) & 15) == 0) {
    uint64_t head = -reinterpret_cast<uint64_t>(dst) & 15;
    if (head > nbytes) head = nbytes;
    if (lane < head) dst[lane] = src[lane];
    const uint4* from = reinterpret_cast<const uint4*>(src + head);
    uint4* to = reinterpret_cast<uint4*>(dst + head);
    const uint64_t words = (nbytes - head) / 16;
    uint64_t at = lane;
    uint4 held[AT_ONCE];
#pragma unroll 1
    for (; at + (AT_ONCE - 1) * WARP < words; at += AT_ONCE * WARP) {
#pragma unroll
      for (uint32_t i = 0; i < AT_ONCE; i++) held[i] = __ldcs(from + at + i * WARP);
#pragma unroll
      for (uint32_t i = 0; i < AT_ONCE; i++) __stcs(to + at + i * WARP, held[i]);
    }
    // The rest is less than that of every thread, or is done.
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++)
      if (at + i * WARP < words) held[i] = __ldcs(from + at + i * WARP);
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i++)
      if (at + i * WARP < words) __stcs(to + at + i * WARP, held[i]);
    done = head + words * 16;
  }
#pragma unroll 1
  for (uint64_t at = done + lane; at < nbytes; at += WARP) dst[at] = src[at];
}

struct Run {
  uint64_t src;
  uint64_t dst;
  uint64_t nbytes;
};

// This thread's run of those that its warp fetches.
__device__ Run fetch(const uint64_t* list, uint32_t count, uint64_t at, uint64_t end) {
  if (at >= end) return Run{0, 0, 0};
  return Run{list[at], list[count + at], list[2 * static_cast<uint64_t>(count) + at]};
}

// The list lies in mapped host memory: all sources, then all targets, then all lengths in bytes,
// `count` of each. Every warp moves neighbouring runs of it, and fetches 32 of them in one
// access per column, the next 32 while it moves these.
extern "C" __global__ void kvd_move(const uint64_t* list, uint32_t count) {
  const uint32_t lane = threadIdx.x % WARP;
  const uint32_t warps = gridDim.x * (blockDim.x / WARP);
  // Blocks take turns, so that few runs are spread over all blocks.
  const uint32_t warp = threadIdx.x / WARP * gridDim.x + blockIdx.x;
  const uint32_t share = (count + warps - 1) / warps;
  const uint64_t begin = static_cast<uint64_t>(warp) * share;
  const uint64_t end = begin + share < count ? begin + share : count;
  if (begin >= end) return;  // the whole warp
  Run next = fetch(list, count, begin + lane, end);
  for (uint64_t base = begin; base < end; base += WARP) {
    const Run now = next;
    next = fetch(list, count, base + WARP + lane, end);
    for (uint32_t i = 0; i < WARP && base + i < end; i++) {
      const uint64_t src = __shfl_sync(ALL, now.src, i);
      const uint64_t dst = __shfl_sync(ALL, now.dst, i);
      const uint64_t nbytes = __shfl_sync(ALL, now.nbytes, i);
      move(reinterpret_cast<const char*>(src), reinterpret_cast<char*>(dst), nbytes, lane);
    }
  }
}
