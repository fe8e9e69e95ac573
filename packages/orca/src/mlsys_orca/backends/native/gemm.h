// The GEMM under every operator, C [M][N] = A [M][K] times panels of B: a few rows and a few panels at a time.
//
// Each element of C has one accumulator that runs over the K input features from first to last with fused products; where
// ranks may share the features, one for each slice of them, and a tree that adds the slices.
// That order is the same for one row and for a thousand, so a request's numbers do not depend on the rows beside it.
#pragma once

#include <algorithm>

#include <mlsys/gemm.h>

#include "weights.h"

namespace orca {

constexpr int MAX_MR = 6;  // of one call of `multiply`: 6 x 16 fill the registers of AVX2, 6 x 32 those of AVX-512
constexpr int PAIR_MR = LANES == 16 ? MAX_MR : 2;  // that may meet two panels at once: more would not fit the registers
constexpr int DIRECT_ROWS = 2 * MAX_MR;  // that read a panel as it is; more have it decoded first
constexpr int DIRECT_INT4_ROWS = 4;      // pairs cost more to decode
constexpr int NEAR_MR = LANES == 16 ? 12 : MAX_MR;  // of one call where panels are in the first-level cache: as
constexpr int NEAR_PANELS = LANES == 16 ? 2 : 1;    // many sums as registers allow beside weights
constexpr int KC = 256 / NEAR_PANELS;  // features, or pairs, that many rows meet at once: 16 KiB of panels, half a cache

// MR rows of a matrix, read column by column through as few registers as can be: the address of every fourth row, lda
// and three times lda. Left to itself a compiler takes a register for each row, and has none left for the sums.
template <class T, int MR>
class RowsOfA {
  public:
    RowsOfA(const T* a, int64_t lda) : once(lda * sizeof(T)), thrice(3 * once) {
        for (int i = 0; i < FOURTHS; i++) fourth[i] = (const char*)(a + 4 * i * lda);
    }
    // To be called in each step, lest the sums of address and stride are kept from step to step.
    void hide() { asm("" : "+r"(once), "+r"(thrice)); }
    T at(int r, int64_t k) const {
        const int64_t rest = r % 4 == 3 ? thrice : r % 4 * once;
        return *(const T*)(fourth[r / 4] + rest + k * (int64_t)sizeof(T));
    }

