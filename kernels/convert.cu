// Conversion between float formats, with dequantisation by block scales: the kernels `cast_{from}_{to}`, and `wide_{from}_{to}`
// for scales in double precision and coded ones. The host twin, bit for bit, is `src/convert.rs`, written another way on purpose.
//
// Rounding is to nearest, ties to even, once; subnormals are exact on both sides; a NaN stays a quiet NaN with its sign and
// top payload bits. The exception is a product of a scale: if that is NaN it is the one positive quiet NaN without payload,
// because processors disagree there. All of it is integer arithmetic except the exact multiplications by powers of two and the
// multiplication by a scale (in f32, or in f64 by the wide kernels), so the results do not hang on the GPU's own conversions (sm_75 has none for bf16 and fp8).
//
// Formats: f64 f32 f16 bf16; f8_e4m3 (no infinities, NaN is S.1111.111), f8_e5m2 (IEEE-like), and their fnuz variants
// (0x80 is the one NaN, no infinities, no negative zero, a bias one larger); e2m1x2, two numbers of 4 bits in a byte, the first in
// the lower half (bias 1, no infinities, no NaN): an element is the byte.
#include "common.cuh"

// --- formats: how their elements are stored and what they are as f32, exactly ---

// `bits << SHIFT` puts exponent and mantissa where f32 has them, still with the narrow format's bias; the multiplication by a
// power of two corrects that, for subnormals too. Exact: no bits are lost, and nothing is flushed to zero.
template <u32 SHIFT, u32 POWER>
static __device__ __forceinline__ u32 rebias(u32 magnitude) {
    return __float_as_uint(__uint_as_float(magnitude << SHIFT) * __uint_as_float((127 + POWER) << 23));
}

#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u

struct f64 {
    typedef u64 Word;
};
struct f32 {
    typedef u32 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) { return bits; }
    static __device__ __forceinline__ bool finite(u32 bits) { return (bits & INFINITE) != INFINITE; }
};
struct bf16 {
    typedef u16 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        return (bits & 0x7fff) > 0x7f80 ? (bits | 0x40) << 16 : bits << 16;
    }
};
struct f16 {
    typedef u16 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        u32 sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
        if (magnitude > 0x7c00) return sign | NOT_A_NUMBER | (magnitude & 0x3ff) << 13;
        return sign | (magnitude == 0x7c00 ? INFINITE : rebias<13, 112>(magnitude));
    }
};
struct f8_e4m3 {
    typedef u8 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        u32 sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
        return sign | (magnitude == 0x7f ? NOT_A_NUMBER : rebias<20, 120>(magnitude));
    }
};
struct f8_e5m2 {
    typedef u8 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        u32 sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
        if (magnitude > 0x7c) return sign | NOT_A_NUMBER | (magnitude & 3) << 21;
        return sign | (magnitude == 0x7c ? INFINITE : rebias<21, 112>(magnitude));
    }
};
struct f8_e4m3fnuz {
    typedef u8 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        return bits == 0x80 ? NOT_A_NUMBER : (bits & 0x80) << 24 | rebias<20, 119>(bits & 0x7f);
    }
};
struct f8_e5m2fnuz {
    typedef u8 Word;
    static __device__ __forceinline__ u32 as_f32(u32 bits) {
        return bits == 0x80 ? NOT_A_NUMBER : (bits & 0x80) << 24 | rebias<21, 111>(bits & 0x7f);
    }
};

struct e2m1x2 {
    typedef u8 Word;
};

// The numbers of one element: one, but for pairs.
template <typename From>
struct Numbers {
    enum { count = 1 };
    static __device__ __forceinline__ u32 at(u32 bits, int) { return From::as_f32(bits); }
};
template <>
struct Numbers<e2m1x2> {
    enum { count = 2 };
    static __device__ __forceinline__ u32 at(u32 bits, int number) {
        bits >>= 4 * number;
        return (bits & 8) << 28 | rebias<22, 126>(bits & 7);
    }
};

// --- rounding ---

