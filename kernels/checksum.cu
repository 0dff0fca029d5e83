// An order-independent 64-bit checksum of device memory, so that what arrived can be compared with what was read without
// copying it back. It finds accidents (a flipped bit, swapped, missing or repeated blocks), not forgeries.
//
// The sum, modulo 2^64, of mix(word, index) over the little-endian 8-byte words, the last one padded with zeros. `mix` is a
// bijection of the word for each index, so a change of one word always changes the sum. The length is mixed in by the host
// (`digest::checksum_finish`), whose twin of this file is `digest::checksum`.
#include "common.cuh"

static __device__ __forceinline__ u64 mix(u64 word, u64 index) {
    u64 key = (2 * index + 1) * 0x9e3779b97f4a7c15ull;
    u64 keyed = word ^ key;
    u64 product = (keyed ^ (keyed >> 32)) * key;
    return product ^ (product >> 32);
}

// `source` is aligned to 8 bytes and not read past `bytes`; the sum is added to `*out`, which the caller has set to zero.
extern "C" __global__ void __launch_bounds__(BLOCK) checksum(const u64* source, u64 bytes, u64* out) {
    u64 words = bytes / 8, sum = 0;
    for (u64 i = grid_first(); i < words; i += grid_stride()) sum += mix(source[i], i);
    if (grid_first() == 0 && bytes % 8 != 0) {
        const u8* rest = (const u8*)(source + words);
        u64 last = 0;
        for (u32 i = 0; i < (u32)(bytes % 8); ++i) last |= (u64)rest[i] << (8 * i);
        sum += mix(last, words);
    }
    add_over_block(sum, out);
}