  private:
    static constexpr int FOURTHS = (MR + 3) / 4;
    const char* fourth[FOURTHS];
    int64_t once, thrice;
};

// c[r][p * 16 + n] (+)= sum over k of a[r * lda + k] * panel p's (k, n); CONTINUES: the sums go on from `c`.
template <class Panel, int MR, int PANELS, bool CONTINUES>
inline void multiply(const float* a, int64_t lda, const Panel* panels, int K, int group_size, float* c, int ldc) {
    vf sums[MR][PANELS * VECS] = {};
    if constexpr (CONTINUES)
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < PANELS * VECS; j++) sums[r][j] = load(c + r * ldc + j * LANES);
    RowsOfA<float, MR> rows(a, lda);
    for (int first = 0, g = 0; first < K; first += group_size, g++) {
        typename Panel::Group shared[PANELS];
        for (int p = 0; p < PANELS; p++) shared[p] = panels[p].group(g);
        const int stop = std::min(K, first + group_size);
#pragma GCC unroll 2
        for (int k = first; k < stop; k += Panel::STEP) {
            rows.hide();
            vf weights[PANELS][Panel::STEP][VECS];
            for (int p = 0; p < PANELS; p++) {
                panels[p].read(k, shared[p], weights[p]);
                panels[p].prefetch(k);
            }
            for (int step = 0; step < Panel::STEP; step++)
#pragma GCC unroll 16
                for (int r = 0; r < MR; r++) {
                    const vf x = splat(rows.at(r, k + step));
                    for (int j = 0; j < PANELS * VECS; j++)
                        sums[r][j] = fma(x, weights[j / VECS][step][j % VECS], sums[r][j]);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < PANELS * VECS; j++) store(c + r * ldc + j * LANES, sums[r][j]);
}

// As `multiply` for 1 to NEAR_MR rows against NEAR_PANELS decoded panels.
template <bool CONTINUES, int MR = NEAR_MR>
inline void multiply_near(int mr, const float* a, int64_t lda, const NearPanel* panels, int K, float* c, int ldc) {
    if constexpr (MR > 0) {
        if (mr == MR) return multiply<NearPanel, MR, NEAR_PANELS, CONTINUES>(a, lda, panels, K, K, c, ldc);
        multiply_near<CONTINUES, MR - 1>(mr, a, lda, panels, K, c, ldc);
    }
}

// As `multiply` for 1 to MAX_MR rows, panel pairs where the registers allow it.
template <class Panel, bool CONTINUES>
inline void multiply_rows(
    int mr, const float* a, int64_t lda, const Panel* panels, int num_panels, int K, int group_size, float* c, int ldc) {
    for (int p = 0; p < num_panels;) {
        const Panel* at = panels + p;
        float* to = c + p * PANEL;
        const bool pair = p + 2 <= num_panels && mr <= PAIR_MR;
#define ORCA_MR(MR)                                                                                               \
    case MR:                                                                                                      \
        if (pair)                                                                                                 \
            multiply<Panel, MR, MR <= PAIR_MR ? 2 : 1, CONTINUES>(a, lda, at, K, group_size, to, ldc);            \
        else                                                                                                      \
            multiply<Panel, MR, 1, CONTINUES>(a, lda, at, K, group_size, to, ldc);                                \
        break;
        switch (mr) { ORCA_MR(1) ORCA_MR(2) ORCA_MR(3) ORCA_MR(4) ORCA_MR(5) ORCA_MR(6) }
#undef ORCA_MR
        p += pair ? 2 : 1;
    }
}

// Decode a whole panel to fp32, [K][16].
template <class Panel>
inline void decode(const Panel& panel, int K, int group_size, float* out) {
    for (int first = 0, g = 0; first < K; first += group_size, g++) {
        const auto shared = panel.group(g);
        for (int k = first; k < std::min(K, first + group_size); k += Panel::STEP) {
            vf rows[Panel::STEP][VECS];
            panel.read(k, shared, rows);
            panel.prefetch(k);
            for (int j = 0; j < Panel::STEP * VECS; j++)
                store(out + (int64_t)k * PANEL + j * LANES, rows[j / VECS][j % VECS]);
        }
    }
}

// M rows times NUM_PANELS panels from `first`, over some features, into `sums` [M][NUM_PANELS * 16]. `a` begins with the
// first of the features. `scratch` holds NEAR_PANELS * K * 16 floats. Few rows read the panels as they are, from memory; many have them decoded once, and take parts of them that stay
// in the first-level cache. `begins(row, some)` is called before `some` rows are first multiplied.
template <class Panel, int NUM_PANELS, class Begins>
inline void multiply_tile(
    const Matrix& m, int first, Features some_of, int M, const float* a, int64_t lda, float* scratch, float* sums,
    Begins&& begins) {
    constexpr int WIDTH = NUM_PANELS * PANEL;
    const int K = some_of.size, group_size = m.group_size ? m.group_size : K;
    if (M <= (std::is_same_v<Panel, Int4Panel> ? DIRECT_INT4_ROWS : DIRECT_ROWS)) {
        for_row_groups(M, MAX_MR, [&](int row, int some) {
            alignas(64) Panel panels[NUM_PANELS] = {
                Panel(m, first, some_of.begin), Panel(m, first + NUM_PANELS - 1, some_of.begin)};
            begins(row, some);
            multiply_rows<Panel, false>(
                some, a + row * lda, lda, panels, NUM_PANELS, K, group_size, sums + row * WIDTH, WIDTH);
        });
        return;
    }
    for (int p = 0; p < NUM_PANELS; p += NEAR_PANELS) {
        const float* decoded[NEAR_PANELS];
        for (int q = 0; q < NEAR_PANELS; q++) {
            float* own = scratch + (int64_t)q * K * PANEL;
            const Panel panel(m, first + p + q, some_of.begin);
            if constexpr (std::is_same_v<Panel, F32Panel>) {
                decoded[q] = panel.weights;
            } else {
                decode(panel, K, group_size, own);
                decoded[q] = own;
            }
        }
        const int parts = (K + KC - 1) / KC, part = (K + parts - 1) / parts;
        for (int k = 0; k < K; k += part) {
            const int some_k = std::min(part, K - k);
            for_row_groups(M, NEAR_MR, [&](int row, int some) {
                if (!k && !p) begins(row, some);
                NearPanel panels[NEAR_PANELS];
                for (int q = 0; q < NEAR_PANELS; q++) {
                    panels[q].weights = decoded[q] + (int64_t)k * PANEL;
                    // The first rows wait for memory themselves; while the others are multiplied, the next tile comes.
                    const bool has_next = row && std::is_same_v<Panel, F32Panel>;
                    panels[q].prefetch_from = panels[q].weights + (has_next ? (int64_t)NEAR_PANELS * m.K * PANEL : 0);
                }
                const float* from = a + row * lda + k;
                float* to = sums + row * WIDTH + p * PANEL;
                if (k)
                    multiply_near<true>(some, from, lda, panels, some_k, to, WIDTH);
                else
                    multiply_near<false>(some, from, lda, panels, some_k, to, WIDTH);
            });
        }
    }
}

// sums[r][j] += pair `pair` of row r * columns[j].
template <int MR, int WIDE>
inline void add_pair_of_rows(const RowsOfA<uint32_t, MR>& rows, int64_t pair, const vu (&columns)[WIDE], vf (&sums)[MR][WIDE]) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
        const vu x = (vu)splat_int((int32_t)rows.at(r, pair));
        for (int j = 0; j < WIDE; j++) sums[r][j] = add_pairs(sums[r][j], x, columns[j]);
    }
}

