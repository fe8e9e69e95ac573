// The matrix product under every operator: a few rows against a few panels, summed in the order of the input features.
//
// Each element of the product has one accumulator that runs over the features from first to last with fused products.
// That order is the same for one row and for a thousand, so a request's numbers do not depend on the rows beside it.
#pragma once

#include <algorithm>

#include <mlsys/gemm.h>

#include "weights.h"

namespace orca {

constexpr int MAX_ROWS = 6;  // of one call of `multiply`: 6 x 16 fill the registers of AVX2, 6 x 32 those of AVX-512
constexpr int PAIR_ROWS = LANES == 16 ? MAX_ROWS : 2;  // that may meet two panels at once: more would not fit the registers
constexpr int DIRECT_ROWS = 2 * MAX_ROWS;  // that read a panel as it is; more have it decoded first
constexpr int DIRECT_INT4_ROWS = 4;         // it takes more to decode
constexpr int NEAR_ROWS = LANES == 16 ? 12 : MAX_ROWS;  // of one call where panels are in the first-level cache: as
constexpr int NEAR_PANELS = LANES == 16 ? 2 : 1;         // many sums as registers allow beside weights
constexpr int PIECE = 256 / NEAR_PANELS;  // features, or pairs, that many rows meet at once: 16 KiB of panels, half a cache

// ROWS rows of a matrix, read column by column through as few registers as can be: the address of every fourth row, one
// stride and three. Left to itself a compiler takes a register for each row, and has none left for the sums.
template <class T, int ROWS>
class Column {
  public:
    Column(const T* a, int64_t stride) : once(stride * sizeof(T)), thrice(3 * once) {
        for (int i = 0; i < FOURTHS; i++) fourth[i] = (const char*)(a + 4 * i * stride);
    }
    // To be called in each step, lest the sums of address and stride are kept from step to step.
    void hide() { asm("" : "+r"(once), "+r"(thrice)); }
    T at(int r, int64_t k) const {
        const int64_t rest = r % 4 == 3 ? thrice : r % 4 * once;
        return *(const T*)(fourth[r / 4] + rest + k * (int64_t)sizeof(T));
    }

