// Moves bytes within device memory: packing of strided rows by a table (`gather`) and transposition. Values stay as they are;
// `convert.cu` changes them.
#include "common.cuh"

// `runs` runs of `run` bytes, the start of each `stride` bytes after the one before, go side by side to `target`.
struct Entry {
    u64 source;  // bytes from `base` to the first run
    u64 target;  // device address
    u64 run;     // bytes of a run
    u64 stride;  // bytes from one run's start to the next
    u64 runs;    // how many
};

// Moves `runs` runs in units of T, to which everything is aligned.
template <typename T>
static __device__ void move_runs(const u8* source, u8* target, u64 run, u64 stride, u64 runs) {
    const u64 units = run / sizeof(T), all = units * runs;
    for (u64 i = grid_first(); i < all; i += grid_stride()) {
        u64 row = runs == 1 ? 0 : i / units;
        u64 in_row = i - row * units;
        ((T*)target)[i] = ((const T*)(source + row * stride))[in_row];
    }
}

// The widest unit, in bytes, that divides every one of the values or'ed into `bits`.
static __device__ __forceinline__ u32 unit_of(u64 bits) {
    u32 low = (u32)bits | 16;
    return low & (0u - low) & 31;
}

static __device__ __forceinline__ void move_by(u32 unit, const u8* source, u8* target, u64 run, u64 stride, u64 runs) {
    switch (unit) {
        case 16: return move_runs<uint4>(source, target, run, stride, runs);
        case 8: return move_runs<u64>(source, target, run, stride, runs);
        case 4: return move_runs<u32>(source, target, run, stride, runs);
        case 2: return move_runs<u16>(source, target, run, stride, runs);
        default: return move_runs<u8>(source, target, run, stride, runs);
    }
}

// The grid's x strides over the bytes of an entry, its y over the entries. Targets do not overlap sources or each other.
extern "C" __global__ void __launch_bounds__(BLOCK) gather(const u8* base, const Entry* table, u32 count) {
    for (u32 index = blockIdx.y; index < count; index += gridDim.y) {
        const u8* source = base + table[index].source;
        u8* target = (u8*)table[index].target;
        u64 run = table[index].run, stride = table[index].stride, runs = table[index].runs;
        if (run == stride) {
            run *= runs;
            runs = 1;
        }
        if (runs != 1) {
            move_by(unit_of((u64)source | (u64)target | run | stride), source, target, run, stride, runs);
            continue;
        }
        // One run: where the two ends differ by a multiple of the unit, only the few bytes before and after whole units are
        // moved singly. All of a grid's threads take the same way.
        u32 unit = unit_of((u64)source - (u64)target);
        u64 head = (0 - (u64)target) & (unit - 1);
        if (head > run) head = run;
        u64 body = (run - head) & ~(u64)(unit - 1), tail = run - head - body, i = grid_first();
        move_by(unit, source + head, target + head, body, body, 1);
        if (i < head) target[i] = source[i];
        if (i < tail) target[head + body + i] = source[head + body + i];
    }
}

// target[column][row] = source[row][column], through a tile of shared memory so that both sides are read and written along
// rows. The padding column keeps the tile's columns in different banks.
template <typename T>
static __device__ __forceinline__ void transpose(const T* source, T* target, u64 rows, u64 columns) {
    __shared__ T tile[32][33];
    const u64 across = (columns + 31) / 32, tiles = across * ((rows + 31) / 32);
    const u32 x = threadIdx.x % 32, first = threadIdx.x / 32, step = blockDim.x / 32;
    for (u64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const u64 row = index / across * 32, column = index % across * 32;
        for (u32 y = first; y < 32; y += step)
            if (row + y < rows && column + x < columns) tile[y][x] = source[(row + y) * columns + column + x];
        __syncthreads();
        for (u32 y = first; y < 32; y += step)
            if (column + y < columns && row + x < rows) target[(column + y) * rows + row + x] = tile[x][y];
        __syncthreads();
    }
}

#define TRANSPOSE(bytes, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK)                                                 \
        transpose_##bytes(const T* source, T* target, u64 rows, u64 columns) {                          \
        transpose<T>(source, target, rows, columns);                                                    \
    }

TRANSPOSE(1, u8)
TRANSPOSE(2, u16)
TRANSPOSE(4, u32)
TRANSPOSE(8, u64)
