// The matrix product under every operator: a few rows against a few panels, summed in the order of the input features.
//
// Each element of the product has one accumulator that runs over the features from first to last with fused products.
// That order is the same for one row and for a thousand, so a request's numbers do not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "weights.h"

namespace orca {

constexpr int MAX_ROWS = 6;  // of one call of `multiply`: 6 x 16 fill the registers of AVX2, 6 x 32 those of AVX-512
constexpr int WIDE = LANES == 16 ? 2 : 1;  // panels of one call at MAX_ROWS
constexpr int AHEAD = 32;                  // rows of a panel that are asked of memory early

// out[r][p * 16 + c] = sum over k of a[r * stride + k] * panel p's (k, c). `out` is [ROWS][PANELS * 16].
template <class Panel, int ROWS, int PANELS, bool FROM_MEMORY>
inline void multiply(const float* a, int64_t stride, Panel* panels, int depth, int group, float* out, int out_stride) {
    vf sums[ROWS][PANELS * VECS] = {};
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        for (int p = 0; p < PANELS; p++) panels[p].begin(g);
        const int stop = std::min(depth, first + group);
#pragma GCC unroll 2
        for (int k = first; k < stop; k++) {
            vf weights[PANELS * VECS];
            for (int p = 0; p < PANELS; p++) {
                panels[p].read(k, weights + p * VECS);
                if (FROM_MEMORY) panels[p].prefetch(k + AHEAD);
            }
            for (int r = 0; r < ROWS; r++) {
                vf x = splat(a[r * stride + k]);
                for (int j = 0; j < PANELS * VECS; j++) sums[r][j] = fma(x, weights[j], sums[r][j]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < PANELS * VECS; j++) store(out + r * out_stride + j * LANES, sums[r][j]);
}

// As `multiply` for 1 to MAX_ROWS rows, panel pairs where the registers allow it.
template <class Panel, bool FROM_MEMORY>
inline void multiply_rows(
    int rows, const float* a, int64_t stride, Panel* panels, int num_panels, int depth, int group, float* out) {
    const int out_stride = num_panels * PANEL;
    for (int p = 0; p < num_panels;) {
        Panel* at = panels + p;
        float* to = out + p * PANEL;
        const bool pair = p + 2 <= num_panels && rows <= (LANES == 16 ? MAX_ROWS : 3);
#define ORCA_ROWS(ROWS)                                                                                  \
    case ROWS:                                                                                           \
        if (pair)                                                                                        \
            multiply<Panel, ROWS, (ROWS <= 3 || LANES == 16) ? 2 : 1, FROM_MEMORY>(                      \
                a, stride, at, depth, group, to, out_stride);                                            \
        else                                                                                             \
            multiply<Panel, ROWS, 1, FROM_MEMORY>(a, stride, at, depth, group, to, out_stride);          \
        break;
        switch (rows) { ORCA_ROWS(1) ORCA_ROWS(2) ORCA_ROWS(3) ORCA_ROWS(4) ORCA_ROWS(5) ORCA_ROWS(6) }
#undef ORCA_ROWS
        p += pair ? 2 : 1;
    }
}

// Decode a whole panel to fp32, [depth][16].
template <class Panel>
inline void decode(Panel panel, int depth, int group, float* out) {
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        panel.begin(g);
        for (int k = first; k < std::min(depth, first + group); k++) {
            vf row[VECS];
            panel.read(k, row);
            for (int v = 0; v < VECS; v++) store(out + (int64_t)k * PANEL + v * LANES, row[v]);
        }
    }
}

// Any number of rows against `num_panels` panels from `first`; `finish(row, rows, sums)` takes each group's products,
// [rows][num_panels * 16]. `scratch` holds num_panels * depth * 16 floats.
template <class Panel, int NUM_PANELS, class Finish>
inline void multiply_tile(
    const Matrix& m, int first, int rows, const float* a, int64_t stride, float* scratch, Finish&& finish) {
    alignas(64) float sums[MAX_ROWS * NUM_PANELS * PANEL];
    const int group = m.group ? m.group : m.depth;
    if (rows <= MAX_ROWS) {
        alignas(64) Panel panels[NUM_PANELS] = {Panel(m, first), Panel(m, first + (NUM_PANELS > 1))};
        multiply_rows<Panel, true>(rows, a, stride, panels, NUM_PANELS, m.depth, group, sums);
        finish(0, rows, sums);
        return;
    }
    const float* decoded[NUM_PANELS];
    for (int p = 0; p < NUM_PANELS; p++) {
        if constexpr (std::is_same_v<Panel, F32Panel>) {
            decoded[p] = Panel(m, first + p).weights;
        } else {
            float* to = scratch + (int64_t)p * m.depth * PANEL;
            decode(Panel(m, first + p), m.depth, group, to);
            decoded[p] = to;
        }
    }
    for (int row = 0; row < rows; row += MAX_ROWS) {
        const int some = std::min(MAX_ROWS, rows - row);
        F32Panel panels[NUM_PANELS] = {F32Panel(decoded[0]), F32Panel(decoded[NUM_PANELS - 1])};
        multiply_rows<F32Panel, false>(some, a + row * stride, stride, panels, NUM_PANELS, m.depth, m.depth, sums);
        finish(row, some, sums);
    }
}

}  // namespace orca
