// Products of K-quants by quantised rows: the scales of groups are whole numbers themselves, so that a block's sum is exact.
//
// An element of the result is one fp32 sum over the blocks from first to last: += (sum over the block's groups of scale * sum
// of code * row's code) * (factor * row's scale), fused, then += (sum of offset * sum of row's codes) * (factor of offsets *
// row's scale). A row has one scale for a block. All else is exact, as in integer.h.
#pragma once

#include "integer.h"
#include "scaled_dot.h"

namespace orca {

// Panels of codes of 2 to 6 bits in quads. A line has planes of 2 bits (codes of 2 and 3) or of 4, as many quads to a vector as
// 8 bits hold; then a vector whose bytes have what the planes leave of each quad.
template <int BITS>
struct BlockPanel : Scales {
    using Dot = ScaledDot<BITS>;
    static constexpr int GROUP = BITS == 4 || BITS == 5 ? 32 : 16;                // features of a group
    static constexpr int QUADS = BITS == 4 ? 2 : BITS == 3 || BITS == 5 ? 8 : 4;  // of a line
    static constexpr int WIDTH = BITS < 4 ? 2 : 4, REST = BITS - WIDTH;           // bits of a plane, and the remaining bits
    static constexpr int SHARED = 8 / WIDTH;                                      // quads of a vector
    static constexpr int VECTORS = QUADS / SHARED + (REST > 0);
    const uint8_t* codes;
    const int64_t next;  // as Int4Quads'
    BlockPanel(const Matrix& m, int panel, int begin = 0)
        : Scales(m, panel, begin), codes((const uint8_t*)m.codes + ((int64_t)panel * m.K + begin) * PANEL / 8 * BITS),
          next((int64_t)TILE_OF_PANELS * m.K * PANEL / 8 * BITS) {}
    // Quad `quad` of those that begin with quad `first`, with which a group does.
    vi read(int64_t first, int quad, int v) const {
        const int64_t line = first / QUADS;
        const int begin = QUADS > GROUP / QUAD ? first % QUADS : 0;  // where a line holds more than a group
        const uint8_t* at = codes + ((line + quad / QUADS) * VECTORS * PANEL + v * LANES) * QUAD;
        const int q = quad % QUADS;
        const vu plane = load_as<vu>(at + (begin / SHARED + q / SHARED) * PANEL * QUAD);
        const vu low = (plane >> (q % SHARED * WIDTH)) & bytes((1 << WIDTH) - 1);
        if constexpr (REST == 0) return (vi)low;
        const vu rest = load_as<vu>(at + QUADS / SHARED * PANEL * QUAD) >> (begin * REST);
        const int left = WIDTH - REST * q;
        return (vi)(low | ((left > 0 ? rest << left : rest >> -left) & bytes(((1 << REST) - 1) << WIDTH)));
    }
    void prefetch(int64_t line) const {
        const uint8_t* at = codes + next + line * VECTORS * PANEL * QUAD;
        for (int i = 0; i < VECTORS * PANEL * QUAD; i += 64) __builtin_prefetch(at + i, 0, 2);
    }
    vi scale(int64_t group, int v) const { return small(scales, group, v); }
    // Factors of the sums of rows' int8 values over features 32 `pair` to 32 `pair` + 31, as two int16.
    vi of_sums(int64_t pair, int v) const {
        const char* from = offsets ? offsets : scales;
        if constexpr (GROUP == 16) return as_pairs(small(from, 2 * pair, v), small(from, 2 * pair + 1, v));
        const vi both = small(from, pair, v);
        return as_pairs(both, both);
    }
    vf factor(const uint16_t* from, int block, int v) const { return load_halves(from + block * PANEL + v * LANES); }

