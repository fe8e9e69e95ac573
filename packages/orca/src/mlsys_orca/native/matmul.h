// The matrix product under every operator: a few rows against a few panels, summed in the order of the input features.
//
// Each element of the product has one accumulator that runs over the features from first to last with fused products.
// That order is the same for one row and for a thousand, so a request's numbers do not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "weights.h"

namespace orca {

constexpr int MAX_ROWS = 6;  // of one call of `multiply`: 6 x 16 fill the registers of AVX2, 6 x 32 those of AVX-512
constexpr int PAIR_ROWS = LANES == 16 ? MAX_ROWS : 2;  // that may meet two panels at once: more would not fit the registers
constexpr int DIRECT_ROWS = 2 * MAX_ROWS;  // that read a panel as it is; more have it decoded first
constexpr int DIRECT_INT4_ROWS = 4;         // it takes more to decode
constexpr int NEAR_ROWS = LANES == 16 ? 12 : MAX_ROWS;  // of one call where panels are in the first-level cache: as
constexpr int NEAR_PANELS = LANES == 16 ? 2 : 1;         // many sums as registers allow beside weights
constexpr int PIECE = 384;  // input features at most: 24 KiB of NEAR_PANELS decoded panels
constexpr int NEAR_PIECE = PIECE / NEAR_PANELS;

// out[r][p * 16 + c] (+)= sum over k of a[r * stride + k] * panel p's (k, c); CONTINUES: the sums go on from `out`.
template <class Panel, int ROWS, int PANELS, bool CONTINUES>
inline void multiply(const float* a, int64_t stride, const Panel* panels, int depth, int group, float* out, int out_stride) {
    vf sums[ROWS][PANELS * VECS] = {};
    if constexpr (CONTINUES)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < PANELS * VECS; j++) sums[r][j] = load(out + r * out_stride + j * LANES);
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        typename Panel::Group shared[PANELS];
        for (int p = 0; p < PANELS; p++) shared[p] = panels[p].group(g);
        const int stop = std::min(depth, first + group);
#pragma GCC unroll 2
        for (int k = first; k < stop; k += Panel::STEP) {
            vf weights[PANELS][Panel::STEP][VECS];
            for (int p = 0; p < PANELS; p++) {
                panels[p].read(k, shared[p], weights[p]);
                if constexpr (!CONTINUES) panels[p].prefetch(k);
            }
            for (int step = 0; step < Panel::STEP; step++)
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const vf x = splat(a[r * stride + k + step]);
                    for (int j = 0; j < PANELS * VECS; j++)
                        sums[r][j] = fma(x, weights[j / VECS][step][j % VECS], sums[r][j]);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < PANELS * VECS; j++) store(out + r * out_stride + j * LANES, sums[r][j]);
}

// As `multiply` for 1 to NEAR_ROWS rows against NEAR_PANELS decoded panels.
template <bool CONTINUES, int ROWS = NEAR_ROWS>
inline void multiply_near(
    int rows, const float* a, int64_t stride, const NearPanel* panels, int depth, float* out, int out_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            return multiply<NearPanel, ROWS, NEAR_PANELS, CONTINUES>(a, stride, panels, depth, depth, out, out_stride);
        multiply_near<CONTINUES, ROWS - 1>(rows, a, stride, panels, depth, out, out_stride);
    }
}

// As `multiply` for 1 to MAX_ROWS rows, panel pairs where the registers allow it.
template <class Panel, bool CONTINUES>
inline void multiply_rows(
    int rows, const float* a, int64_t stride, const Panel* panels, int num_panels, int depth, int group, float* out,
    int out_stride) {
    for (int p = 0; p < num_panels;) {
        const Panel* at = panels + p;
        float* to = out + p * PANEL;
        const bool pair = p + 2 <= num_panels && rows <= PAIR_ROWS;
#define ORCA_ROWS(ROWS)                                                                                  \
    case ROWS:                                                                                           \
        if (pair)                                                                                        \
            multiply<Panel, ROWS, ROWS <= PAIR_ROWS ? 2 : 1, CONTINUES>(                        \
                a, stride, at, depth, group, to, out_stride);                                            \
        else                                                                                             \
            multiply<Panel, ROWS, 1, CONTINUES>(a, stride, at, depth, group, to, out_stride);            \
        break;
        switch (rows) { ORCA_ROWS(1) ORCA_ROWS(2) ORCA_ROWS(3) ORCA_ROWS(4) ORCA_ROWS(5) ORCA_ROWS(6) }
#undef ORCA_ROWS
        p += pair ? 2 : 1;
    }
}

// `rows` in groups of at most MOST that are as even as can be: work(first, how many).
template <int MOST = MAX_ROWS, class Work>
inline void in_groups(int rows, Work&& work) {
    const int groups = (rows + MOST - 1) / MOST;
    for (int g = 0, row = 0; g < groups; g++) {
        const int some = (rows - row + groups - g - 1) / (groups - g);
        work(row, some);
        row += some;
    }
}

// Decode a whole panel to fp32, [depth][16].
template <class Panel>
inline void decode(const Panel& panel, int depth, int group, float* out) {
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        const auto shared = panel.group(g);
        for (int k = first; k < std::min(depth, first + group); k += Panel::STEP) {
            vf rows[Panel::STEP][VECS];
            panel.read(k, shared, rows);
            for (int j = 0; j < Panel::STEP * VECS; j++)
                store(out + (int64_t)k * PANEL + j * LANES, rows[j / VECS][j % VECS]);
        }
    }
}

