// Moves many short runs of bytes between device memory and mapped host memory.
//
// The copy engine needs long runs; below about 28 KiB its cost per run is what one
// sees. A few blocks of threads move short runs faster, and leave nearly all of
// the device to the engine.
//
// kernel.ptx holds what the compiler makes of this file. To make it anew:
//   nvcc -ptx -arch=compute_75 kernel.cu
// and lower the header to ".version 6.4" and ".target sm_70": nothing newer is used,
// and then drivers since CUDA 10.1 take it, for every device since Volta.

#include <cstdint>

struct kvd_run {
  uint64_t src;
  uint64_t dst;
  uint64_t nbytes;
};

// Each block takes every gridDim.x-th run. 16 bytes per thread and access where both sides
// have the same alignment, four accesses in flight; single bytes at the edges and elsewhere.
extern "C" __global__ void kvd_move(const kvd_run* runs, uint32_t count) {
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const char* src = reinterpret_cast<const char*>(runs[i].src);
    char* dst = reinterpret_cast<char*>(runs[i].dst);
    const uint64_t nbytes = runs[i].nbytes;
    uint64_t head = (16 - (reinterpret_cast<uint64_t>(dst) & 15)) & 15;
    if (head > nbytes) head = nbytes;
    uint64_t done = 0;
    if (((reinterpret_cast<uint64_t>(src) ^ reinterpret_cast<uint64_t>(dst)) & 15) == 0) {
      for (uint64_t at = threadIdx.x; at < head; at += blockDim.x) dst[at] = src[at];
      const uint4* from = reinterpret_cast<const uint4*>(src + head);
      uint4* to = reinterpret_cast<uint4*>(dst + head);
      const uint64_t words = (nbytes - head) / 16;
      uint64_t at = threadIdx.x;
      for (; at + 3 * blockDim.x < words; at += 4 * blockDim.x) {
        const uint4 a = from[at];
        const uint4 b = from[at + blockDim.x];
        const uint4 c = from[at + 2 * blockDim.x];
        const uint4 d = from[at + 3 * blockDim.x];
        to[at] = a;
        to[at + blockDim.x] = b;
        to[at + 2 * blockDim.x] = c;
        to[at + 3 * blockDim.x] = d;
      }
      for (; at < words; at += blockDim.x) to[at] = from[at];
      done = head + words * 16;
    }
    for (uint64_t at = done + threadIdx.x; at < nbytes; at += blockDim.x) dst[at] = src[at];
  }
}