template <int MR, int WIDE>
inline void store_rows(const vf (&sums)[MR][WIDE], float* c, int64_t ldc) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < WIDE; j++) store(c + r * ldc + j * LANES, sums[r][j]);
}

// Pairs `begin` to `end` of 1 to NEAR_MR rows against two panels; from the second part on the sums go on. Weights that lie
// `ahead` further on are prefetched.
template <int MR = NEAR_MR>
inline void multiply_pairs(
    int mr, const PairsPanel (&panels)[2], const uint32_t* a, int64_t lda, int begin, int end, int64_t ahead, float* sums) {
    constexpr int NUM_PANELS = 2, WIDE = NUM_PANELS * VECS;
    if constexpr (MR > 1)
        if (mr < MR) return multiply_pairs<MR - 1>(mr, panels, a, lda, begin, end, ahead, sums);
    vf total[MR][WIDE] = {};
    if (begin)
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < WIDE; j++) total[r][j] = load(sums + (r * WIDE + j) * LANES);
    RowsOfA<uint32_t, MR> rows(a, lda);
    for (int pair = begin; pair < end; pair++) {
        rows.hide();
        vu weights[WIDE];
        for (int p = 0; p < NUM_PANELS; p++) panels[p].prefetch(pair, ahead);
        for (int j = 0; j < WIDE; j++) weights[j] = panels[j / VECS].read(pair, j % VECS);
        add_pair_of_rows(rows, pair, weights, total);
    }
    store_rows(total, sums, WIDE * LANES);
}

