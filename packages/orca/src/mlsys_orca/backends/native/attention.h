// Attention over the ragged batch (ORCA, section 3.2): each request's rows over its own keys and values.
//
// A task is one request's tile of rows with one key head, so that requests of any lengths share the threads evenly. The
// query heads that share a key head stand as rows beside each other. A block of 16 keys is kept feature after feature,
// which makes it a panel of a GEMM; a block of values stands key after key. Scores of the whole context are kept, so
// every sum runs over the keys in their order whatever the rows are computed with.
#pragma once

#include <vector>

#include "gemm.h"
#include "rows.h"
#include "scratch.h"

namespace orca {

constexpr int RUN = 64;  // blocks of the cache whose layers stand beside each other
MLSYS_CONSTANTS(RUN);
constexpr int BLOCKS_AHEAD = 4;  // that are prefetched

struct Span {  // one request's part of an iteration
    int32_t start, stop;  // rows
    int32_t context;      // keys that the last row sees
    int32_t table;        // where its block table begins
};

struct Attention {
    int32_t source, target;  // registers
    int32_t layer;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t rotary_dim;  // features that turn; 0: none
    int32_t rotary;      // which of the batch's factors
    int32_t window;      // keys a row sees; 0: all
    float scale;
    float softcap;  // 0: none
    float norm_eps;
    NormKind head_norm_kind;  // of queries and keys
    const float* head_norm;   // [num_heads + num_kv_heads, head_dim] its weights
    const float* head_shift;  // as many, its biases; null: 0
    const float* slopes;      // [num_heads] scores lose it times the key's distance; null: nothing
    int32_t only_sampled;  // attends for the sampled rows alone; the others' keys and values are kept
};
MLSYS_STRUCT(Attention, source, target, layer, num_heads, num_kv_heads, head_dim, rotary_dim, rotary, window, scale,
    softcap, norm_eps, head_norm_kind, head_norm, head_shift, slopes, only_sampled);

// One layer's cache, of floats or bf16: keys [.., kv heads, head_dim, 16], values [.., kv heads, 16, padded_dim] of each block.
// Runs of blocks stand one after another, layer after layer in each: one layer's blocks are near each other, and memory is
// first touched a run at a time, not in all layers by one iteration that goes one block further than any before.
// Where pairs of bf16 are multiplied, of such pairs: keys [.., head_dim / 2, 16, 2], values [.., 8, padded_dim, 2].
template <class T, bool IN_PAIRS = false>
struct LayerCache {
    T* keys;
    T* values;
    int num_layers, layer, num_kv_heads, head_dim, padded_dim;
    T* key_block(int block, int head) const { return keys + place(block, head) * head_dim * PANEL; }
    T* value_block(int block, int head) const { return values + place(block, head) * PANEL * padded_dim; }
    int64_t place(int block, int head) const {
        const int64_t run = (int64_t)(block / RUN) * num_layers + layer;
        return (run * RUN + block % RUN) * num_kv_heads + head;
    }
    int key_at(int slot, int d) const { return IN_PAIRS ? (d / 2 * PANEL + slot) * 2 + d % 2 : d * PANEL + slot; }
    int value_at(int slot, int d) const {
        return IN_PAIRS ? (slot / 2 * padded_dim + d) * 2 + slot % 2 : slot * padded_dim + d;
    }
};

// The blocks of one key head that a task reads, in their order: keys, values, most likely the next head's keys.
template <class T, bool IN_PAIRS>
struct Blocks {
    const LayerCache<T, IN_PAIRS>& cache;
    const int32_t* table;
    int count, head;
    const T* keys(int i) const { return cache.key_block(table[std::min(i, count - 1)], head); }
    const T* values(int i) const { return cache.value_block(table[i], head); }
    const T* read(int i) const {
        if (i < count) return keys(i);
        if (i < 2 * count) return values(i - count);
        return cache.key_block(table[std::min(i - 2 * count, count - 1)], std::min(head + 1, cache.num_kv_heads - 1));
    }
};

inline int padded(int size) { return (size + PANEL - 1) / PANEL * PANEL; }

// Normalise and turn one head, in place. `position_factors`: the row's cosines, then its sines; null: none.
inline void prepare_head(const Attention& a, int head, float* x, const float* cos, const float* sin) {
    const int at = head * a.head_dim;
    if (a.head_norm)
        normalise(Norm{a.head_norm_kind, a.head_dim, a.norm_eps, a.head_norm + at, a.head_shift ? a.head_shift + at : nullptr}, x, x);
    if (a.rotary_dim) rotate(x, cos, sin, a.rotary_dim);
}

// Keep a row's key and value of one head. `qkv` is the row of the projections. GEMMs of pairs take all slots of a
// block of values, by zero where no key is: what follows a request's last row in a block that it began becomes zero, too.
template <class T, bool IN_PAIRS>
void keep(
    const Attention& a, const LayerCache<T, IN_PAIRS>& cache, const Span& span, const int32_t* table, int row, int head,
    const float* qkv, const float* cos, const float* sin) {
    const int position = span.context - (span.stop - row), at = position % PANEL, block = table[position / PANEL];
    float key[1024];
    copy_row(qkv + (a.num_heads + head) * a.head_dim, key, a.head_dim);
    prepare_head(a, a.num_heads + head, key, cos, sin);
    T rounded[1024];
    T* keys = cache.key_block(block, head);
    convert_row(key, rounded, a.head_dim);
    for (int d = 0; d < a.head_dim; d++) keys[cache.key_at(at, d)] = rounded[d];
    T* values = cache.value_block(block, head);
    convert_row(qkv + (a.num_heads + a.num_kv_heads + head) * a.head_dim, rounded, a.head_dim);
    for (int d = 0; d < a.head_dim; d++) values[cache.value_at(at, d)] = rounded[d];
    if (IN_PAIRS && row == span.stop - 1 && position - at >= span.context - (span.stop - span.start)) {
        if (at % 2 == 0)
            for (int d = 0; d < a.head_dim; d++) values[cache.value_at(at + 1, d)] = T{};
        const int next = (at / 2 + 1) * 2;
        std::memset(values + next * cache.padded_dim, 0, sizeof(T) * (PANEL - next) * cache.padded_dim);
    }
}

// The keys that rows `begin` to `end` of a span see, as blocks of its table.
struct Reach {
    int past;  // position of the span's first row
    int limit;  // keys that the last of the rows sees
    int first_block, num_blocks;
    Reach(const Attention& a, const Span& span, int begin, int end)
        : past(span.context - (span.stop - span.start)), limit(past + end - span.start) {
        const int oldest = a.window ? std::max(0, past + begin - span.start + 1 - a.window) : 0;
        first_block = oldest / PANEL;
        num_blocks = (limit + PANEL - 1) / PANEL - first_block;
    }
    int seen_by(int row, const Span& span) const { return past + row - span.start + 1; }
};

// first, first + 1, ...
inline vf counting(int first) {
    vf lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (float)(first + i);
    return lanes;
}

// Scores [first, limit) of a row's query head become weights that sum to what is returned; all others up to `stop`
// become 0. The last of them is of the row's own key.
template <class T>
inline float softmax(const Attention& a, int query_head, float* scores, int first, int limit, int stop, T* weights) {
    const int begin = first / LANES * LANES;
    const float slope = a.slopes ? a.slopes[query_head] : 0.0f;
    vf most = splat(-INFINITY);
    for (int i = begin; i < limit; i += LANES) {
        vf s = load(scores + i) * splat(a.scale);
        if (a.softcap != 0.0f) s = splat(a.softcap) * fast_tanh(s / splat(a.softcap));
        if (a.slopes) s = fma(splat(slope), counting(i + 1 - limit), s);
        if (i < first || i + LANES > limit) s = only(s, first - i, limit - i, -INFINITY);
        store(scores + i, s);
        most = larger(most, s);
    }
    const vf top = splat(largest(most));
    vf total{};
    for (int i = 0; i < begin; i += LANES) store(weights + i, vf{});
    int i = begin;
    for (; i < limit; i += LANES) {
        const vf e = exp_or_zero(load(scores + i) - top);
        store(weights + i, e);
        total += e;
    }
    for (; i < stop; i += LANES) store(weights + i, vf{});
    return sum(total);
}

// out[r][c] += sum over a block's keys of weights[r][key] * values[key][c], for WIDE vectors of columns; prefetches
// the block at `prefetch_from`.
template <int ROWS, int WIDE, class T>
inline void weigh_columns(const float* weights, int64_t stride, const T* values, int padded_dim, int keys, const T* prefetch_from, float* out) {
    vf sums[ROWS][WIDE];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) sums[r][c] = load(out + r * padded_dim + c * LANES);
    for (int j = 0; j < keys; j++) {
        const int64_t at = (int64_t)j * padded_dim;
        vf v[WIDE];
        for (int c = 0; c < WIDE; c++) v[c] = load(values + at + c * LANES);
        for (int c = 0; c < WIDE; c += 64 / (int)sizeof(T) / LANES) __builtin_prefetch(prefetch_from + at + c * LANES, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const vf x = splat(weights[r * stride + j]);
            for (int c = 0; c < WIDE; c++) sums[r][c] = fma(x, v[c], sums[r][c]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(out + r * padded_dim + c * LANES, sums[r][c]);
}

// As `weigh_columns` for all of them, as many at a time as the registers hold. A block stays in the first-level cache.
template <class T, int ROWS>
void weigh(const float* weights, int64_t stride, const T* values, int padded_dim, int keys, const T* prefetch_from, float* out) {
    constexpr int NARROW = PANEL / LANES, WIDE = LANES == 16 ? 4 : NARROW;
    int column = 0;
    for (; column + WIDE * LANES <= padded_dim; column += WIDE * LANES)
        weigh_columns<ROWS, WIDE>(weights, stride, values + column, padded_dim, keys, prefetch_from + column, out + column);
    for (; column < padded_dim; column += PANEL)
        weigh_columns<ROWS, NARROW>(weights, stride, values + column, padded_dim, keys, prefetch_from + column, out + column);
}

// One task: rows `begin` to `end` of `span`, the query heads of one key head.
template <class T>
void attend(
    const Attention& a, const LayerCache<T>& cache, const Span& span, const int32_t* table, int head, int begin, int end,
    const float* qkv, const float* cos, const float* sin, const Register& merged, Scratch& scratch) {
    using Panel = std::conditional_t<std::is_same_v<T, float>, F32Panel, Bf16Panel>;
    const int group = a.num_heads / a.num_kv_heads, dim = a.head_dim;
    const int width = (a.num_heads + 2 * a.num_kv_heads) * dim;
    const Reach reach(a, span, begin, end);
    const int first_block = reach.first_block, num_blocks = reach.num_blocks;
    const int shift = first_block * PANEL, keys = num_blocks * PANEL;
    const int rows = (end - begin) * group;

    float* queries = scratch.grow((int64_t)rows * (dim + keys) + MAX_MR * (2 * PANEL + cache.padded_dim));
    float* scores = queries + (int64_t)rows * dim;
    float* tile = scores + (int64_t)rows * keys;
    for (int row = 0; row < rows; row++) {
        const int token = begin + row / group, query_head = head * group + row % group;
        copy_row(qkv + (int64_t)token * width + query_head * dim, queries + row * dim, dim);
        const int64_t at = (int64_t)token * a.rotary_dim;
        prepare_head(a, query_head, queries + row * dim, cos + at, sin + at);
    }
    const Blocks<T, false> blocks{cache, table + first_block, num_blocks, head};
    for (int row = 0; row < rows; row += MAX_MR) {
        const int some = std::min(MAX_MR, rows - row);
        for (int block = 0; block < num_blocks; block += 2) {
            const int pair = std::min(2, num_blocks - block);
            const auto panel = [&](int which) {
                const int at = std::min(block + which, num_blocks - 1);
                return Panel(blocks.read(at), blocks.read(at + BLOCKS_AHEAD));
            };
            Panel panels[2] = {panel(0), panel(1)};
            multiply_rows<Panel, false>(some, queries + (int64_t)row * dim, dim, panels, pair, dim, dim, tile, pair * PANEL);
            for (int r = 0; r < some; r++)
                std::memcpy(
                    scores + (int64_t)(row + r) * keys + block * PANEL, tile + r * pair * PANEL, 4 * pair * PANEL);
        }
        float inverse[MAX_MR];
        for (int r = 0; r < some; r++) {
            const int seen = reach.seen_by(begin + (row + r) / group, span);
            const int first = a.window ? std::max(0, seen - a.window) : 0;
            float* own = scores + (int64_t)(row + r) * keys;
            inverse[r] = 1.0f / softmax(a, head * group + (row + r) % group, own, first - shift, seen - shift, keys, own);
        }
        float* sums = tile + MAX_MR * 2 * PANEL;
        std::fill_n(sums, some * cache.padded_dim, 0.0f);
        for (int block = 0; block < num_blocks; block++) {
            const float* w = scores + (int64_t)row * keys + block * PANEL;
            const int some_keys = std::min(PANEL, reach.limit - (first_block + block) * PANEL);
            const T* prefetch_from = blocks.read(num_blocks + block + BLOCKS_AHEAD);
#define ORCA_ROWS(ROWS) \
    case ROWS: weigh<T, ROWS>(w, keys, blocks.values(block), cache.padded_dim, some_keys, prefetch_from, sums); break;
            switch (some) { ORCA_ROWS(1) ORCA_ROWS(2) ORCA_ROWS(3) ORCA_ROWS(4) ORCA_ROWS(5) ORCA_ROWS(6) }
#undef ORCA_ROWS
        }
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            put_row(merged, token, query_head * dim, sums + r * cache.padded_dim, inverse[r], dim);
        }
    }
}

}  // namespace orca
