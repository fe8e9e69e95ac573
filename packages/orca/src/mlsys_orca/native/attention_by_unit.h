// Attention as in attention.h, its two products by the matrix unit: over a cache of pairs of bf16, queries and weights
// rounded to bf16. Every sum runs over features or keys in their order, whatever the rows are computed with.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace orca {

// Whether heads of that size are multiplied by the unit: decides how the cache is laid out.
inline bool attends_by_unit(int head_dim) { return has_tiles() && head_dim % TILE_DEPTH == 0; }

#if ORCA_HAS_TILES

// One step of a product into the four registers of sums, ROWS x (4 / ROWS): `left(r)` loads register LEFT with rows,
// `right(c)` register RIGHT with columns. A macro, since the intrinsics take the registers' numbers as they are written.
#define ORCA_ADD_STEP(ROWS, LEFT, RIGHT, left, right)  \
    left(0);                                           \
    right(0);                                          \
    _tile_dpbf16ps(0, LEFT, RIGHT);                    \
    if constexpr (ROWS == 2) {                         \
        left(1);                                       \
        _tile_dpbf16ps(2, LEFT, RIGHT);                \
        right(1);                                      \
        _tile_dpbf16ps(3, LEFT, RIGHT);                \
        left(0);                                       \
        _tile_dpbf16ps(1, LEFT, RIGHT);                \
    } else {                                           \
        right(1);                                      \
        _tile_dpbf16ps(1, LEFT, RIGHT);                \
        right(2);                                      \
        _tile_dpbf16ps(2, LEFT, RIGHT);                \
        right(3);                                      \
        _tile_dpbf16ps(3, LEFT, RIGHT);                \
    }

template <int ROWS>
inline void store_sums(float* to, int64_t stride) {
    const auto at = [&](int sum) { return to + sum / (4 / ROWS) * TILE_ROWS * stride + sum % (4 / ROWS) * PANEL; };
    _tile_stored(0, at(0), stride * sizeof(float));
    _tile_stored(1, at(1), stride * sizeof(float));
    _tile_stored(2, at(2), stride * sizeof(float));
    _tile_stored(3, at(3), stride * sizeof(float));
}

inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Ask memory for a block, which comes to the second-level cache.
inline void ask_for(const uint16_t* block, int dim) {
    for (int d = 0; d < dim; d += 2) __builtin_prefetch(block + d * PANEL, 0, 2);
}

// scores[r][key] = queries r . key, for ROWS tiles of rows [.., dim] and 4 / ROWS blocks of keys.
template <int ROWS, class Keys>
inline void score(const uint16_t* queries, Keys&& keys, int dim, float* scores, int64_t stride) {
    clear_sums();
    const uint16_t* blocks[4 / ROWS];
    for (int c = 0; c < 4 / ROWS; c++) blocks[c] = keys(c);
    for (int d = 0; d < dim; d += TILE_DEPTH) {
        const auto left = [&](int r) { _tile_loadd(4, queries + r * TILE_ROWS * dim + d, dim * sizeof(uint16_t)); };
        const auto right = [&](int c) { _tile_loadd(5, blocks[c] + d * PANEL, 64); };
        ORCA_ADD_STEP(ROWS, 4, 5, left, right)
    }
    store_sums<ROWS>(scores, stride);
}

// out[r][c] = sum over all blocks of weights[r][key] * value(key, c), for ROWS tiles of rows and 4 / ROWS of columns.
template <int ROWS, class Values>
inline void weigh_by_unit(
    const uint16_t* weights, int64_t stride, Values&& values, int num_blocks, int dim, int column, float* out) {
    clear_sums();
    for (int block = 0; block < num_blocks; block++) {
        const uint16_t* w = weights + block * PANEL;
        const uint16_t* v = values(block) + 2 * column;
        if (column == 0) ask_for(values(std::min(block + 3, num_blocks - 1)), dim);
        const auto left = [&](int r) { _tile_loadd(6, w + r * TILE_ROWS * stride, stride * sizeof(uint16_t)); };
        const auto right = [&](int c) { _tile_loadd(7, v + c * 2 * PANEL, dim * 2 * sizeof(uint16_t)); };
        ORCA_ADD_STEP(ROWS, 6, 7, left, right)
    }
    store_sums<ROWS>(out + column, dim);
}
#undef ORCA_ADD_STEP

