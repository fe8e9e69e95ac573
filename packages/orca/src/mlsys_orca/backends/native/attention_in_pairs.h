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
    using Read = Blocks<uint16_t, true>;

    static void score(const Read& blocks, const uint16_t* queries, int rows, int dim, float* scores, int64_t stride) {
        for_row_groups(rows, NEAR_MR, [&](int row, int some) {
            score_rows<NEAR_MR>(blocks, (const uint32_t*)(queries + row * dim), some, dim / 2, scores + row * stride, stride);
        });
    }

    static void weigh(const Read& blocks, const uint16_t* weights, int64_t stride, int rows, int dim, float* out) {
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

// One task: rows `begin` to `end` of `span`, the query heads of one key head.
template <class Gemms>
void attend_in_pairs(
    const Attention& a, const LayerCache<uint16_t, true>& cache, const Span& span, const int32_t* table, int head,
    int begin, int end, const float* qkv, const float* cos, const float* sin, const Register& merged, Scratch& scratch) {
    const Reach reach(a, span, begin, end);
    const int group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (end - begin) * group;
    const int width = (a.num_heads + 2 * a.num_kv_heads) * dim, seen_keys = reach.num_blocks * PANEL;
    const int keys = (reach.num_blocks + 3) / 4 * 4 * PANEL;  // four blocks at a time
    constexpr int ROWS = Gemms::ROWS;
    float* scores = scratch.grow((int64_t)ROWS * (dim + dim / 2 + keys + keys / 2));
    float* sums = scores + ROWS * keys;
    uint16_t* weights = (uint16_t*)(sums + ROWS * dim);
    uint16_t* queries = weights + ROWS * keys;
    const Blocks<uint16_t, true> blocks{cache, table + reach.first_block, reach.num_blocks, head};

    for (int row = 0; row < rows; row += ROWS) {
        const int some = std::min(ROWS, rows - row);
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            const int64_t at = (int64_t)token * a.rotary_dim;
            float query[1024];
            copy_row(qkv + (int64_t)token * width + query_head * dim, query, dim);
            prepare_head(a, query_head, query, cos + at, sin + at);
            convert_row(query, queries + r * dim, dim);
        }
        Gemms::score(blocks, queries, some, dim, scores, keys);
        float inverse[ROWS];
        for (int r = 0; r < some; r++) {
            const int seen = reach.seen_by(begin + (row + r) / group, span);
            const int first = a.window ? std::max(0, seen - a.window) : 0;
            const int shift = reach.first_block * PANEL;
            uint16_t* own = weights + r * keys;
            const int query_head = head * group + (row + r) % group;
            inverse[r] = 1.0f / softmax(a, query_head, scores + r * keys, first - shift, seen - shift, seen_keys, own);
        }
        Gemms::weigh(blocks, weights, keys, some, dim, sums);
        for (int r = 0; r < some; r++) {
            const int token = begin + (row + r) / group, query_head = head * group + (row + r) % group;
            put_row(merged, token, query_head * dim, sums + r * dim, inverse[r], dim);
        }
    }
}

}  // namespace orca
