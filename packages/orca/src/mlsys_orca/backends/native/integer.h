// Products of quantised weights by rows quantised to int8: a scale for each group of features, and exact sums in int32.
// An element of the result is one fp32 sum over the groups from first to last: += (int32 sum of products) * (scale *
// row's scale), fused, then += offset * (row's scale * sum of the row's int8 values). Integer sums are exact, so one
// row and a thousand give the same bits, on every instruction set.
#pragma once

#include <mlsys/dot.h>
#include <mlsys/gemm.h>

#include "gemm.h"

namespace orca {

constexpr int QUAD = 4;  // neighbouring features whose bytes share a lane
constexpr int INTEGER_MR = LANES == 16 ? 6 : 4;   // rows of one call
constexpr int INTEGER_PANELS = LANES == 16 ? 2 : 1;  // panels that many rows are multiplied by at once; for few rows: two
constexpr int FEW_INTEGER_ROWS = LANES == 16 ? INTEGER_MR : 2;
constexpr int INTEGER_KC = 4096;  // features whose rows and panels stay in the caches

// One quantised row: [K] codes, then scales, by what shares one; without factors by group: minus the sums of codes times the
// centre that is taken off, and sums of codes times the scale; with factors: by 16 features, sums of codes in int16.
struct CodedRow {
    static int64_t codes_size(const Matrix& m) {  // in words
        return m.K / QUAD * (m.kind == INT8_QUADS ? mlsys::ByteDot::WORDS : mlsys::NibbleDot::WORDS);
    }
    static int64_t size(const Matrix& m) {  // in floats
        return codes_size(m) + (m.factors ? m.K / m.block_size + (m.K + 31) / 32 : 3 * (int64_t)(m.K / m.group_size));
    }
    int32_t* codes;  // in quads, as the product takes them
    float* scales;
    int32_t* sums;   // with factors: pairs of int16
    float* shifts;   // without factors
    CodedRow(const float* row, const Matrix& m)
        : codes((int32_t*)row), scales((float*)row + codes_size(m)), sums((int32_t*)scales + m.K / m.scaled_together()),
          shifts(scales + 2 * (m.K / m.scaled_together())) {}
};

inline int32_t sum_of(vi x) {
    int32_t out = 0;
    for (int i = 0; i < LANES; i++) out += x[i];
    return out;
}

// Quantise a row, group by group (with factors block by block): the largest magnitude becomes 127, the nearest codes, ties to even. A group with an
// infinity or a NaN makes NaN of what it meets. One whose numbers are all below 1e-30 counts as zero.
template <class Dot>
inline void quantise_row_for(const float* x, const Matrix& m, float* out) {
    const CodedRow row(out, m);
    const int size = m.scaled_together();
    for (int g = 0; g < m.K / size; g++) {
        const float* from = x + g * size;
        vf most{}, strange{};
        for (int i = 0; i < size; i += LANES) {
            const vf values = load(from + i);
            most = larger(most, mlsys::abs(values));
            strange += values - values;
        }
        const float top = largest(most);
        const bool is_finite = sum(strange) == 0.0f, is_some = is_finite && top >= 1e-30f;
        const float factor = is_some ? 127.0f / top : 0.0f;
        vi total{};
        for (int i = 0; i < size; i += LANES) {
            vi codes{};
            if (is_some) codes = (vi)(load(from + i) * splat(factor) + splat(0x1.8p23f)) - splat_int(0x4b400000);
            total += codes;
            Dot::store_codes(row.codes, g * size + i, codes);
            if (m.factors && (i + LANES) % 16 == 0) {
                ((int16_t*)row.sums)[(g * size + i) / 16] = (int16_t)sum_of(total);
                total = vi{};
            }
        }
        row.scales[g] = is_finite ? (is_some ? top / 127.0f : 0.0f) : NAN;
        if (m.factors) continue;
        const int32_t count = sum_of(total);
        row.sums[g] = -count * (m.kind == INT8_QUADS ? 128 - mlsys::ByteDot::SUBTRACTED : m.centre);
        row.shifts[g] = row.scales[g] * (float)count;
    }
}
inline void quantise_row(const float* x, const Matrix& m, float* out) {
    m.kind == INT8_QUADS ? quantise_row_for<mlsys::ByteDot>(x, m, out) : quantise_row_for<mlsys::NibbleDot>(x, m, out);
}

// What a tile reads is prefetched into the second-level cache while the tile before it is multiplied: panels are too short,
// and scales far too short, for the processor to foresee them.
constexpr int TILE_OF_PANELS = 2;  // panels of a tile, one after another

// Panels of int8 values, [K / 4][16][4]; a line is the four bytes of all 16 columns.
struct Int8Quads : Scales {
    using Dot = mlsys::ByteDot;
    static constexpr int QUADS = 1;  // of a line
    const uint8_t* codes;            // with 128 added
    const int64_t next;              // bytes from here to the same place in the next tile
    Int8Quads(const Matrix& m, int panel, int begin = 0)
        : Scales(m, panel, begin), codes((const uint8_t*)m.codes + ((int64_t)panel * m.K + begin) * PANEL),
          next((int64_t)TILE_OF_PANELS * m.K * PANEL) {}
    void read(int64_t line, int v, Dot::Weights (&out)[QUADS]) const {
        out[0] = Dot::weights(load_as<vi>(codes + (line * PANEL + v * LANES) * QUAD));
    }
    void prefetch(int64_t line) const { __builtin_prefetch(codes + next + line * PANEL * QUAD, 0, 2); }
};

// Two quads share their bytes: the even one has the low nibbles.
struct Int4Quads : Scales {
    using Dot = mlsys::NibbleDot;
    static constexpr int QUADS = 2;
    const uint8_t* codes;
    const int64_t next;
    Int4Quads(const Matrix& m, int panel, int begin = 0)
        : Scales(m, panel, begin), codes((const uint8_t*)m.codes + ((int64_t)panel * m.K + begin) / 2 * PANEL),
          next((int64_t)TILE_OF_PANELS * m.K * PANEL / 2) {}
    void read(int64_t line, int v, Dot::Weights (&out)[QUADS]) const {
        const vu bytes = load_as<vu>(codes + (line * PANEL + v * LANES) * QUAD);
        out[0] = (vi)(bytes & 0x0f0f0f0fu);
        out[1] = (vi)((bytes >> 4) & 0x0f0f0f0fu);
    }
    void prefetch(int64_t line) const { __builtin_prefetch(codes + next + line * PANEL * QUAD, 0, 2); }
};

// c[r][p * 16 + n] (+)= groups `begin` to `end` of row r times panel p; `a`: coded rows, `lda` floats apart, and the first
// feature of panels is `from` in them. It goes on from `c` where `begin` is not 0.
template <class Panel, int MR, int PANELS>
[[gnu::noinline]] void multiply_codes(
    const Matrix& m, const float* a, int64_t lda, int from, const Panel* panels, int begin, int end, float* c, int ldc) {
    using Dot = typename Panel::Dot;
    constexpr int WIDE = PANELS * VECS;
    const CodedRow first(a, m);
    const int lines = m.group_size / QUAD / Panel::QUADS, before = from / m.group_size;
    const RowsOfA<int32_t, MR> rows(first.codes + from / QUAD * Dot::WORDS, lda);
    vf sums[MR][WIDE] = {};
    if (begin)
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < WIDE; j++) sums[r][j] = load(c + r * ldc + j * LANES);
    for (int g = begin; g < end; g++) {
        const int64_t at = before + g;
        vi whole[MR][WIDE];
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
            for (int j = 0; j < WIDE; j++) whole[r][j] = Dot::begin(first.sums[r * lda + at]);
        for (int64_t line = (int64_t)g * lines; line < (int64_t)(g + 1) * lines; line++) {
            typename Dot::Weights weights[WIDE][Panel::QUADS];
            for (int p = 0; p < PANELS; p++) panels[p].prefetch(line);
#pragma GCC unroll 16
            for (int j = 0; j < WIDE; j++) panels[j / VECS].read(line, j % VECS, weights[j]);
#pragma GCC unroll 2
            for (int q = 0; q < Panel::QUADS; q++)
#pragma GCC unroll 16
                for (int r = 0; r < MR; r++) {
                    vi x[Dot::WORDS];
#pragma GCC unroll 2
                    for (int w = 0; w < Dot::WORDS; w++)
                        x[w] = splat_int(rows.at(r, (line * Panel::QUADS + q) * Dot::WORDS + w));
#pragma GCC unroll 16
                    for (int j = 0; j < WIDE; j++) whole[r][j] = Dot::add(whole[r][j], weights[j][q], x);
                }
        }
        Scaled shared[PANELS];
        for (int p = 0; p < PANELS; p++) {
            shared[p] = panels[p].floating_group(g);
            panels[p].prefetch_group(g);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vf scale = splat(first.scales[r * lda + at]), shift = splat(first.shifts[r * lda + at]);
#pragma GCC unroll 16
            for (int j = 0; j < WIDE; j++) {
                const vf product = __builtin_convertvector(Dot::total(whole[r][j], first.sums[r * lda + at]), vf);
                sums[r][j] = fma(product, shared[j / VECS].scale[j % VECS] * scale, sums[r][j]);
                if (m.offsets) sums[r][j] = fma(shared[j / VECS].offset[j % VECS], shift, sums[r][j]);
            }
        }
    }
    store_rows(sums, c, ldc);
}

