// Products of a linear layer's training: rows times weights with what follows applied to a tile before it is stored, and
// the gradient of the weights, which sums over the rows and gives the bias's gradient besides.
//
// A tile of the result stays in registers for some features, while those features' part of the weights stays in the
// first-level cache for all rows of a unit. The right operand is packed in vectors of columns: [columns / LANES][depth][LANES].
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <mlsys/gemm.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

constexpr int TILE_ROWS = LANES == 16 ? 8 : 6;  // of the result; with its vectors: as many sums as there are registers for
constexpr int TILE_VECS = LANES == 16 ? 3 : 2;
constexpr int64_t PART = 128;                   // features summed before a tile goes back to memory

// The places of a view's elements, in the order of its dimensions.
inline std::vector<int64_t> places_of(const View& view) {
    std::vector<int64_t> places{0};
    for (int d = 0; d < view.rank; d++) {
        std::vector<int64_t> longer;
        for (int64_t place : places)
            for (int64_t i = 0; i < view.shape[d]; i++) longer.push_back(place + i * view.strides[d]);
        places = std::move(longer);
    }
    return places;
}

// One tile of sums over t < depth of a(row, t) b(t, column), from `start` to `out`. Row r's features are a[r] + t, or with
// ROWS of them packed together a[0] + t * ROWS + r.
struct GemmTile {
    const float* a[TILE_ROWS];
    const float* b;
    int64_t b_step;  // from one vector of columns to the next
    int64_t depth;
    const float* start;  // [row][column]; null: zeros
    int64_t start_step;  // 0: one row for all
    float* out;
    int64_t out_step;
    const float* residual = nullptr;
    const float* mask = nullptr;  // zeros where it is not above zero
    int64_t residual_step = 0, mask_step = 0;
    float least = -INFINITY;
};

template <int ROWS, int VECS, bool IS_PACKED>
void multiply_tile(const GemmTile& tile) {
    vf sums[ROWS * VECS];
    unroll<ROWS * VECS>([&](auto i) MLSYS_INLINE {
        sums[i] = tile.start ? load(tile.start + i / VECS * tile.start_step + i % VECS * LANES) : vf{};
    });
    const float* a[ROWS];
    for (int r = 0; r < ROWS; r++) a[r] = tile.a[r];
    const float *b = tile.b, *packed = tile.a[0];
    const int64_t step = tile.b_step;
    multiply_add<ROWS, VECS>(
        sums, tile.depth, [&](auto r, int64_t k) MLSYS_INLINE { return IS_PACKED ? packed[k * ROWS + r] : a[r][k]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return load(b + k * LANES + v * step); }, []() MLSYS_INLINE {});
    const vf least = splat(tile.least);
    unroll<ROWS * VECS>([&](auto i) MLSYS_INLINE {
        constexpr int r = i / VECS, v = i % VECS;
        vf y = sums[i];
        if (tile.residual) y += load(tile.residual + r * tile.residual_step + v * LANES);
        y = larger(least, y);
        if (tile.mask) y = chosen(load(tile.mask + r * tile.mask_step + v * LANES) <= vf{}, vf{}, y);
        store(tile.out + r * tile.out_step + v * LANES, y);
    });
}

using MultiplyTile = void (*)(const GemmTile&);

template <bool IS_PACKED, int... I>
constexpr MultiplyTile multiply_tile_of(int rows, int vecs, std::integer_sequence<int, I...>) {
    constexpr MultiplyTile table[] = {multiply_tile<I / TILE_VECS + 1, I % TILE_VECS + 1, IS_PACKED>...};
    return table[(rows - 1) * TILE_VECS + vecs - 1];
}

template <bool IS_PACKED>
inline MultiplyTile multiply_tile_of(int rows, int vecs) {
    return multiply_tile_of<IS_PACKED>(rows, vecs, std::make_integer_sequence<int, TILE_ROWS * TILE_VECS>());
}

struct Gemm {
    View a;                    // the rows' first features, [rows...]; features lie side by side
    View out, residual, mask;  // [rows], of the rows' first columns, evenly spaced; rank 0: none
    View bias;                 // [columns]; rank 0: none
    const float* weights;      // packed
    int64_t depth, columns;    // columns: whole vectors
    int32_t is_relu;
};
MLSYS_STRUCT(Gemm, a, out, residual, mask, bias, weights, depth, columns, is_relu);

