// The interface between kernels and the executor. A kernel is one operator with its arguments bound ahead of time: pointers
// into the arena, packed weights, sizes. It runs any range of its work units (rows of pixels, tiles of a matrix) on any
// thread, with that thread's scratch memory, so the planner may divide it into tasks freely.
#pragma once

#include <cstdint>

#include <mlsys/layout.h>
#include <mlsys/math.h>

namespace nimble {

using namespace mlsys;

constexpr int MAX_RANK = 6;
constexpr int SPACE = 3;  // depth, height, width
MLSYS_CONSTANTS(MAX_RANK, SPACE);

constexpr int PANEL_VECS = 2;  // vectors of a panel of int8 values or of bf16 pairs, at most

inline vi lane_numbers() {
    vi numbers{};
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}

// The first `count` numbers, at most a vector's; zeros follow. Memory behind them is neither read nor written.
inline vf load_first(const float* from, int count) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    return (vf)_mm256_maskload_ps(from, (__m256i)(lane_numbers() < count));
#else
    vf x{};
    for (int i = 0; i < count; i++) x[i] = from[i];
    return x;
#endif
}

inline void store_first(float* to, vf x, int count) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)x);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    _mm256_maskstore_ps(to, (__m256i)(lane_numbers() < count), (__m256)x);
#else
    for (int i = 0; i < count; i++) to[i] = x[i];
#endif
}

// Permute `x`: lane i of the result is lane lanes[i].
inline vf picked(vf x, vi lanes) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)lanes, (__m512)x);
#elif MLSYS_LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)lanes);
#else
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = x[lanes[i]];
    return out;
#endif
}

inline vf first_lanes(vf x, int count) { return (vf)((vi)x & (lane_numbers() < count)); }

MLSYS_ENUM(Dtype, FLOAT32, BFLOAT16, INT64, INT32, UINT8, BOOL, FLOAT64);

// A strided window: logical shape, strides in elements (0: broadcast). Channels-last images have shape N, C, H, W and
// strides that make C the closest.
struct View {
    void* data;    // null: `*slot` at the time of the call, for a caller's own tensors
    void** slot;
    int64_t slot_offset_nbytes;  // elements from that address
    Dtype dtype;
    int32_t rank;
    int64_t shape[MAX_RANK];
    int64_t strides[MAX_RANK];

    template <class T>
    T* as() const {
        return (T*)(data ? data : (char*)*slot + slot_offset_nbytes);
    }
};
MLSYS_STRUCT(View, data, slot, slot_offset_nbytes, dtype, rank, shape, strides);

class Kernel {
  public:
    virtual ~Kernel() = default;
    // Its work is units 0 to units - 1, of about equal cost and independent of each other.
    int64_t units = 1;
    int64_t scratch_nbytes = 0;  // bytes of scratch that one call of `run` needs, 64-byte aligned
    // Scratch begins with an int64_t: NEW in a thread's first run of this kernel in a replay. Scratch keeps its
    // contents between a thread's runs of one replay, so what all units need is computed once a thread.
    static constexpr int64_t NEW = -1;
    virtual void run(int64_t begin, int64_t end, void* scratch) const = 0;
};

}  // namespace nimble
