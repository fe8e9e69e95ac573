// Attention as in attention.h over a cache of pairs of bf16, queries and weights rounded to bf16: its two GEMMs by
// AMX, or by the instruction that multiplies pairs. Every sum runs over pairs of features, or of keys, in their
// order, whatever the rows are computed with.
#pragma once

#include "attention.h"
#include "attention_amx.h"
#include "gemm.h"

namespace orca {

// Whether the cache of heads of that size holds pairs.
inline bool attends_in_pairs(int head_dim) {
    return attends_by_amx(head_dim) || (HAS_PAIRS && head_dim % PANEL == 0);
}

// scores[r][c * 16 + key] = queries r . key of block c, for ROWS rows `stride` pairs apart.
template <int ROWS, int BLOCKS>
inline void score_pairs(
    const uint32_t* queries, int64_t stride, const uint16_t* const (&keys)[BLOCKS], const uint16_t* const (&prefetch_from)[BLOCKS],
    float* scores, int64_t scores_stride) {
    constexpr int WIDE = BLOCKS * VECS;
    vf sums[ROWS][WIDE] = {};
    RowsOfA<uint32_t, ROWS> column(queries, stride);
    for (int pair = 0; pair < stride; pair++) {
        column.hide();
        vu k[WIDE];
        for (int j = 0; j < WIDE; j++) k[j] = load_as<vu>(keys[j / VECS] + 2 * (pair * PANEL + j % VECS * LANES));
        for (int c = 0; c < BLOCKS; c++) __builtin_prefetch(prefetch_from[c] + 2 * pair * PANEL, 0, 2);
        add_pair_of_rows(column, pair, k, sums);
    }
    store_rows(sums, scores, scores_stride);
}

// out[r][c] = sum over the blocks' keys of weights[r][key] * value(key, c), for ROWS rows and WIDE vectors of columns.
template <int ROWS, int WIDE>
inline void weigh_pairs(
    const uint32_t* weights, int64_t stride, const Blocks<uint16_t, true>& blocks, int dim, int column, float* out) {
    vf sums[ROWS][WIDE] = {};
    RowsOfA<uint32_t, ROWS> rows(weights, stride);
    for (int block = 0; block < blocks.count; block++) {
        const uint16_t* values = blocks.values(block) + 2 * column;
        const uint16_t* prefetch_from = blocks.read(blocks.count + block + BLOCKS_AHEAD) + 2 * column;
        for (int pair = 0; pair < PANEL / 2; pair++) {
            rows.hide();
            const int64_t at = (int64_t)2 * pair * dim;
            vu v[WIDE];
            for (int c = 0; c < WIDE; c++) v[c] = load_as<vu>(values + at + 2 * c * LANES);
            for (int c = 0; c < WIDE; c += 16 / LANES) __builtin_prefetch(prefetch_from + at + 2 * c * LANES, 0, 2);
            add_pair_of_rows(rows, block * PANEL / 2 + pair, v, sums);
        }
    }
    store_rows(sums, out + column, dim);
}

struct ByInstruction {
    static constexpr int ROWS = 24;
    using Cache = LayerCache<uint16_t, true>;
    using Read = Blocks<uint16_t, true>;
    using Operand = uint16_t;

    static void score(const Read& blocks, const uint16_t* queries, int rows, int dim, float* scores, int64_t stride) {
        for_row_groups(rows, NEAR_MR, [&](int row, int some) {
            score_rows<NEAR_MR>(blocks, (const uint32_t*)(queries + row * dim), some, dim / 2, scores + row * stride, stride);
        });
    }

    static void weigh(const Read& blocks, const uint16_t* weights, int64_t stride, int rows, int, int dim, float* out) {
        for_row_groups(rows, MAX_MR, [&](int row, int some) {
            weigh_rows<MAX_MR>(blocks, (const uint32_t*)(weights + row * stride), stride / 2, some, dim, out + row * dim);
        });
    }

  private:
    template <int ROWS>
    static void score_rows(const Read& blocks, const uint32_t* queries, int rows, int pairs, float* scores, int64_t stride) {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return score_rows<ROWS - 1>(blocks, queries, rows, pairs, scores, stride);
        constexpr int COUNT = ROWS * 4 <= NEAR_MR * 2 ? 4 : 2;  // blocks: as many sums as registers allow
        for (int block = 0; block < blocks.count; block += COUNT) {
            const uint16_t *keys[COUNT], *prefetch_from[COUNT];
            for (int c = 0; c < COUNT; c++) keys[c] = blocks.keys(block + c), prefetch_from[c] = blocks.read(block + c + BLOCKS_AHEAD);
            score_pairs<ROWS, COUNT>(queries, pairs, keys, prefetch_from, scores + block * PANEL, stride);
        }
    }

    template <int ROWS>
    static void weigh_rows(const Read& blocks, const uint32_t* weights, int64_t stride, int rows, int dim, float* out) {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return weigh_rows<ROWS - 1>(blocks, weights, stride, rows, dim, out);
        constexpr int WIDE = LANES == 16 ? 4 : 2;
        int column = 0;
        for (; column + WIDE * LANES <= dim; column += WIDE * LANES) weigh_pairs<ROWS, WIDE>(weights, stride, blocks, dim, column, out);
        for (; column < dim; column += LANES) weigh_pairs<ROWS, 1>(weights, stride, blocks, dim, column, out);
    }
};

#if !ORCA_HAS_AMX
using ByAmx = ByInstruction;
#endif

}  // namespace orca