// 1 to NEAR_MR rows in pairs against two panels of codes from `first`, which are decoded on the way; over some features.
template <class Panel, int MR = NEAR_MR>
inline void multiply_quantised(
    int mr, const Matrix& m, int first, Features some_of, const uint32_t* a, int64_t lda, float* sums) {
    constexpr int NUM_PANELS = 2, WIDE = NUM_PANELS * VECS;
    if constexpr (MR > 1)
        if (mr < MR) return multiply_quantised<Panel, MR - 1>(mr, m, first, some_of, a, lda, sums);
    const Panel panels[NUM_PANELS] = {Panel(m, first, some_of.begin), Panel(m, first + 1, some_of.begin)};
    vf total[MR][WIDE] = {};
    RowsOfA<uint32_t, MR> rows(a, lda);
    const int pairs = m.group_size / 2;  // that share a scale
    for (int g = 0; g < some_of.size / m.group_size; g++) {
        const typename Panel::Group shared[NUM_PANELS] = {panels[0].group(g), panels[1].group(g)};
        for (int64_t pair = g * pairs; pair < (g + 1) * pairs; pair++) {
            rows.hide();
            vu weights[WIDE];
            for (int p = 0; p < NUM_PANELS; p++) {
                panels[p].prefetch(2 * pair);
                weights[p * VECS] = read_pair(panels[p], 2 * pair, shared[p]);
            }
            add_pair_of_rows(rows, pair, weights, total);
        }
    }
    store_rows(total, sums, WIDE * LANES);
}

// As `multiply_tile` for pairs of bf16; `a` holds the rows in pairs, `lda` apart. `next`: how many weights further on
// that lies which is read after this tile.
template <class Begins>
inline void multiply_tile_of_pairs(
    const Matrix& m, int first, Features some_of, int M, const uint32_t* a, int64_t lda, int64_t next, float* sums,
    Begins&& begins) {
    const PairsPanel panels[] = {PairsPanel(m, first, some_of.begin), PairsPanel(m, first + 1, some_of.begin)};
    const int pairs = some_of.size / 2, parts = (pairs + KC - 1) / KC, part = (pairs + parts - 1) / parts;
    for (int begin = 0; begin < pairs; begin += part) {
        const int end = std::min(pairs, begin + part);
        for_row_groups(M, NEAR_MR, [&](int row, int some) {
            if (!begin) begins(row, some);
            const int64_t ahead = row ? next : PREFETCH_NBYTES / 2;  // as in `multiply_tile`
            multiply_pairs(some, panels, a + row * lda, lda, begin, end, ahead, sums + row * 2 * PANEL);
        });
    }
}

// As `multiply_tile_of_pairs` for codes. `scratch` holds 2 * K * 16 numbers in bf16.
template <class Panel, class Begins>
inline void multiply_tile_quantised(
    const Matrix& m, int first, Features some_of, int M, const uint32_t* a, int64_t lda, uint16_t* scratch, float* sums,
    Begins&& begins) {
    if (M <= NEAR_MR) {
        begins(0, M);
        return multiply_quantised<Panel>(M, m, first, some_of, a, lda, sums);
    }
    const int K = some_of.size;
    for (int p = 0; p < 2; p++)
        decode_pairs(Panel(m, first + p, some_of.begin), 0, K, m.group_size, scratch + (int64_t)p * K * PANEL);
    Matrix decoded = m;
    decoded.codes = scratch;
    decoded.K = K;
    multiply_tile_of_pairs(decoded, 0, {0, K}, M, a, lda, 0, sums, begins);
}

constexpr int MAX_SLICES = 8;  // of the features of a product
MLSYS_CONSTANTS(MAX_SLICES);
constexpr int SLICE_BUFFERS = 4;  // sums that `add_slices` has at a time

// The sums of a tile over all slices of its features, added in the one tree that every number of ranks keeps to (ADR 22):
// of four slices (0 + 1) + (2 + 3), of three (0 + 1) + 2. `of_slice(slice, to)` writes those of one; `sums` has room for
// SLICE_BUFFERS tiles of `size` floats, a multiple of the vector's.
template <class OfSlice>
inline void add_slices(int slices, int64_t size, float* sums, OfSlice&& of_slice) {
    float* last = sums - size;  // the sums lie as a stack
    for (int slice = 0; slice < slices; slice++) {
        of_slice(slice, last += size);
        const int done = slice + 1;
        for (int pairs = done; last > sums && (pairs % 2 == 0 || done == slices); pairs /= 2, last -= size)
            for (int64_t i = 0; i < size; i += LANES) store(last - size + i, load(last - size + i) + load(last + i));
    }
}

}  // namespace orca
