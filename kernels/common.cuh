// What all kernels share: names of the integer types, and a sum over a block. Included by each .cu file of this folder;
// it defines no kernel.
//
// The kernels are compiled to PTX by `scripts/kernels` and that text is what ships: it runs on every GPU from sm_75 on and
// every driver from R525 on. So: no inline assembly, no library header, nothing newer than sm_75.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Every kernel is launched with blocks of this many threads (a multiple of 32) and any grid: the loops stride over the grid.
#define BLOCK 256

// The first index of this thread in a loop that strides over the grid, and the stride.
static __device__ __forceinline__ u64 grid_first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 grid_stride() { return (u64)gridDim.x * blockDim.x; }

// Adds `value` of every thread of the block to `*total`, by one atomic operation. All threads of the block call it, once a
// kernel; a sum of zero is not added, so that the usual count of nothing costs no traffic.
static __device__ __forceinline__ void add_over_block(u64 value, u64* total) {
    __shared__ u64 partial[BLOCK / 32];
    for (int distance = 16; distance > 0; distance >>= 1) value += __shfl_down_sync(0xffffffffu, value, distance);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 sum = 0;
#pragma unroll 1
        for (u32 warp = 0; warp < blockDim.x / 32; ++warp) sum += partial[warp];
        if (sum != 0) atomicAdd(total, sum);
    }
}