// As `multiply_codes` for 1 to INTEGER_MR rows against two panels.
template <class Panel, int MR = INTEGER_MR>
inline void multiply_coded_rows(
    int mr, const Matrix& m, const float* a, int64_t lda, int from, const Panel (&panels)[2], int begin, int end, float* c) {
    if constexpr (MR > 1)
        if (mr < MR) return multiply_coded_rows<Panel, MR - 1>(mr, m, a, lda, from, panels, begin, end, c);
    constexpr int AT_ONCE = MR <= FEW_INTEGER_ROWS ? 2 : INTEGER_PANELS;
    for (int p = 0; p < 2; p += AT_ONCE)
        multiply_codes<Panel, MR, AT_ONCE>(m, a, lda, from, panels + p, begin, end, c + p * PANEL, 2 * PANEL);
}

// M coded rows times two panels from `first`, over some features, into `sums` [M][32]. `begins`: as in `multiply_tile`.
template <class Panel, class Begins>
inline void multiply_tile_of_codes(
    const Matrix& m, int first, Features some_of, int M, const float* a, int64_t lda, float* sums, Begins&& begins) {
    const Panel panels[2] = {Panel(m, first, some_of.begin), Panel(m, first + 1, some_of.begin)};
    const int groups = some_of.size / m.group_size, most = INTEGER_KC / m.group_size;
    const int parts = (groups + most - 1) / most, part = (groups + parts - 1) / parts;
    for (int begin = 0; begin < groups; begin += part)
        for_row_groups(M, INTEGER_MR, [&](int row, int some) {
            if (!begin) begins(row, some);
            multiply_coded_rows(
                some, m, a + row * lda, lda, some_of.begin, panels, begin, std::min(groups, begin + part),
                sums + row * 2 * PANEL);
        });
}

}  // namespace orca
