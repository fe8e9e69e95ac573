// Layout of the K/V cache: blocks of 16 tokens, each head's keys feature after feature and its values token after token.
//
// Elements are fp32, bf16, pairs of bf16, fp16, or codes: int8 with one fp32 scale for each token of a head, behind the block.
#pragma once

#include <type_traits>

#include "half.h"
#include "rows.h"

namespace orca {

constexpr int RUN = 64;  // blocks of the cache whose layers stand beside each other
MLSYS_CONSTANTS(RUN);

MLSYS_ENUM(CacheKind, FLOATS, HALVES, PAIRS, FP16, CODES);  // fp32, bf16, pairs of bf16, fp16, int8 with scales

// Elements behind each block of a head that hold the scales of its tokens.
template <class T>
constexpr int SCALES = std::is_same_v<T, int8_t> ? PANEL * sizeof(float) : 0;

// One layer's cache: keys [.., kv heads, head_dim, 16], values [.., kv heads, 16, padded_dim] of each block.
// Runs of blocks stand one after another, layer after layer in each: one layer's blocks are near each other, and memory is
// first touched a run at a time, not in all layers by one iteration that goes one block further than any before.
// Where pairs of bf16 are multiplied, of such pairs: keys [.., head_dim / 2, 16, 2], values [.., 8, padded_dim, 2].
template <class T, bool IN_PAIRS = false>
struct LayerCache {
    using Element = T;
    T* keys;
    T* values;
    int num_layers, layer, num_kv_heads, head_dim, padded_dim;
    T* key_block(int block, int head) const { return keys + place(block, head) * (head_dim * PANEL + SCALES<T>); }
    T* value_block(int block, int head) const { return values + place(block, head) * (PANEL * padded_dim + SCALES<T>); }
    float* key_scales(const T* block) const { return (float*)(block + head_dim * PANEL); }
    float* value_scales(const T* block) const { return (float*)(block + PANEL * padded_dim); }
    int64_t place(int block, int head) const {
        const int64_t run = (int64_t)(block / RUN) * num_layers + layer;
        return (run * RUN + block % RUN) * num_kv_heads + head;
    }
    int key_at(int slot, int d) const { return IN_PAIRS ? (d / 2 * PANEL + slot) * 2 + d % 2 : d * PANEL + slot; }
    int value_at(int slot, int d) const {
        return IN_PAIRS ? (slot / 2 * padded_dim + d) * 2 + slot % 2 : slot * padded_dim + d;
    }
};

// The blocks of one key head that are read together, in their order, and those that are read next.
template <class T, bool IN_PAIRS>
struct Blocks {
    const LayerCache<T, IN_PAIRS>& cache;
    const int32_t* table;
    int count, head;
    const int32_t* next_table;
    int next_count, next_head;
    const T* keys(int i) const { return cache.key_block(table[std::min(i, count - 1)], head); }
    const T* values(int i) const { return cache.value_block(table[i], head); }
    const T* read(int i) const {  // keys, values, the next ones' keys
        if (i < count) return keys(i);
        if (i < 2 * count) return values(i - count);
        return cache.key_block(next_table[std::min(i - 2 * count, next_count - 1)], next_head);
    }
};

// A head's key or value as elements; returns the scale of codes, by the largest magnitude of the head. One that has an
// infinity or a NaN makes NaN of what it meets. One whose numbers are all below 1e-30 counts as zero.
template <class T>
inline float to_elements(const float* x, T* out, int size) {
    if constexpr (std::is_same_v<T, int8_t>) {
        float top = 0.0f, strange = 0.0f;
        for (int i = 0; i < size; i++) top = std::max(top, std::fabs(x[i])), strange += x[i] - x[i];
        const bool is_finite = strange == 0.0f, is_some = is_finite && top >= 1e-30f;
        const float factor = is_some ? 127.0f / top : 0.0f;
        for (int i = 0; i < size; i++) out[i] = is_some ? (int8_t)std::nearbyint(x[i] * factor) : 0;
        return is_finite ? (is_some ? top / 127.0f : 0.0f) : NAN;
    } else {
        convert_row(x, out, size);
        return 1.0f;
    }
}

}  // namespace orca