// `bits`, a float of FE exponent and FM mantissa bits, as the nearest float of TE and TM bits, ties to even.
template <typename W, int FE, int FM, int TE, int TM>
static __device__ __forceinline__ W narrow(W bits) {
    const int shift = FM - TM, biases = (1 << (FE - 1)) - (1 << (TE - 1));
    const W infinite_from = ((W)((1 << FE) - 1)) << FM, infinite_to = ((W)((1 << TE) - 1)) << TM;
    const W sign = bits >> (FE + FM) << (TE + TM), magnitude = bits & (((W)1 << (FE + FM)) - 1);
    if (magnitude > infinite_from)  // NaN: the top of the payload, made quiet
        return sign | infinite_to | (W)1 << (TM - 1) | (magnitude >> shift & (((W)1 << TM) - 1));
    if (biases == 0 || magnitude >= (W)(biases + 1) << FM) {  // normal in the target; a carry runs into the exponent, rightly
        const W rebiased = magnitude - ((W)biases << FM);
        const W rounded = (rebiased + (((W)1 << (shift - 1)) - 1) + (rebiased >> shift & 1)) >> shift;
        return sign | (rounded < infinite_to ? rounded : infinite_to);
    }
    // Subnormal in the target: the shift grows by how far the exponent lies below the smallest normal one. A subnormal source
    // lies so far below that it rounds to zero (here the exponents' ranges differ).
    const int below = biases + 1 - (int)(magnitude >> FM), all = shift + below;
    if (all > FM + 1) return sign;
    const W significand = (magnitude & (((W)1 << FM) - 1)) | (W)1 << FM;
    const W kept = significand >> all, lost = significand & (((W)1 << all) - 1), half = (W)1 << (all - 1);
    return sign | (kept + (lost > half || (lost == half && (kept & 1)) ? 1 : 0));
}

// --- one element, with or without a scale; `infinite` grows by one if it was finite and is no longer ---

template <typename To>
struct Round;
template <>
struct Round<f32> {
    static __device__ __forceinline__ bool infinite(u32 bits) { return (bits & 0x7fffffff) == 0x7f800000; }
    static __device__ __forceinline__ u32 of_f32(u32 bits) { return bits; }
    static __device__ __forceinline__ u32 of_f64(u64 bits) { return (u32)narrow<u64, 11, 52, 8, 23>(bits); }
};
template <>
struct Round<f16> {
    static __device__ __forceinline__ bool infinite(u32 bits) { return (bits & 0x7fff) == 0x7c00; }
    static __device__ __forceinline__ u32 of_f32(u32 bits) { return narrow<u32, 8, 23, 5, 10>(bits); }
    static __device__ __forceinline__ u32 of_f64(u64 bits) { return (u32)narrow<u64, 11, 52, 5, 10>(bits); }
};
template <>
struct Round<bf16> {
    static __device__ __forceinline__ bool infinite(u32 bits) { return (bits & 0x7fff) == 0x7f80; }
    static __device__ __forceinline__ u32 of_f32(u32 bits) { return narrow<u32, 8, 23, 8, 7>(bits); }
    static __device__ __forceinline__ u32 of_f64(u64 bits) { return (u32)narrow<u64, 11, 52, 8, 7>(bits); }
};

template <typename From, typename To>
struct Convert {
    static __device__ __forceinline__ u32 one(u32 bits, bool scaled, float scale, u64& infinite) {
        // Without scales `scale` is 1: the product is the value, and a NaN is taken from before it.
        u32 value = From::as_f32(bits), product = __float_as_uint(__uint_as_float(value) * scale);
        bool count = f32::finite(value) && f32::finite(__float_as_uint(scale));
        if ((product & 0x7fffffffu) > INFINITE) product = scaled ? NOT_A_NUMBER : value;
        u32 result = Round<To>::of_f32(product);
        infinite += count && Round<To>::infinite(result);
        return result;
    }
};
// From f64 there are no scales: checkpoints hold none, and a product in f32 would round twice.
template <typename To>
struct Convert<f64, To> {
    static __device__ __forceinline__ u32 one(u64 bits, bool, float, u64& infinite) {
        u32 result = Round<To>::of_f64(bits);
        bool count = (bits & 0x7ff0000000000000ull) != 0x7ff0000000000000ull;
        infinite += count && Round<To>::infinite(result);
        return result;
    }
};

// One number times a scale, in f64, rounded once.
template <typename To>
static __device__ __forceinline__ u32 times(u32 value, double scale, u64& infinite) {
    const u64 above = 0x7ff0000000000000ull;
    u64 product = (u64)__double_as_longlong((double)__uint_as_float(value) * scale);
    bool count = f32::finite(value) && ((u64)__double_as_longlong(scale) & above) != above;
    if ((product & 0x7fffffffffffffffull) > above) product = 0x7ff8000000000000ull;
    u32 result = Round<To>::of_f64(product);
    infinite += count && Round<To>::infinite(result);
    return result;
}

// --- where elements lie ---

