// Attention as in attention.h, its two products by the matrix unit: over a cache of pairs of bf16, queries and weights
// rounded to bf16. Every sum runs over features or keys in their order, whatever the rows are computed with.
#pragma once

#include "attention.h"
#include "tiles.h"

namespace orca {

constexpr int UNIT_QUERIES = 2 * TILE_ROWS;  // rows of one attention task

// Whether heads of that size are multiplied by the unit: decides how the cache is laid out.
inline bool attends_by_unit(int head_dim) { return has_tiles() && head_dim % TILE_DEPTH == 0; }

#if ORCA_HAS_TILES

// scores[r][key] = queries r [32, dim] . key, for 32 or 16 rows and two blocks of keys.
template <bool BOTH>
inline void score(const uint16_t* queries, const uint16_t* const (&keys)[2], int dim, float* scores, int64_t stride) {
    const int64_t line = dim * sizeof(uint16_t);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int d = 0; d < dim; d += TILE_DEPTH) {
        _tile_loadd(4, queries + d, line);
        _tile_loadd(5, keys[0] + d * PANEL, 64);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (BOTH) {
            _tile_loadd(4, queries + TILE_ROWS * dim + d, line);
            _tile_dpbf16ps(2, 4, 5);
        }
        _tile_loadd(5, keys[1] + d * PANEL, 64);
        if constexpr (BOTH) {
            _tile_dpbf16ps(3, 4, 5);
            _tile_loadd(4, queries + d, line);
        }
        _tile_dpbf16ps(1, 4, 5);
    }
    _tile_stored(0, scores, stride * 4);
    _tile_stored(1, scores + PANEL, stride * 4);
    if constexpr (BOTH) {
        _tile_stored(2, scores + TILE_ROWS * stride, stride * 4);
        _tile_stored(3, scores + TILE_ROWS * stride + PANEL, stride * 4);
    }
}

// out[r][c] = sum over all blocks of weights[r][key] * value(key, c), for 32 or 16 rows and 32 columns from `column`.
template <bool BOTH, class Values>
inline void weigh_by_unit(
    const uint16_t* weights, int64_t stride, Values&& values, int num_blocks, int padded_dim, int column, float* out) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int block = 0; block < num_blocks; block++) {
        const uint16_t* w = weights + block * PANEL;
        const uint16_t* v = values(block) + 2 * column;
        const uint16_t* soon = values(std::min(block + 2, num_blocks - 1)) + 2 * column;
        for (int pair = 0; pair < PANEL / 2; pair++) {
            __builtin_prefetch(soon + 2 * pair * padded_dim);
            __builtin_prefetch(soon + 2 * pair * padded_dim + 2 * PANEL);
        }
        _tile_loadd(6, w, stride * 2);
        _tile_loadd(7, v, padded_dim * 4);
        _tile_dpbf16ps(0, 6, 7);
        if constexpr (BOTH) {
            _tile_loadd(6, w + TILE_ROWS * stride, stride * 2);
            _tile_dpbf16ps(2, 6, 7);
        }
        _tile_loadd(7, v + 2 * PANEL, padded_dim * 4);
        if constexpr (BOTH) {
            _tile_dpbf16ps(3, 6, 7);
            _tile_loadd(6, w, stride * 2);
        }
        _tile_dpbf16ps(1, 6, 7);
    }
    float* to = out + column;
    _tile_stored(0, to, padded_dim * 4);
    _tile_stored(1, to + PANEL, padded_dim * 4);
    if constexpr (BOTH) {
        _tile_stored(2, to + TILE_ROWS * padded_dim, padded_dim * 4);
        _tile_stored(3, to + TILE_ROWS * padded_dim + PANEL, padded_dim * 4);
    }
}

// One task: rows `begin` to `end` of `span`, the query heads of one key head.
inline void attend(
    const Attention& a, const LayerCache<uint16_t, true>& cache, const Span& span, const int32_t* table, int head,
    int begin, int end, const float* qkv, const float* cos, const float* sin, float* merged, std::vector<float>& scratch) {
    const Reach reach(a, span, begin, end);
    const int group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (end - begin) * group;
    const int width = (a.num_heads + 2 * a.num_kv_heads) * dim, keys = (reach.num_blocks + 1) / 2 * 2 * PANEL;
    constexpr int LINE = 64 / sizeof(float);
    scratch.resize((int64_t)UNIT_QUERIES * (dim + dim / 2 + keys + keys / 2) + LINE);
    float* scores = (float*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);
    float* sums = scores + UNIT_QUERIES * keys;
    uint16_t* weights = (uint16_t*)(sums + UNIT_QUERIES * dim);
    uint16_t* queries = weights + UNIT_QUERIES * keys;
    const int32_t* blocks = table + reach.first_block;
    const auto values = [&](int block) { return cache.value_block(blocks[block], head); };
    const auto keys_of = [&](int block) { return cache.key_block(blocks[std::min(block, reach.num_blocks - 1)], head); };

    for (int row = 0; row < rows; row += UNIT_QUERIES) {
        const int some = std::min(UNIT_QUERIES, rows - row);
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            const int64_t at = (int64_t)token * a.rotary_dim;
            float query[1024];
            copy_row(qkv + (int64_t)token * width + query_head * dim, query, dim);
            prepare_head(a, query_head, query, cos + at, sin + at);
            to_bf16(query, queries + r * dim, dim);
        }
        for (int block = 0; block < reach.num_blocks; block += 2) {
            const uint16_t* pair[2] = {keys_of(block), keys_of(block + 1)};
            for (int d = 0; d < dim; d += 2) {
                __builtin_prefetch(keys_of(block + 2) + d * PANEL);
                __builtin_prefetch(keys_of(block + 3) + d * PANEL);
            }
            float* to = scores + block * PANEL;
            some > TILE_ROWS ? score<true>(queries, pair, dim, to, keys) : score<false>(queries, pair, dim, to, keys);
        }
        float inverse[UNIT_QUERIES];
        for (int r = 0; r < some; r++) {
            const int seen = reach.seen_by(begin + (row + r) / group, span);
            const int first = a.window ? std::max(0, seen - a.window) : 0;
            const int shift = reach.first_block * PANEL;
            inverse[r] = 1.0f / softmax(a, scores + r * keys, first - shift, seen - shift, keys);
            to_bf16(scores + r * keys, weights + r * keys, keys);
        }
        for (int column = 0; column < dim; column += 2 * PANEL)
            some > TILE_ROWS ? weigh_by_unit<true>(weights, keys, values, reach.num_blocks, dim, column, sums)
                             : weigh_by_unit<false>(weights, keys, values, reach.num_blocks, dim, column, sums);
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            float* to = merged + ((int64_t)token * a.num_heads + query_head) * dim;
            for (int c = 0; c < dim; c++) to[c] = sums[r * dim + c] * inverse[r];
        }
    }
}

#else

inline void attend(
    const Attention&, const LayerCache<uint16_t, true>&, const Span&, const int32_t*, int, int, int, const float*,
    const float*, const float*, float*, std::vector<float>&) {}

#endif

}  // namespace orca
