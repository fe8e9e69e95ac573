// Attention over the ragged batch (ORCA, section 3.2): each request's rows over its own keys and values.
//
// A tile is one request's rows with one key head, so that requests of any lengths share the threads evenly. The query
// heads that share a key head stand as rows beside each other. The context is cut in pieces of 512 keys, counted from its
// beginning: of each piece a row gets its largest score, the sum of its weights and its weighted values, and these are
// added in the order of the pieces. Within a piece sums run over the keys in their order. So a row's numbers depend on its
// context alone, and any threads may compute any pieces (FlashDecoding, Dao et al. 2023).
#pragma once

#include <algorithm>
#include <vector>

#include "kv_layout.h"
#include "rows.h"
#include "scratch.h"

namespace orca {

constexpr int PIECE = 512;  // keys whose scores are kept at once
constexpr int PIECE_STRIDE = PIECE + PANEL;  // of their scores: rows that lie 2 KiB apart would share few lines of a cache
MLSYS_CONSTANTS(PIECE);
constexpr int BLOCKS_AHEAD = 4;  // that are prefetched

struct Span {  // one request's part of an iteration
    int32_t start, stop;  // rows
    int32_t context;      // keys that the last row sees
    int32_t table;        // where its block table begins
    int32_t state_slot;   // row of the recurrent states
};

struct Attention {
    int32_t source, target;  // registers
    int32_t layer;
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t rotary_dim;  // features with rotary positions; 0: none
    int32_t rotary;      // index of the batch's rotary factors
    int32_t window;      // sliding window in keys; 0: all
    float scale;
    float softcap;  // 0: none
    float norm_eps;
    NormKind head_norm_kind;  // of queries and keys
    const float* head_norm;   // [num_heads + num_kv_heads, head_dim] its weights
    const float* head_shift;  // biases of the norm, same shape; null: 0
    const float* sinks;    // [num_heads] attention sinks: score of one more key whose value is 0; null: none
    int32_t value_column;  // of the source, where the first head's values begin
    int32_t only_sampled;  // attends for the sampled rows alone; the others' keys and values are kept
};
MLSYS_STRUCT(Attention, source, target, layer, num_heads, num_kv_heads, head_dim, rotary_dim, rotary, window, scale,
    softcap, norm_eps, head_norm_kind, head_norm, head_shift, sinks, value_column, only_sampled);

inline int padded(int size) { return (size + PANEL - 1) / PANEL * PANEL; }

// Apply norm and rotary positions to one head, in place. `position_factors`: the row's cosines, then its sines; null:
// none.
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
    T elements[1024];
    T* keys = cache.key_block(block, head);
    const float key_scale = to_elements(key, elements, a.head_dim);
    for (int d = 0; d < a.head_dim; d++) keys[cache.key_at(at, d)] = elements[d];
    T* values = cache.value_block(block, head);
    const float value_scale = to_elements(qkv + a.value_column + head * a.head_dim, elements, a.head_dim);
    for (int d = 0; d < a.head_dim; d++) values[cache.value_at(at, d)] = elements[d];
    if constexpr (SCALES<T> > 0) {
        cache.key_scales(keys)[at] = key_scale;
        cache.value_scales(values)[at] = value_scale;
    }
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

// Scores [first, limit) of a row's query head become weights, which sum to `total`; all others up to `stop` become 0. Scores
// are counted from the piece's first key.
template <class T>
inline void softmax(
    const Attention& a, float* scores, int first, int limit, int stop, T* weights, float& top, float& total) {
    const int begin = first / LANES * LANES;
    vf most = splat(-INFINITY);
    for (int i = begin; i < limit; i += LANES) {
        vf s = load(scores + i) * splat(a.scale);
        if (a.softcap != 0.0f) s = splat(a.softcap) * fast_tanh(s / splat(a.softcap));
        if (i < first || i + LANES > limit) s = only(s, first - i, limit - i, -INFINITY);
        store(scores + i, s);
        most = larger(most, s);
    }
    top = largest(most);
    vf sums{};
    for (int i = 0; i < std::min(begin, stop); i += LANES) store(weights + i, vf{});
    int i = begin;
    for (; i < limit; i += LANES) {
        const vf e = exp_or_zero(load(scores + i) - splat(top));
        store(weights + i, e);
        sums += e;
    }
    for (; i < stop; i += LANES) store(weights + i, vf{});
    total = sum(sums);
}

// One request's rows `begin` to `end` with one key head.
struct Tile {
    const Span& span;
    const int32_t* table;
    int head, begin, end;
};

// Inputs of a layer's rows.
struct Rows {
    const float* qkv;
    int width;  // of a row
    const float *cos, *sin;  // [rows, rotary_dim]
};

// Results of each piece for a tile's rows, [pieces][rows]: weighted values, largest score, sum of weights.
struct Partials {
    float* memory;
    int rows, width;  // width: padded head_dim
    int first_piece;
    static int64_t size(int pieces, int rows, int width) { return (int64_t)pieces * rows * (width + 2); }
    float* values(int piece) const { return memory + size(piece - first_piece, rows, width); }
    float* tops(int piece) const { return values(piece) + (int64_t)rows * width; }
    float* totals(int piece) const { return tops(piece) + rows; }
};

// Compute pieces `first` to `stop` of a tile. `Arithmetic` has the two GEMMs: over floats, or pairs of bf16.
template <class Arithmetic>
void attend(
    const Attention& a, const typename Arithmetic::Cache& cache, const Tile& tile, int first_piece, int stop_piece, const Rows& in,
    const Partials& out, Scratch& scratch) {
    using Operand = typename Arithmetic::Operand;  // of queries and weights
    constexpr int ROWS = Arithmetic::ROWS;
    const Reach reach(a, tile.span, tile.begin, tile.end);
    const int group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (tile.end - tile.begin) * group;
    // A GEMM may read and write ROWS rows where there are fewer.
    float* scores = scratch.grow(2 * (int64_t)ROWS * PIECE_STRIDE + ROWS * out.width + (int64_t)(rows + ROWS) * dim);
    float* sums = scores + ROWS * PIECE_STRIDE;
    Operand* weights = (Operand*)(sums + ROWS * out.width);
    Operand* queries = weights + ROWS * PIECE_STRIDE;
    for (int row = 0; row < rows; row++) {
        const int token = tile.begin + row / group, query_head = tile.head * group + row % group;
        float query[1024];
        copy_row(in.qkv + (int64_t)token * in.width + query_head * dim, query, dim);
        const int64_t at = (int64_t)token * a.rotary_dim;
        prepare_head(a, query_head, query, in.cos + at, in.sin + at);
        to_elements(query, queries + (int64_t)row * dim, dim);
    }
    for (int piece = first_piece; piece < stop_piece; piece++) {
        const int begin = std::max(piece * PIECE / PANEL, reach.first_block);
        const int end = std::min((piece + 1) * PIECE / PANEL, reach.first_block + reach.num_blocks);
        const int shift = begin * PANEL, count = end - begin, keys = std::min(reach.limit - shift, count * PANEL);
        const bool is_last = piece + 1 == stop_piece;
        const typename Arithmetic::Read blocks{
            cache, tile.table + begin, count, tile.head,
            is_last ? tile.table + reach.first_block : tile.table + end,
            is_last ? reach.num_blocks : reach.first_block + reach.num_blocks - end,
            is_last ? std::min(tile.head + 1, a.num_kv_heads - 1) : tile.head};
        for (int row = 0; row < rows; row += ROWS) {
            const int some = std::min(ROWS, rows - row);
            Arithmetic::score(blocks, queries + (int64_t)row * dim, some, dim, scores, PIECE_STRIDE);
            for (int r = 0; r < some; r++) {
                const int own = reach.seen_by(tile.begin + (row + r) / group, tile.span) - shift;
                const int first = std::max(0, a.window ? own - a.window : 0);
                softmax(
                    a, scores + r * PIECE_STRIDE, first, std::min(own, keys), count * PANEL, weights + r * PIECE_STRIDE, out.tops(piece)[row + r], out.totals(piece)[row + r]);
            }
            Arithmetic::weigh(blocks, weights, PIECE_STRIDE, some, keys, out.width, sums);
            copy_row(sums, out.values(piece) + (int64_t)row * out.width, some * out.width);
        }
    }
}

// Add the pieces of a tile's rows, in their order.
inline void combine(const Attention& a, const Tile& tile, const Partials& parts, const Register& merged) {
    const Reach reach(a, tile.span, tile.begin, tile.end);
    const int group = a.num_heads / a.num_kv_heads;
    for (int row = 0; row < parts.rows; row++) {
        const int token = tile.begin + row / group, query_head = tile.head * group + row % group;
        const int seen = reach.seen_by(token, tile.span), last = (seen - 1) / PIECE;
        const int first = (a.window ? std::max(0, seen - a.window) : 0) / PIECE;
        const auto put = [&](const float* values, float top, float total) {
            float factor = 1.0f / total;
            if (a.sinks) {
                const float sink = a.sinks[query_head], most = std::max(top, sink);
                const float own = exp_or_zero(splat(top - most))[0];
                factor = own / std::fma(own, total, exp_or_zero(splat(sink - most))[0]);
            }
            put_row(merged, token, query_head * a.head_dim, values, factor, a.head_dim);
        };
        if (first == last) {
            put(parts.values(first) + (int64_t)row * parts.width, parts.tops(first)[row], parts.totals(first)[row]);
            continue;
        }
        float top = -INFINITY, total = 0.0f;
        for (int piece = first; piece <= last; piece++) top = std::max(top, parts.tops(piece)[row]);
        alignas(64) float sums[1024] = {};
        for (int piece = first; piece <= last; piece++) {
            const vf weight = exp_or_zero(splat(parts.tops(piece)[row] - top));
            const float* values = parts.values(piece) + (int64_t)row * parts.width;
            for (int c = 0; c < parts.width; c += LANES) store(sums + c, fma(weight, load(values + c), load(sums + c)));
            total = std::fma(weight[0], parts.totals(piece)[row], total);
        }
        put(sums, top, total);
    }
}

}  // namespace orca