// One task: rows `begin` to `end` of `span`, the query heads of one key head.
inline void attend(
    const Attention& a, const LayerCache<uint16_t, true>& cache, const Span& span, const int32_t* table, int head,
    int begin, int end, const float* qkv, const float* cos, const float* sin, const Register& merged, std::vector<float>& scratch) {
    const Reach reach(a, span, begin, end);
    const int group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (end - begin) * group;
    const int width = (a.num_heads + 2 * a.num_kv_heads) * dim, seen_keys = reach.num_blocks * PANEL;
    const int keys = (reach.num_blocks + 3) / 4 * 4 * PANEL;  // four blocks at a time
    constexpr int LINE = 64 / sizeof(float);
    scratch.resize((int64_t)UNIT_ROWS * (dim + dim / 2 + keys + keys / 2) + LINE);
    float* scores = (float*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);
    float* sums = scores + UNIT_ROWS * keys;
    uint16_t* weights = (uint16_t*)(sums + UNIT_ROWS * dim);
    uint16_t* queries = weights + UNIT_ROWS * keys;
    const int32_t* blocks = table + reach.first_block;
    const auto values = [&](int block) { return cache.value_block(blocks[block], head); };
    const auto keys_of = [&](int block) { return cache.key_block(blocks[std::min(block, reach.num_blocks - 1)], head); };

    for (int row = 0; row < rows; row += UNIT_ROWS) {
        const int some = std::min(UNIT_ROWS, rows - row);
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            const int64_t at = (int64_t)token * a.rotary_dim;
            float query[1024];
            copy_row(qkv + (int64_t)token * width + query_head * dim, query, dim);
            prepare_head(a, query_head, query, cos + at, sin + at);
            to_bf16(query, queries + r * dim, dim);
        }
        for (int block = 0; block < reach.num_blocks;) {
            const auto from = [&](int c) { return keys_of(block + c); };
            const bool is_few = some <= TILE_ROWS;
            const int count = is_few ? 4 : 2;
            for (int c = 0; c < count; c++) ask_for(keys_of(block + count + c), dim);
            (is_few ? score<1, decltype(from)&> : score<2, decltype(from)&>)(queries, from, dim, scores + block * PANEL, keys);
            block += count;
        }
        float inverse[UNIT_ROWS];
        for (int r = 0; r < some; r++) {
            const int seen = reach.seen_by(begin + (row + r) / group, span);
            const int first = a.window ? std::max(0, seen - a.window) : 0;
            const int shift = reach.first_block * PANEL;
            uint16_t* own = weights + r * keys;
            inverse[r] = 1.0f / softmax(a, scores + r * keys, first - shift, seen - shift, seen_keys, own);
        }
        for (int column = 0; column < dim;) {
            const bool is_wide = some <= TILE_ROWS && column + 4 * PANEL <= dim;
            (is_wide ? weigh_by_unit<1, decltype(values)&> : weigh_by_unit<2, decltype(values)&>)(
                weights, keys, values, reach.num_blocks, dim, column, sums);
            column += (is_wide ? 4 : 2) * PANEL;
        }
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            put_row(merged, token, query_head * dim, sums + r * dim, inverse[r], dim);
        }
    }
}

#else

inline void attend(
    const Attention&, const LayerCache<uint16_t, true>&, const Span&, const int32_t*, int, int, int, const float*,
    const float*, const float*, const Register&, std::vector<float>&) {}

#endif

}  // namespace orca