  private:
    static constexpr uint32_t bytes(uint32_t byte) { return 0x01010101u * byte; }
    static vi small(const char* from, int64_t group, int v) {
        return load_ints((const int8_t*)from + group * PANEL + v * LANES);
    }
};

template <class Panel>
constexpr bool is_block_panel = false;
template <int BITS>
constexpr bool is_block_panel<BlockPanel<BITS>> = true;

// As `multiply_codes`, of blocks `begin` to `end`.
template <class Panel, int MR, int PANELS>
[[gnu::noinline]] void multiply_blocks(
    const Matrix& m, const float* a, int64_t lda, int from, const Panel* panels, int begin, int end, float* c, int ldc) {
    using Dot = typename Panel::Dot;
    constexpr int WIDE = PANELS * VECS, GROUP_QUADS = Panel::GROUP / QUAD, STEPS = std::min(GROUP_QUADS, Dot::STEPS);
    const CodedRow first(a, m);
    const RowsOfA<int32_t, MR> rows(first.codes + from / QUAD, lda);
    const int32_t* row_sums = first.sums + from / 32;
    const float* row_scales = first.scales + from / m.block_size;
    const int groups = m.block_size / Panel::GROUP;
    vf sums[MR][WIDE] = {};
    if (begin)
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < WIDE; j++) sums[r][j] = load(c + r * ldc + j * LANES);
    for (int block = begin; block < end; block++) {
        vi total[MR][WIDE] = {};
        for (int64_t g = (int64_t)block * groups; g < (int64_t)(block + 1) * groups; g++) {
            const int64_t quad = g * GROUP_QUADS;
            vi scale[WIDE];
            for (int j = 0; j < WIDE; j++) scale[j] = Dot::factors(panels[j / VECS].scale(g, j % VECS));
            for (int p = 0; p < PANELS; p++) {
                for (int q = 0; q < GROUP_QUADS; q += Panel::QUADS) panels[p].prefetch((quad + q) / Panel::QUADS);
                panels[p].prefetch_group(g);
            }
#pragma GCC unroll 4
            for (int step = 0; step < GROUP_QUADS; step += STEPS) {
                vi whole[MR][WIDE] = {};
#pragma GCC unroll 8
                for (int q = step; q < step + STEPS; q++) {
                    vi weights[WIDE];
                    for (int j = 0; j < WIDE; j++) weights[j] = panels[j / VECS].read(quad, q, j % VECS);
#pragma GCC unroll 16
                    for (int r = 0; r < MR; r++) {
                        const vi x = splat_int(rows.at(r, quad + q));
                        for (int j = 0; j < WIDE; j++) whole[r][j] = Dot::add(whole[r][j], weights[j], x);
                    }
                }
#pragma GCC unroll 16
                for (int r = 0; r < MR; r++)
                    for (int j = 0; j < WIDE; j++) total[r][j] = Dot::add_scaled(total[r][j], whole[r][j], scale[j]);
            }
        }
        vi shifts[MR][WIDE] = {};
        if (m.offsets || m.centre)
            for (int64_t pair = (int64_t)block * m.block_size / 32; pair < (int64_t)(block + 1) * m.block_size / 32; pair++) {
                vi of_sums[WIDE];
                for (int j = 0; j < WIDE; j++) of_sums[j] = panels[j / VECS].of_sums(pair, j % VECS);
#pragma GCC unroll 16
                for (int r = 0; r < MR; r++) {
                    const vi x = splat_int(row_sums[r * lda + pair]);
                    for (int j = 0; j < WIDE; j++) shifts[r][j] = add_int16_dot(shifts[r][j], of_sums[j], x);
                }
            }
#pragma GCC unroll 16
        for (int j = 0; j < WIDE; j++) {
            const Panel& panel = panels[j / VECS];
            const vf factor = panel.factor(panel.factors, block, j % VECS);
            const vf shift = m.offsets ? panel.factor(panel.offset_factors, block, j % VECS) : vf{};
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
                const vf scale = splat(row_scales[r * lda + block]);
                const vi less = m.offsets ? vi{} : shifts[r][j] * splat_int(m.centre);
                sums[r][j] = fma(__builtin_convertvector(total[r][j] - less, vf), factor * scale, sums[r][j]);
                if (m.offsets) sums[r][j] = fma(__builtin_convertvector(shifts[r][j], vf), shift * scale, sums[r][j]);
            }
        }
    }
    store_rows(sums, c, ldc);
}

// As `multiply_coded_rows`.
template <class Panel, int MR = INTEGER_MR>
inline void multiply_rows_of_blocks(
    int mr, const Matrix& m, const float* a, int64_t lda, int from, const Panel (&panels)[2], int begin, int end, float* c) {
    if constexpr (MR > 1)
        if (mr < MR) return multiply_rows_of_blocks<Panel, MR - 1>(mr, m, a, lda, from, panels, begin, end, c);
    constexpr int AT_ONCE = MR <= FEW_INTEGER_ROWS ? 2 : INTEGER_PANELS;
    for (int p = 0; p < 2; p += AT_ONCE)
        multiply_blocks<Panel, MR, AT_ONCE>(m, a, lda, from, panels + p, begin, end, c + p * PANEL, 2 * PANEL);
}

// As `multiply_tile_of_codes`.
template <class Panel, class Begins>
inline void multiply_tile_of_blocks(
    const Matrix& m, int first, Features some_of, int M, const float* a, int64_t lda, float* sums, Begins&& begins) {
    const Panel panels[2] = {Panel(m, first, some_of.begin), Panel(m, first + 1, some_of.begin)};
    const int blocks = some_of.size / m.block_size, most = INTEGER_KC / m.block_size;
    const int parts = (blocks + most - 1) / most, part = (blocks + parts - 1) / parts;
    for (int begin = 0; begin < blocks; begin += part)
        for_row_groups(M, INTEGER_MR, [&](int row, int some) {
            if (!begin) begins(row, some);
            multiply_rows_of_blocks(
                some, m, a + row * lda, lda, some_of.begin, panels, begin, std::min(blocks, begin + part),
                sums + row * 2 * PANEL);
        });
}

}  // namespace orca
