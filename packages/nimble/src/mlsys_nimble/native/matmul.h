// The product under convolutions and linears: a few rows, each found by pointers, against one packed panel of weights.
//
// A *panel* is 1 to 3 vectors of output columns; the weights of one input feature stand side by side in it. A row is a
// pointer for each *tap* of a window, to `depth` features there; a plain product has one tap. Tiles are settled when a
// kernel is made, so that an element's value does not depend on how the units are cut.
#pragma once

#include <utility>

#include "epilogue.h"

namespace nimble {

constexpr int MAX_VECS = 3;                     // of a panel
constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // of sums; the rest holds weights and a feature
constexpr int max_rows(int vecs) { return REGISTERS / vecs; }
constexpr int MAX_ROWS = REGISTERS;

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
    const float* weights;      // of the part, [taps][depth][panel]
    int64_t step;              // from one feature's weights to the next: the panel's width, where they are packed
    const float* bias;         // [panel]
    float* sums;               // between parts, [rows][panel]
    float* out;
    int64_t out_stride;
    const float* residual;
    int64_t residual_stride;
    int width;  // columns to store, at most the panel's
};

template <int ROWS, int VECS>
__attribute__((noinline)) void store_slowly(const Finish& finish, const Tile& tile, const float* sums) {
    for (int r = 0; r < ROWS; r++)
        finish.row(
            sums + r * VECS * LANES, tile.residual + r * tile.residual_stride, tile.out + r * tile.out_stride, tile.width);
}

template <int ROWS, int VECS>
__attribute__((noinline)) void multiply(const Part& part, const Tile& tile, const Finish& finish) {
    constexpr int PANEL = VECS * LANES;
    // Few sums would wait for each other: they are kept several times over, for features in turn, and added at the end.
    constexpr int COPIES = ROWS * VECS >= 8 ? 1 : ROWS * VECS >= 4 ? 2 : 4;
    vf sums[COPIES][ROWS][VECS] = {};
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++)
            if (part.is_first) sums[0][r][v] = load(tile.bias + v * LANES);

    const float* weights = tile.weights;
    for (int tap = part.first_tap; tap < part.stop_tap; tap++) {
        const float* rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = tile.rows[r * tile.taps + tap] + part.first;
        int k = 0;
        for (; k + COPIES <= part.depth; k += COPIES)
            for (int c = 0; c < COPIES; c++) {
                vf w[VECS];
                for (int v = 0; v < VECS; v++) w[v] = load(weights + v * LANES);
                for (int r = 0; r < ROWS; r++) {
                    const vf x = splat(rows[r][k + c]);
                    for (int v = 0; v < VECS; v++) sums[c][r][v] = fma(x, w[v], sums[c][r][v]);
                }
                weights += tile.step;
            }
        for (; COPIES > 1 && k < part.depth; k++) {
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECS; v++)
                    sums[0][r][v] = fma(splat(rows[r][k]), load(weights + v * LANES), sums[0][r][v]);
            weights += tile.step;
        }
    }
    for (int c = 1; c < COPIES; c++)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++) sums[0][r][v] += sums[c][r][v];
    if (!part.is_first)  // parts are added whole: a long sum rounds less
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++) sums[0][r][v] += load(tile.sums + r * PANEL + v * LANES);

    if (part.is_last && finish.is_plain && tile.width == PANEL) {
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++) {
                vf y = sums[0][r][v];
                if (finish.has_residual) y += load(tile.residual + r * tile.residual_stride + v * LANES);
                store(tile.out + r * tile.out_stride + v * LANES, finish.clamp(y));
            }
        return;
    }
    alignas(64) float kept[ROWS * PANEL];
    float* to = part.is_last ? kept : tile.sums;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(to + r * PANEL + v * LANES, sums[0][r][v]);
    if (part.is_last) store_slowly<ROWS, VECS>(finish, tile, kept);
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

}  // namespace nimble
