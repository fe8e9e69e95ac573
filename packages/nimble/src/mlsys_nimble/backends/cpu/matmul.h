// The product under convolutions and linears: a few rows, each found by pointers, against one packed panel of weights.
//
// A *panel* is 1 to 3 vectors of output columns; the weights of one input feature stand side by side in it. A row is a
// pointer for each *tap* of a window, to `depth` features there; a plain product has one tap. Tiles are settled when a
// kernel is made, so that an element's value does not depend on how the units are cut.
#pragma once

#include <mlsys/gemm.h>

#include "weight.h"

namespace nimble {

constexpr int MAX_VECS = 3;                     // of a panel
constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // of sums; the rest holds weights and a feature
constexpr int max_rows(int vecs) { return REGISTERS / vecs; }
constexpr int MAX_ROWS = REGISTERS;
// Weights from beyond the second-level cache are prefetched while others are multiplied: here with every feature, since many
// requests at once would hold up the loads behind them; where vectors are shorter, by the caller, between tiles.
constexpr bool PREFETCHES = LANES == 16;

// A part of the sum: taps [first_tap, stop_tap), features [first, first + depth) of each.
struct Part {
    int first_tap, stop_tap;
    int first, depth;
    bool is_first, is_last;
};

// Where a tile of rows comes from and goes to.
struct Tile {
    const float* const* rows;  // row r's tap t is rows[r * taps + t]
    int64_t taps;
    const Weight* weights;     // of the part, [taps][depth][panel]
    int64_t step;              // from one feature's weights to the next: the panel's width, where they are packed
    const float* bias;         // [panel]
    float* sums;               // between parts, [rows][panel]
    float* out;
    int64_t out_stride;
    const float* residual;
    int64_t residual_stride;
    int width;  // columns to store, at most the panel's
    const char* soon = nullptr;  // PREFETCHES: the weights to ask for, and how many bytes of them with each feature
    int64_t prefetch_step_nbytes = 0;
};

template <int ROWS, int VECS>
__attribute__((noinline)) void multiply(const Part& part, const Tile& tile, const Finish& finish) {
    constexpr int PANEL = VECS * LANES, SUMS = ROWS * VECS;
    // Few sums would wait for each other: they are kept several times over, for features in turn, and added at the end.
    constexpr int COPIES = SUMS >= 8 ? 1 : SUMS >= 4 ? 2 : 4;
    vf sums[COPIES * SUMS];
    unroll<COPIES * SUMS>([&](auto i) MLSYS_INLINE { sums[i] = vf{}; });
    if (part.is_first) unroll<SUMS>([&](auto i) MLSYS_INLINE { sums[i] = load(tile.bias + i % VECS * LANES); });

    const Weight* weights = tile.weights;
    const int64_t step = tile.step;
    const char* soon = tile.soon ? tile.soon : (const char*)weights;
    for (int tap = part.first_tap; tap < part.stop_tap; tap++, weights += part.depth * step) {
        const float* rows[ROWS];
        unroll<ROWS>([&](auto r) MLSYS_INLINE { rows[r] = tile.rows[r * tile.taps + tap] + part.first; });
        multiply_add<ROWS, VECS, COPIES>(
            sums, part.depth, [&](auto r, int64_t k) MLSYS_INLINE { return rows[r][k]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(weights + k * step + v * LANES); },
            [&]() MLSYS_INLINE {
                if constexpr (PREFETCHES) __builtin_prefetch(soon, 0, 2), soon += tile.prefetch_step_nbytes;
            });
    }
    add_copies<COPIES>(sums);
    if (!part.is_first)  // parts are added whole: a long sum rounds less
        unroll<SUMS>([&](auto i) MLSYS_INLINE { sums[i] += load(tile.sums + i * LANES); });

    if (part.is_last && finish.is_plain && tile.width == PANEL) {
        const vf low = splat(finish.low), high = splat(finish.high);
        if (finish.has_residual)
            unroll<SUMS>([&](auto i) MLSYS_INLINE {
                sums[i] += load(tile.residual + i / VECS * tile.residual_stride + i % VECS * LANES);
            });
        unroll<SUMS>([&](auto i) MLSYS_INLINE {
            store(tile.out + i / VECS * tile.out_stride + i % VECS * LANES, smaller(high, larger(low, sums[i])));
        });
        return;
    }
    alignas(64) float kept[SUMS * LANES];
    float* to = part.is_last ? kept : tile.sums;
    unroll<SUMS>([&](auto i) MLSYS_INLINE { store(to + i * LANES, sums[i]); });
    if (part.is_last)
        finish.rows(kept, PANEL, ROWS, tile.residual, tile.residual_stride, tile.out, tile.out_stride, tile.width);
}

using Multiply = void (*)(const Part&, const Tile&, const Finish&);

template <int VECS, int... ROWS>
constexpr Multiply multiply_of(int rows, std::integer_sequence<int, ROWS...>) {
    constexpr Multiply table[] = {multiply<ROWS + 1, VECS>...};
    return table[rows - 1];
}

// `rows` is 1 to max_rows(vecs).
inline Multiply multiply_of(int rows, int vecs) {
    switch (vecs) {
        case 1: return multiply_of<1>(rows, std::make_integer_sequence<int, max_rows(1)>());
        case 2: return multiply_of<2>(rows, std::make_integer_sequence<int, max_rows(2)>());
        default: return multiply_of<3>(rows, std::make_integer_sequence<int, max_rows(3)>());
    }
}

// A panel's bytes of one feature, shared among `groups` of rows.
inline int64_t prefetch_step(int vecs, int groups) { return (vecs * LANES * (int64_t)sizeof(Weight) + groups - 1) / groups; }

// The product of `rows` rows with one panel, in groups as even as can be. Meanwhile as many weights are prefetched from
// `tile.soon` on, if that is not null.
inline void multiply_rows(const float* const* rows, int count, int64_t depth, Tile tile, const Finish& finish, int wide) {
    const Part part{0, 1, 0, (int)depth, true, true};
    const int limit = max_rows(wide), groups = (count + limit - 1) / limit;
    if (tile.soon) tile.prefetch_step_nbytes = prefetch_step(wide, groups);
    const Tile all = tile;
    in_groups(count, limit, [&](int row, int some) {
        tile.rows = rows + row;
        tile.out = all.out + row * tile.out_stride;
        if (tile.residual) tile.residual = all.residual + row * tile.residual_stride;
        multiply_of(some, wide)(part, tile, finish);
        if (tile.soon) tile.soon += depth * tile.prefetch_step_nbytes;
    });
}

}  // namespace nimble
