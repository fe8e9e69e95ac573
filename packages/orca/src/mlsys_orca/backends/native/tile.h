// One tile of a product: two panels of packed weights against some rows, in the arithmetic of the weights' form.
#pragma once

#include <type_traits>

#include "amx.h"
#include "epilogue.h"
#include "gemm.h"
#include "integer.h"
#include "integer_blocks.h"
#include "operators.h"

namespace orca {

inline bool is_by_amx(const Gemm& op) {
    return op.matrix.is_in_pairs() && op.matrix.K / op.num_slices % AMX_K == 0 && has_amx();
}

// How a product's tiles are computed.
template <class P, bool PAIRS_OF_ROWS = false, bool AMX = false>
struct Form {
    using Panel = P;
    static constexpr bool IN_PAIRS = PAIRS_OF_ROWS, BY_AMX = AMX;
};

// Call use(Form) with the weights' form of `op`.
template <class Use>
void with_form(const Gemm& op, Use&& use) {
    const auto quantised = [&](auto form) {
        using Panel = typename decltype(form)::Panel;
        if (is_by_amx(op)) return use(Form<Panel, true, true>());
        if constexpr (HAS_PAIRS)
            if (op.matrix.is_in_pairs()) return use(Form<Panel, true>());
        use(form);
    };
    switch (op.matrix.kind) {
        case F32: return use(Form<F32Panel>());
        case BF16: return use(Form<Bf16Panel>());
        case INT8: return quantised(Form<Int8Panel>());
        case INT4: return quantised(Form<Int4Panel>());
        case INT8_QUADS: return use(Form<Int8Quads>());
        case INT2_QUADS: return use(Form<BlockPanel<2>>());
        case INT3_QUADS: return use(Form<BlockPanel<3>>());
        case INT4_QUADS: return op.matrix.factors ? use(Form<BlockPanel<4>>()) : use(Form<Int4Quads>());
        case INT5_QUADS: return use(Form<BlockPanel<5>>());
        case INT6_QUADS: return use(Form<BlockPanel<6>>());
        case BF16_PAIRS: return is_by_amx(op) ? use(Form<PairsPanel, true, true>()) : use(Form<PairsPanel, true>());
    }
}

// Rows `first` to `stop` against two panels, which `panels_from(begin)` gives from a feature on. Where they are many, the
// panels that follow are prefetched; with few, all waits for memory anyway, and its own prediction serves best.
template <class PanelsFrom>
void multiply_block(
    const Gemm& op, const Register& target, Peak* peaks, int panel, int first, int stop, const uint32_t* input,
    PanelsFrom&& panels_from) {
    const Matrix& m = op.matrix;
    const int size = m.K / op.num_slices, parts = (stop - first + AMX_MR - 1) / AMX_MR;
    Prefetch prefetch;
    if (m.kind == BF16_PAIRS && parts > 2)
        prefetch = {(const char*)PairsPanel(m, panel + TILE_PANELS).weights, (2 * AMX_TILE_ROWS + parts - 1) / parts};
    constexpr int TILE = AMX_MR * TILE_PANELS * PANEL;
    alignas(64) float sums[SLICE_BUFFERS * TILE];
    for (int row = first; row < stop; row += AMX_MR) {
        const int some = std::min(AMX_MR, stop - row);
        const int tile = some > AMX_TILE_ROWS ? TILE : TILE / 2;  // as much as is written
        add_slices(op.num_slices, tile, sums, [&](int slice, float* to) {
            const int begin = slice * size;
            const uint32_t* from = input + ((int64_t)row * m.K + begin) / 2;
            multiply_by_amx(panels_from(begin), size, some, from, m.K / 2, to, prefetch);
            prefetch.next += (int64_t)(size / AMX_K) * prefetch.lines * 64;
        });
        apply_epilogue(op, target, peaks, panel, row, some, sums);
    }
}

// Compute and finish two panels of rows `first` to `stop`; `from`: row 0 of the product, rows `lda` floats apart. `peaks`: of
// all rows; null: not wanted.
template <class Form>
void run_tile(
    const Gemm& op, const Register& target, Peak* peaks, int panel, int first, int stop, const float* from, int64_t lda,
    float* scratch) {
    using Panel = typename Form::Panel;
    const Matrix& m = op.matrix;
    const int K = m.K, some = stop - first;
    if constexpr (Form::BY_AMX) {
        const uint32_t* pairs = (const uint32_t*)from;
        if constexpr (std::is_same_v<Panel, PairsPanel>) {
            multiply_block(op, target, peaks, panel, first, stop, pairs, [&](int begin) {
                return StoredPanels{{Panel(m, panel, begin).weights, Panel(m, panel + 1, begin).weights}};
            });
        } else if (some <= AMX_MR) {
            multiply_block(op, target, peaks, panel, first, stop, pairs, [&](int begin) {
                return DecodedPanels<Panel>{
                    {Panel(m, panel, begin), Panel(m, panel + 1, begin)}, m.group_size, (uint16_t*)scratch};
            });
        } else {
            uint16_t* decoded[2] = {(uint16_t*)scratch, (uint16_t*)scratch + (int64_t)m.K * PANEL};
            for (int p = 0; p < 2; p++) decode_pairs(Panel(m, panel + p), 0, m.K, m.group_size, decoded[p]);
            multiply_block(op, target, peaks, panel, first, stop, pairs, [&](int begin) {
                return StoredPanels{{decoded[0] + (int64_t)begin * PANEL, decoded[1] + (int64_t)begin * PANEL}};
            });
        }
    } else {
        float* sums = scratch + (int64_t)NEAR_PANELS * K * PANEL;
        const float* at = from + first * lda;
        add_slices(op.num_slices, some * TILE_PANELS * PANEL, sums, [&](int slice, float* to) {
            const Features part{K / op.num_slices * slice, K / op.num_slices};
            const auto begins = [&](int row, int few) {
                if (!slice) prefetch_target(op, target, panel, first + row, few);
            };
            const uint32_t* pairs = (const uint32_t*)at + part.begin / 2;
            if constexpr (is_block_panel<Panel>)
                multiply_tile_of_blocks<Panel>(m, panel, part, some, at, lda, to, begins);
            else if constexpr (std::is_same_v<Panel, Int8Quads> || std::is_same_v<Panel, Int4Quads>)
                multiply_tile_of_codes<Panel>(m, panel, part, some, at, lda, to, begins);
            else if constexpr (!Form::IN_PAIRS)
                multiply_tile<Panel, TILE_PANELS>(m, panel, part, some, at + part.begin, lda, scratch, to, begins);
            else if constexpr (std::is_same_v<Panel, PairsPanel>)
                multiply_tile_of_pairs(m, panel, part, some, pairs, lda, 2 * (int64_t)K * PANEL, to, begins);
            else
                multiply_tile_quantised<Panel>(m, panel, part, some, pairs, lda, (uint16_t*)scratch, to, begins);
        });
        apply_epilogue(op, target, peaks, panel, first, some, sums);
    }
}

}  // namespace orca