// `rows` rows against NUM_PANELS panels from `first`, into `sums` [rows][NUM_PANELS * 16]. `scratch` holds
// NEAR_PANELS * depth * 16 floats. Few rows read the panels as they are, from memory; many have them decoded once, and take them in pieces that
// stay in the first-level cache.
template <class Panel, int NUM_PANELS>
inline void multiply_tile(
    const Matrix& m, int first, int rows, const float* a, int64_t stride, float* scratch, float* sums) {
    constexpr int WIDTH = NUM_PANELS * PANEL;
    const int group = m.group ? m.group : m.depth;
    if (rows <= (std::is_same_v<Panel, Int4Panel> ? DIRECT_INT4_ROWS : DIRECT_ROWS)) {
        in_groups(rows, [&](int row, int some) {
            alignas(64) Panel panels[NUM_PANELS] = {Panel(m, first), Panel(m, first + NUM_PANELS - 1)};
            multiply_rows<Panel, false>(
                some, a + row * stride, stride, panels, NUM_PANELS, m.depth, group, sums + row * WIDTH, WIDTH);
        });
        return;
    }
    for (int p = 0; p < NUM_PANELS; p += NEAR_PANELS) {
        const float* decoded[NEAR_PANELS];
        for (int q = 0; q < NEAR_PANELS; q++) {
            float* own = scratch + (int64_t)q * m.depth * PANEL;
            if constexpr (std::is_same_v<Panel, F32Panel>) {
                decoded[q] = Panel(m, first + p + q).weights;
            } else {
                decode(Panel(m, first + p + q), m.depth, group, own);
                decoded[q] = own;
            }
        }
        const int pieces = (m.depth + NEAR_PIECE - 1) / NEAR_PIECE, piece = (m.depth + pieces - 1) / pieces;
        for (int k = 0; k < m.depth; k += piece) {
            const int some_depth = std::min(piece, m.depth - k);
            in_groups<NEAR_ROWS>(rows, [&](int row, int some) {
                if constexpr (std::is_same_v<Panel, F32Panel>)  // the piece after this one comes from memory meanwhile
                    for (const float* each : decoded) {
                        const float* soon = each + (int64_t)(k + piece) * PANEL;
                        for (int line = piece * row / rows; line < piece * (row + some) / rows; line++)
                            __builtin_prefetch(soon + line * PANEL, 0, 2);
                    }
                NearPanel panels[NEAR_PANELS];
                for (int q = 0; q < NEAR_PANELS; q++) panels[q].weights = decoded[q] + (int64_t)k * PANEL;
                const float* from = a + row * stride + k;
                float* to = sums + row * WIDTH + p * PANEL;
                if (k)
                    multiply_near<true>(some, from, stride, panels, some_depth, to, WIDTH);
                else
                    multiply_near<false>(some, from, stride, panels, some_depth, to, WIDTH);
            });
        }
    }
}

// As `multiply_tile` for pairs of bf16; `a` holds the rows in pairs, `stride` apart.
template <int ROWS>
inline void multiply_pairs(
    const Matrix& m, int first, const uint32_t* a, int64_t stride, int begin, int end, float* sums) {
    constexpr int NUM_PANELS = 2;
    const PairsPanel panels[NUM_PANELS] = {PairsPanel(m, first), PairsPanel(m, first + 1)};
    vf total[ROWS][NUM_PANELS * VECS] = {};
    if (begin)
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < NUM_PANELS * VECS; j++) total[r][j] = load(sums + (r * NUM_PANELS * VECS + j) * LANES);
    for (int pair = begin; pair < end; pair++) {
        vu weights[NUM_PANELS * VECS];
        for (int j = 0; j < NUM_PANELS * VECS; j++) weights[j] = panels[j / VECS].read(pair, j % VECS);
        for (int r = 0; r < ROWS; r++) {
            const vu x = (vu)splat_int((int32_t)a[r * stride + pair]);
            for (int j = 0; j < NUM_PANELS * VECS; j++) total[r][j] = add_pairs(total[r][j], x, weights[j]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < NUM_PANELS * VECS; j++) store(sums + (r * NUM_PANELS * VECS + j) * LANES, total[r][j]);
}

inline void multiply_tile_of_pairs(
    const Matrix& m, int first, int rows, const uint32_t* a, int64_t stride, float* sums) {
    const int pairs = m.depth / 2, pieces = (pairs + PIECE - 1) / PIECE, piece = (pairs + pieces - 1) / pieces;
    for (int begin = 0; begin < pairs; begin += piece) {
        const int end = std::min(pairs, begin + piece);
        in_groups(rows, [&](int row, int some) {
            const uint32_t* from = a + row * stride;
            float* to = sums + row * 2 * PANEL;
            switch (some) {
                case 1: multiply_pairs<1>(m, first, from, stride, begin, end, to); break;
                case 2: multiply_pairs<2>(m, first, from, stride, begin, end, to); break;
                case 3: multiply_pairs<3>(m, first, from, stride, begin, end, to); break;
                case 4: multiply_pairs<4>(m, first, from, stride, begin, end, to); break;
                case 5: multiply_pairs<5>(m, first, from, stride, begin, end, to); break;
                case 6: multiply_pairs<6>(m, first, from, stride, begin, end, to); break;
            }
        });
    }
}

}  // namespace orca
