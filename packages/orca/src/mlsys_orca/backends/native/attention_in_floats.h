// The two GEMMs of attention in fp32, over a cache of any elements: these are widened where they are read.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace orca {

constexpr int FLOAT_MR = LANES == 16 ? 8 : MAX_MR;  // rows that meet an element while it is wide

// out[r][c] = sum over the blocks' keys of weights[r][key] * value(key, c), for WIDE vectors of columns from `column` on.
template <int ROWS, int WIDE, class T>
inline void weigh_columns(
    const float* weights, int64_t stride, const Blocks<T, false>& blocks, int keys, int width, int column, float* out) {
    vf sums[ROWS][WIDE] = {};
    for (int block = 0; block < blocks.count; block++) {
        const T* values = blocks.values(block) + column;
        const T* prefetch_from = blocks.read(blocks.count + block + BLOCKS_AHEAD) + column;
        const float* own = weights + block * PANEL;
        for (int j = 0; j < std::min(PANEL, keys - block * PANEL); j++) {
            const int64_t at = (int64_t)j * width;
            vf v[WIDE];
            for (int c = 0; c < WIDE; c++) v[c] = load(values + at + c * LANES);
            for (int c = 0; c < WIDE; c += std::max(1, 64 / (int)sizeof(T) / LANES)) __builtin_prefetch(prefetch_from + at + c * LANES, 0, 2);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const vf x = splat(own[r * stride + j]);
                for (int c = 0; c < WIDE; c++) sums[r][c] = fma(x, v[c], sums[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(out + r * width + column + c * LANES, sums[r][c]);
}

template <class T>
struct InFloats {
    static constexpr int ROWS = 24;
    using Cache = LayerCache<T>;
    using Read = Blocks<T, false>;
    using Operand = float;

    static void score(const Read& blocks, const float* queries, int rows, int dim, float* scores, int64_t stride) {
        for_row_groups(rows, FLOAT_MR, [&](int row, int some) {
            score_rows<FLOAT_MR>(blocks, queries + (int64_t)row * dim, some, dim, scores + row * stride, stride);
        });
        scale(blocks, scores, rows, stride, [&](int block) { return blocks.cache.key_scales(blocks.keys(block)); });
    }

    static void weigh(const Read& blocks, float* weights, int64_t stride, int rows, int keys, int width, float* out) {
        scale(blocks, weights, rows, stride, [&](int block) { return blocks.cache.value_scales(blocks.values(block)); });
        for_row_groups(rows, FLOAT_MR, [&](int row, int some) {
            weigh_rows<FLOAT_MR>(blocks, weights + row * stride, stride, some, keys, width, out + (int64_t)row * width);
        });
    }

  private:
    // Scores of keys, or weights of values, times the scales of their tokens, where elements are codes.
    template <class ScalesOf>
    static void scale(const Read& blocks, float* numbers, int rows, int64_t stride, ScalesOf&& scales_of) {
        if constexpr (SCALES<T> > 0)
            for (int block = 0; block < blocks.count; block++) {
                const float* scales = scales_of(block);
                for (int r = 0; r < rows; r++)
                    for (int i = 0; i < PANEL; i += LANES) {
                        float* at = numbers + r * stride + block * PANEL + i;
                        store(at, load(at) * load(scales + i));
                    }
            }
    }

    template <int MR>
    static void score_rows(const Read& blocks, const float* queries, int rows, int dim, float* scores, int64_t stride) {
        if constexpr (MR > 1)
            if (rows < MR) return score_rows<MR - 1>(blocks, queries, rows, dim, scores, stride);
        constexpr int WIDE = MR <= PAIR_MR || LANES == 16 ? 2 : 1;
        for (int block = 0; block < blocks.count;) {
            const auto panel = [&](int which) { return FloatPanel<T>(blocks.keys(block + which), blocks.read(block + which + BLOCKS_AHEAD)); };
            const FloatPanel<T> panels[2] = {panel(0), panel(1)};
            float* to = scores + block * PANEL;
            if (WIDE == 2 && block + 2 <= blocks.count) {
                multiply<FloatPanel<T>, MR, WIDE, false>(queries, dim, panels, dim, dim, to, stride);
                block += 2;
            } else {
                multiply<FloatPanel<T>, MR, 1, false>(queries, dim, panels, dim, dim, to, stride);
                block++;
            }
        }
    }

    template <int MR>
    static void weigh_rows(const Read& blocks, const float* weights, int64_t stride, int rows, int keys, int width, float* out) {
        if constexpr (MR > 1)
            if (rows < MR) return weigh_rows<MR - 1>(blocks, weights, stride, rows, keys, width, out);
        constexpr int NARROW = PANEL / LANES, WIDE = LANES < 16 ? NARROW : MR > 6 ? 2 : 4;
        int column = 0;
        for (; column + WIDE * LANES <= width; column += WIDE * LANES)
            weigh_columns<MR, WIDE>(weights, stride, blocks, keys, width, column, out);
        for (; column < width; column += PANEL) weigh_columns<MR, NARROW>(weights, stride, blocks, keys, width, column, out);
    }
};

}  // namespace orca