struct Shape {
    u64 run, stride;                             // runs of the source, in elements
    const float* scales;                         // null: a plain cast
    u64 first;                                   // index in the whole tensor of the source's first element
    u64 columns, block_rows, block_columns;      // of the whole tensor, and of a block that shares a scale
    u64 across;                                  // blocks in a row of blocks
};

static __device__ __forceinline__ u64 block_of(const Shape& shape, u64 element) {
    u64 row = element / shape.columns, column = element - row * shape.columns;
    return row / shape.block_rows * shape.across + column / shape.block_columns;
}

// The index in the source of the target's element `i`.
static __device__ __forceinline__ u64 place(const Shape& shape, bool contiguous, u64 i) {
    if (contiguous) return i;
    u64 run = i / shape.run;
    return run * shape.stride + (i - run * shape.run);
}

template <typename W>
static __device__ __forceinline__ W load_bytes(const u8* source) {
    u64 word = 0;
    for (u32 i = 0; i < sizeof(W); ++i) word |= (u64)source[i] << (8 * i);
    return (W)word;
}

// Four neighbouring elements, moved as one where both sides allow it (16 bytes at most a move).
template <typename W>
struct __align__(sizeof(W) * 4 < 16 ? sizeof(W) * 4 : 16) Four {
    enum { alignment = sizeof(W) * 4 < 16 ? sizeof(W) * 4 : 16 };
    W at[4];
};

// --- the kernel ---

// The target gets `elements` packed elements. Element i comes from the source's element i / run * stride + i % run; run is not
// 0, and run >= elements says that all lie side by side. `source` may be any address; `target` is aligned for its elements.
// With `scales`, the element with index e = first + (its index in the source) of a tensor of `columns` columns is multiplied
// by the scale of its block, in f32, before it is rounded. `overflowed`, if not null, grows by the number of elements that were
// finite (and whose scale was) and became infinite.
template <typename From, typename To>
static __device__ __forceinline__ void cast(const u8* source, u8* target, u64 elements, const Shape& shape, u64* overflowed) {
    typedef typename From::Word In;
    typedef typename To::Word Out;
    const bool contiguous = shape.run >= elements, scaled = shape.scales != 0;
    u64 infinite = 0, done = 0;

    // By fours, where no four straddles runs or blocks and all are aligned. Everything asked here is the same for all threads.
    u64 bits = contiguous ? 0 : shape.run | shape.stride;
    if (scaled) bits |= shape.first | shape.columns | shape.block_columns;
    if (bits % 4 == 0 && (u64)source % Four<In>::alignment == 0 && (u64)target % Four<Out>::alignment == 0) {
        done = elements / 4 * 4;
#pragma unroll 1
        for (u64 four = grid_first(); four < done / 4; four += grid_stride()) {
            u64 from = place(shape, contiguous, four * 4);
            float scale = scaled ? shape.scales[block_of(shape, shape.first + from)] : 1.0f;
            Four<In> in = ((const Four<In>*)source)[from / 4];
            Four<Out> out;
#pragma unroll
            for (int i = 0; i < 4; ++i) out.at[i] = (Out)Convert<From, To>::one(in.at[i], scaled, scale, infinite);
            ((Four<Out>*)target)[four] = out;
        }
    }
    // One by one: the rest of the above, or all.
    const bool aligned = (u64)source % sizeof(In) == 0;
#pragma unroll 1
    for (u64 i = done + grid_first(); i < elements; i += grid_stride()) {
        u64 from = place(shape, contiguous, i);
        float scale = scaled ? shape.scales[block_of(shape, shape.first + from)] : 1.0f;
        In in = aligned ? ((const In*)source)[from] : load_bytes<In>(source + from * sizeof(In));
        ((Out*)target)[i] = (Out)Convert<From, To>::one(in, scaled, scale, infinite);
    }
    if (overflowed) add_over_block(infinite, overflowed);
}

#define CAST(from, to)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(BLOCK) cast_##from##_##to(                                                 \
        const u8* source, u8* target, u64 elements, u64 run, u64 stride, const float* scales, u64 first, u64 columns,       \
        u64 block_rows, u64 block_columns, u64* overflowed) {                                                               \
        u64 across = scales ? (columns + block_columns - 1) / block_columns : 0;                                            \
        Shape shape = {run, stride, scales, first, columns, block_rows, block_columns, across};                             \
        cast<from, to>(source, target, elements, shape, overflowed);                                                        \
    }

