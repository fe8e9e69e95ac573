// The two GEMMs of attention over bf16 pairs, by AMX.
#pragma once

#include "attention.h"
#include "amx.h"

namespace orca {

// Whether heads of that size are multiplied by AMX.
inline bool attends_by_amx(int head_dim) { return has_amx() && head_dim % AMX_K == 0; }

#if ORCA_HAS_AMX

// One step of a GEMM into the four registers of sums, ROWS x (4 / ROWS): `left(r)` loads register LEFT with rows,
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
    const auto at = [&](int sum) { return to + sum / (4 / ROWS) * AMX_TILE_ROWS * stride + sum % (4 / ROWS) * PANEL; };
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

// Prefetch a block into the second-level cache.
inline void prefetch(const uint16_t* block, int dim) {
    for (int d = 0; d < dim; d += 2) __builtin_prefetch(block + d * PANEL, 0, 2);
}

// scores[r][key] = queries r . key, for ROWS tiles of rows [.., dim] and 4 / ROWS blocks of keys.
template <int ROWS, class Keys>
inline void score_tiles(const uint16_t* queries, Keys&& keys, int dim, float* scores, int64_t stride) {
    clear_sums();
    const uint16_t* blocks[4 / ROWS];
    for (int c = 0; c < 4 / ROWS; c++) blocks[c] = keys(c);
    for (int d = 0; d < dim; d += AMX_K) {
        const auto left = [&](int r) { _tile_loadd(4, queries + r * AMX_TILE_ROWS * dim + d, dim * sizeof(uint16_t)); };
        const auto right = [&](int c) { _tile_loadd(5, blocks[c] + d * PANEL, 64); };
        ORCA_ADD_STEP(ROWS, 4, 5, left, right)
    }
    store_sums<ROWS>(scores, stride);
}

// out[r][c] = sum over all blocks of weights[r][key] * value(key, c), for ROWS tiles of rows and 4 / ROWS of columns.
template <int ROWS, class Values>
inline void weigh_tiles(
    const uint16_t* weights, int64_t stride, Values&& values, int num_blocks, int dim, int column, float* out) {
    clear_sums();
    for (int block = 0; block < num_blocks; block++) {
        const uint16_t* w = weights + block * PANEL;
        const uint16_t* v = values(block) + 2 * column;
        if (column == 0) prefetch(values(std::min(block + 3, num_blocks - 1)), dim);
        const auto left = [&](int r) { _tile_loadd(6, w + r * AMX_TILE_ROWS * stride, stride * sizeof(uint16_t)); };
        const auto right = [&](int c) { _tile_loadd(7, v + c * 2 * PANEL, dim * 2 * sizeof(uint16_t)); };
        ORCA_ADD_STEP(ROWS, 6, 7, left, right)
    }
    store_sums<ROWS>(out + column, dim);
}
#undef ORCA_ADD_STEP

// The two GEMMs as attend() wants them.
struct ByAmx {
    static constexpr int ROWS = AMX_MR;
    using Cache = LayerCache<uint16_t, true>;
    using Read = Blocks<uint16_t, true>;
    using Operand = uint16_t;

    static void score(const Read& blocks, const uint16_t* queries, int rows, int dim, float* scores, int64_t stride) {
        const bool is_few = rows <= AMX_TILE_ROWS;
        const int count = is_few ? 4 : 2;
        for (int block = 0; block < blocks.count; block += count) {
            const auto from = [&](int c) { return blocks.keys(block + c); };
            for (int c = 0; c < count; c++) prefetch(blocks.keys(block + count + c), dim);
            (is_few ? score_tiles<1, decltype(from)&> : score_tiles<2, decltype(from)&>)(queries, from, dim, scores + block * PANEL, stride);
        }
    }

    static void weigh(const Read& blocks, const uint16_t* weights, int64_t stride, int rows, int, int dim, float* out) {
        const auto values = [&](int block) { return blocks.values(block); };
        for (int column = 0; column < dim;) {
            const bool is_wide = rows <= AMX_TILE_ROWS && column + 4 * PANEL <= dim;
            (is_wide ? weigh_tiles<1, decltype(values)&> : weigh_tiles<2, decltype(values)&>)(
                weights, stride, values, blocks.count, dim, column, out);
            column += (is_wide ? 4 : 2) * PANEL;
        }
    }
};

#endif

}  // namespace orca