  private:
    static constexpr int FOURTHS = (ROWS + 3) / 4;
    const char* fourth[FOURTHS];
    int64_t once, thrice;
};

// out[r][p * 16 + c] (+)= sum over k of a[r * stride + k] * panel p's (k, c); CONTINUES: the sums go on from `out`.
template <class Panel, int ROWS, int PANELS, bool CONTINUES>
inline void multiply(const float* a, int64_t stride, const Panel* panels, int depth, int group, float* out, int out_stride) {
    vf sums[ROWS][PANELS * VECS] = {};
    if constexpr (CONTINUES)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < PANELS * VECS; j++) sums[r][j] = load(out + r * out_stride + j * LANES);
    Column<float, ROWS> column(a, stride);
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        typename Panel::Group shared[PANELS];
        for (int p = 0; p < PANELS; p++) shared[p] = panels[p].group(g);
        const int stop = std::min(depth, first + group);
#pragma GCC unroll 2
        for (int k = first; k < stop; k += Panel::STEP) {
            column.hide();
            vf weights[PANELS][Panel::STEP][VECS];
            for (int p = 0; p < PANELS; p++) {
                panels[p].read(k, shared[p], weights[p]);
                panels[p].prefetch(k);
            }
            for (int step = 0; step < Panel::STEP; step++)
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const vf x = splat(column.at(r, k + step));
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

// Decode a whole panel to fp32, [depth][16].
template <class Panel>
inline void decode(const Panel& panel, int depth, int group, float* out) {
    for (int first = 0, g = 0; first < depth; first += group, g++) {
        const auto shared = panel.group(g);
        for (int k = first; k < std::min(depth, first + group); k += Panel::STEP) {
            vf rows[Panel::STEP][VECS];
            panel.read(k, shared, rows);
            panel.prefetch(k);
            for (int j = 0; j < Panel::STEP * VECS; j++)
                store(out + (int64_t)k * PANEL + j * LANES, rows[j / VECS][j % VECS]);
        }
    }
}

// `rows` rows against NUM_PANELS panels from `first`, into `sums` [rows][NUM_PANELS * 16]. `scratch` holds
// NEAR_PANELS * depth * 16 floats. Few rows read the panels as they are, from memory; many have them decoded once, and take them in pieces that
// stay in the first-level cache. `begins(row, some)` is called before `some` rows are first multiplied.
template <class Panel, int NUM_PANELS, class Begins>
inline void multiply_tile(
    const Matrix& m, int first, int rows, const float* a, int64_t stride, float* scratch, float* sums, Begins&& begins) {
    constexpr int WIDTH = NUM_PANELS * PANEL;
    const int group = m.group ? m.group : m.depth;
    if (rows <= (std::is_same_v<Panel, Int4Panel> ? DIRECT_INT4_ROWS : DIRECT_ROWS)) {
        for_row_groups(rows, MAX_ROWS, [&](int row, int some) {
            alignas(64) Panel panels[NUM_PANELS] = {Panel(m, first), Panel(m, first + NUM_PANELS - 1)};
            begins(row, some);
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
        const int pieces = (m.depth + PIECE - 1) / PIECE, piece = (m.depth + pieces - 1) / pieces;
        for (int k = 0; k < m.depth; k += piece) {
            const int some_depth = std::min(piece, m.depth - k);
            for_row_groups(rows, NEAR_ROWS, [&](int row, int some) {
                if (!k && !p) begins(row, some);
                NearPanel panels[NEAR_PANELS];
                for (int q = 0; q < NEAR_PANELS; q++) {
                    panels[q].weights = decoded[q] + (int64_t)k * PANEL;
                    // The first rows wait for memory themselves; while the others are multiplied, the next tile comes.
                    const bool asks = row && std::is_same_v<Panel, F32Panel>;
                    panels[q].soon = panels[q].weights + (asks ? (int64_t)NEAR_PANELS * m.depth * PANEL : 0);
                }
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

// sums[r][j] += pair `pair` of row r * columns[j].
template <int ROWS, int WIDE>
inline void add_pair_of_rows(const Column<uint32_t, ROWS>& rows, int64_t pair, const vu (&columns)[WIDE], vf (&sums)[ROWS][WIDE]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const vu x = (vu)splat_int((int32_t)rows.at(r, pair));
        for (int j = 0; j < WIDE; j++) sums[r][j] = add_pairs(sums[r][j], x, columns[j]);
    }
}

template <int ROWS, int WIDE>
inline void store_rows(const vf (&sums)[ROWS][WIDE], float* out, int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDE; j++) store(out + r * stride + j * LANES, sums[r][j]);
}

// Pairs `begin` to `end` of 1 to NEAR_ROWS rows against two panels from `first`; from the second piece on the sums go on.
// Weights that lie `ahead` further on are prefetched.
template <int ROWS = NEAR_ROWS>
inline void multiply_pairs(
    int rows, const Matrix& m, int first, const uint32_t* a, int64_t stride, int begin, int end, int64_t ahead, float* sums) {
    constexpr int NUM_PANELS = 2, WIDE = NUM_PANELS * VECS;
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_pairs<ROWS - 1>(rows, m, first, a, stride, begin, end, ahead, sums);
    const PairsPanel panels[NUM_PANELS] = {PairsPanel(m, first), PairsPanel(m, first + 1)};
    vf total[ROWS][WIDE] = {};
    if (begin)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < WIDE; j++) total[r][j] = load(sums + (r * WIDE + j) * LANES);
    Column<uint32_t, ROWS> column(a, stride);
    for (int pair = begin; pair < end; pair++) {
        column.hide();
        vu weights[WIDE];
        for (int p = 0; p < NUM_PANELS; p++) panels[p].prefetch(pair, ahead);
        for (int j = 0; j < WIDE; j++) weights[j] = panels[j / VECS].read(pair, j % VECS);
        add_pair_of_rows(column, pair, weights, total);
    }
    store_rows(total, sums, WIDE * LANES);
}

// 1 to NEAR_ROWS rows in pairs against two panels of codes from `first`, which are decoded on the way.
template <class Panel, int ROWS = NEAR_ROWS>
inline void multiply_quantised(int rows, const Matrix& m, int first, const uint32_t* a, int64_t stride, float* sums) {
    constexpr int NUM_PANELS = 2, WIDE = NUM_PANELS * VECS;
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_quantised<Panel, ROWS - 1>(rows, m, first, a, stride, sums);
    const Panel panels[NUM_PANELS] = {Panel(m, first), Panel(m, first + 1)};
    vf total[ROWS][WIDE] = {};
    Column<uint32_t, ROWS> column(a, stride);
    const int pairs = m.group / 2;  // that share a scale
    for (int g = 0; g < m.depth / m.group; g++) {
        const typename Panel::Group shared[NUM_PANELS] = {panels[0].group(g), panels[1].group(g)};
        for (int64_t pair = g * pairs; pair < (g + 1) * pairs; pair++) {
            column.hide();
            vu weights[WIDE];
            for (int p = 0; p < NUM_PANELS; p++) {
                panels[p].prefetch(2 * pair);
                weights[p * VECS] = read_pair(panels[p], 2 * pair, shared[p]);
            }
            add_pair_of_rows(column, pair, weights, total);
        }
    }
    store_rows(total, sums, WIDE * LANES);
}

// As `multiply_tile` for pairs of bf16; `a` holds the rows in pairs, `stride` apart. `next`: how many weights further on
// that lies which is read after this tile.
template <class Begins>
inline void multiply_tile_of_pairs(
    const Matrix& m, int first, int rows, const uint32_t* a, int64_t stride, int64_t next, float* sums, Begins&& begins) {
    const int pairs = m.depth / 2, pieces = (pairs + PIECE - 1) / PIECE, piece = (pairs + pieces - 1) / pieces;
    for (int begin = 0; begin < pairs; begin += piece) {
        const int end = std::min(pairs, begin + piece);
        for_row_groups(rows, NEAR_ROWS, [&](int row, int some) {
            if (!begin) begins(row, some);
            const int64_t ahead = row ? next : AHEAD / 2;  // as in `multiply_tile`
            multiply_pairs(some, m, first, a + row * stride, stride, begin, end, ahead, sums + row * 2 * PANEL);
        });
    }
}

// As `multiply_tile_of_pairs` for codes. `scratch` holds 2 * depth * 16 numbers in bf16.
template <class Panel, class Begins>
inline void multiply_tile_quantised(
    const Matrix& m, int first, int rows, const uint32_t* a, int64_t stride, uint16_t* scratch, float* sums, Begins&& begins) {
    if (rows <= NEAR_ROWS) {
        begins(0, rows);
        return multiply_quantised<Panel>(rows, m, first, a, stride, sums);
    }
    for (int p = 0; p < 2; p++) decode_pairs(Panel(m, first + p), 0, m.depth, m.group, scratch + (int64_t)p * m.depth * PANEL);
    Matrix decoded = m;
    decoded.codes = scratch;
    multiply_tile_of_pairs(decoded, 0, rows, a, stride, 0, sums, begins);
}

}  // namespace orca