class GemmKernel : public Kernel {
  public:
    explicit GemmKernel(const Gemm& p) : p(p), rows(places_of(p.a)) {
        units = (rows.size() + UNIT_ROWS - 1) / UNIT_ROWS;
        parts = (p.depth + PART - 1) / PART;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t column = 0; column < p.columns; column += TILE_VECS * LANES) multiply(unit, part, column);
    }

  private:
    static constexpr int64_t UNIT_ROWS = 12 * TILE_ROWS;

    // Some features and columns of all rows of a unit.
    void multiply(int64_t unit, int64_t part, int64_t column) const {
        const int64_t first = p.depth * part / parts, stop = std::min<int64_t>(rows.size(), (unit + 1) * UNIT_ROWS);
        const int vecs = std::min<int64_t>(TILE_VECS, (p.columns - column) / LANES);
        const bool is_first = part == 0, is_last = part + 1 == parts;
        const float *a = p.a.as<const float>() + first, *bias = at(p.bias, 0, column);
        GemmTile tile;
        tile.b = p.weights + column * p.depth + first * LANES;
        tile.b_step = p.depth * LANES;
        tile.depth = p.depth * (part + 1) / parts - first;
        tile.out_step = p.out.strides[0];
        tile.start_step = is_first ? 0 : tile.out_step;
        if (is_last && p.is_relu) tile.least = 0;
        for (int64_t row = unit * UNIT_ROWS; row < stop; row += TILE_ROWS) {
            const int some = std::min<int64_t>(TILE_ROWS, stop - row);
            for (int r = 0; r < some; r++) tile.a[r] = a + rows[row + r];
            tile.out = p.out.as<float>() + row * tile.out_step + column;
            tile.start = is_first ? bias : tile.out;
            if (is_last) {
                tile.residual = at(p.residual, row, column), tile.residual_step = p.residual.strides[0];
                tile.mask = at(p.mask, row, column), tile.mask_step = p.mask.strides[0];
            }
            multiply_tile_of<false>(some, vecs)(tile);
        }
    }

    static const float* at(const View& view, int64_t row, int64_t column) {
        return view.rank ? view.as<const float>() + row * view.strides[0] + column : nullptr;
    }

    const Gemm p;
    const std::vector<int64_t> rows;
    int64_t parts;
};

struct WeightGradient {
    View dy, x;      // the rows' first elements, of one shape; columns and features lie side by side, in whole vectors
    View weight;     // result [columns, features], row by row
    View bias;       // result [columns]: the sum of dy over the rows; rank 0: not wanted
    int64_t columns, features, threads;
};
MLSYS_STRUCT(WeightGradient, dy, x, weight, bias, columns, features, threads);

// A unit is some columns of dy. Some rows at a time of dy and of x are packed for tiles; the result holds the sums.
class WeightGradientKernel : public Kernel {
  public:
    explicit WeightGradientKernel(const WeightGradient& g) : g(g), dy_rows(places_of(g.dy)), x_rows(places_of(g.x)) {
        const int64_t wanted = std::max(g.threads, (g.columns + MOST_COLUMNS - 1) / MOST_COLUMNS);
        some = (g.columns + wanted - 1) / wanted;
        some = (some + 3 * LANES - 1) / (3 * LANES) * (3 * LANES);  // whole tiles and vectors
        units = (g.columns + some - 1) / some;
        scratch_nbytes = (some / TILE_ROWS * A_STEP + g.features / LANES * B_STEP) * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float *a = (float*)scratch, *b = a + some / TILE_ROWS * A_STEP;
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t row = 0; row < (int64_t)x_rows.size(); row += PART) {
                const int64_t first = unit * some, count = std::min<int64_t>(PART, x_rows.size() - row);
                const int64_t stop = std::min(g.columns, first + some);
                pack_x(row, count, b);
                pack_dy(row, count, first, stop, a);
                for (int64_t at = 0; at < g.features; at += TILE_VECS * LANES)
                    for (int64_t column = first; column < stop; column += TILE_ROWS)
                        multiply(row, count, column, std::min<int64_t>(TILE_ROWS, stop - column), at, a + (column - first) / TILE_ROWS * A_STEP, b);
            }
    }

  private:
    static constexpr int64_t MOST_COLUMNS = 256;
    // From one packed tile or vector to the next: not a power of two, which would fall on the same places of a cache.
    static constexpr int64_t A_STEP = PART * TILE_ROWS + LANES, B_STEP = (PART + 1) * LANES;

    void pack_x(int64_t row, int64_t count, float* to) const {
        const float* x = g.x.as<const float>();
        for (int64_t t = 0; t < count; t++) {
            const float* from = x + x_rows[row + t];
            for (int64_t i = 0; i < g.features / LANES; i++) store(to + i * B_STEP + t * LANES, load(from + i * LANES));
        }
    }

    void pack_dy(int64_t row, int64_t count, int64_t first, int64_t stop, float* to) const {
        const float* dy = g.dy.as<const float>() + first;
        float* bias = g.bias.rank ? g.bias.as<float>() : nullptr;
        if (bias && row == 0) std::fill(bias + first, bias + stop, 0.0f);
        for (int64_t t = 0; t < count; t++) {
            const float* from = dy + dy_rows[row + t];
            int64_t tile = 0;
            for (; (tile + 1) * TILE_ROWS <= stop - first; tile++)
                std::memcpy(to + tile * A_STEP + t * TILE_ROWS, from + tile * TILE_ROWS, TILE_ROWS * sizeof(float));
            const int64_t rest = stop - first - tile * TILE_ROWS;
            for (int64_t r = 0; r < rest; r++) to[tile * A_STEP + t * rest + r] = from[tile * TILE_ROWS + r];
            if (bias)
                for (int64_t i = first; i < stop; i += LANES) store(bias + i, load(bias + i) + load(from + i - first));
        }
    }

    void multiply(int64_t row, int64_t count, int64_t column, int rows, int64_t feature, const float* a, const float* b) const {
        GemmTile tile;
        tile.a[0] = a;
        tile.b = b + feature / LANES * B_STEP;
        tile.b_step = B_STEP;
        tile.depth = count;
        tile.out = g.weight.as<float>() + column * g.features + feature;
        tile.out_step = tile.start_step = g.features;
        tile.start = row ? tile.out : nullptr;
        multiply_tile_of<true>(rows, std::min<int64_t>(TILE_VECS, (g.features - feature) / LANES))(tile);
    }

    const WeightGradient g;
    const std::vector<int64_t> dy_rows, x_rows;
    int64_t some;
};

}  // namespace nimble