// The same, with scales in double precision: `values` has one for each block, or, where there are `codes`, one for each of their 256
// values, and `codes` has the code of each block. Elements of pairs become two elements of the target each.
template <typename From, typename To>
static __device__ __forceinline__ void wide(
    const u8* source, u8* target, u64 elements, const Shape& shape, const u8* codes, const double* values, u64* overflowed) {
    typedef typename From::Word In;
    typedef typename To::Word Out;
    const int count = Numbers<From>::count;
    const bool contiguous = shape.run >= elements;
    u64 infinite = 0, done = 0;

    // As in `cast`.
    const u64 bits = (contiguous ? 0 : shape.run | shape.stride) | shape.first | shape.columns | shape.block_columns;
    if (bits % 4 == 0 && (u64)source % Four<In>::alignment == 0 && (u64)target % Four<Out>::alignment == 0) {
        done = elements / 4 * 4;
#pragma unroll 1
        for (u64 four = grid_first(); four < done / 4; four += grid_stride()) {
            u64 from = place(shape, contiguous, four * 4), block = block_of(shape, shape.first + from);
            double scale = codes ? values[codes[block]] : values[block];
            Four<In> in = ((const Four<In>*)source)[from / 4];
            Four<Out> out[count];
#pragma unroll
            for (int i = 0; i < 4 * count; ++i)
                out[i / 4].at[i % 4] = (Out)times<To>(Numbers<From>::at(in.at[i / count], i % count), scale, infinite);
#pragma unroll
            for (int i = 0; i < count; ++i) ((Four<Out>*)target)[four * count + i] = out[i];
        }
    }
#pragma unroll 1
    for (u64 i = done + grid_first(); i < elements; i += grid_stride()) {
        u64 from = place(shape, contiguous, i), block = block_of(shape, shape.first + from);
        double scale = codes ? values[codes[block]] : values[block];
        In in = source[from];
#pragma unroll
        for (int n = 0; n < count; ++n)
            ((Out*)target)[i * count + n] = (Out)times<To>(Numbers<From>::at(in, n), scale, infinite);
    }
    if (overflowed) add_over_block(infinite, overflowed);
}

#define WIDE(from, to)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(BLOCK) wide_##from##_##to(                                                 \
        const u8* source, u8* target, u64 elements, u64 run, u64 stride, const u8* codes, const double* values, u64 first,  \
        u64 columns, u64 block_rows, u64 block_columns, u64* overflowed) {                                                  \
        Shape shape = {run, stride, 0, first, columns, block_rows, block_columns,                                           \
                       (columns + block_columns - 1) / block_columns};                                                      \
        wide<from, to>(source, target, elements, shape, codes, values, overflowed);                                         \
    }
#define WIDE_TO_ALL(from)                                                                                                   \
    WIDE(from, f32)                                                                                                         \
    WIDE(from, f16)                                                                                                         \
    WIDE(from, bf16)

// One PTX file a source format (`scripts/kernels` compiles this file once for each), so that a driver translates only
// what a load needs.
#if defined(FROM_F64)
CAST(f64, f32)
CAST(f64, f16)
CAST(f64, bf16)
#elif defined(FROM_F32)
CAST(f32, f16)
CAST(f32, bf16)
#elif defined(FROM_F16)
CAST(f16, f32)
CAST(f16, bf16)
#elif defined(FROM_BF16)
CAST(bf16, f32)
CAST(bf16, f16)
#elif defined(FROM_F8_E4M3)
CAST(f8_e4m3, f32)
CAST(f8_e4m3, f16)
CAST(f8_e4m3, bf16)
WIDE_TO_ALL(f8_e4m3)
#elif defined(FROM_F8_E5M2)
CAST(f8_e5m2, f32)
CAST(f8_e5m2, f16)
CAST(f8_e5m2, bf16)
WIDE_TO_ALL(f8_e5m2)
#elif defined(FROM_F8_E4M3FNUZ)
CAST(f8_e4m3fnuz, f32)
CAST(f8_e4m3fnuz, f16)
CAST(f8_e4m3fnuz, bf16)
WIDE_TO_ALL(f8_e4m3fnuz)
#elif defined(FROM_F8_E5M2FNUZ)
CAST(f8_e5m2fnuz, f32)
CAST(f8_e5m2fnuz, f16)
CAST(f8_e5m2fnuz, bf16)
WIDE_TO_ALL(f8_e5m2fnuz)
#elif defined(FROM_E2M1X2)
WIDE_TO_ALL(e2m1x2)
#else
#error "say which format to convert from: -DFROM_F64, -DFROM_F8_E4M3, ..."
#endif
