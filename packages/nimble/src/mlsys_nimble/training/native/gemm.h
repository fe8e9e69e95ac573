// GEMMs of a linear layer's training: rows times weights with an epilogue on each tile, and the gradient of the weights,
// which sums over the rows and gives the bias's gradient besides.
//
// A tile of C stays in registers for KC features, while those features' part of the weights stays in the first-level cache
// for all rows of a unit. B is packed in vectors of columns: [N / LANES][K][LANES].
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <mlsys/gemm.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

constexpr int MAX_MR = LANES == 16 ? 8 : 6;  // of C's tile; with its vectors: as many sums as there are registers for
constexpr int MAX_VECS = LANES == 16 ? 3 : 2;
constexpr int64_t KC = 128;  // features summed before a tile goes back to memory

// Return the offsets of a view's elements, in the order of its dimensions.
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

// One tile: C = epilogue(init + A B). Row r of A is a[r], or with MR rows packed together a(r, k) is a[0][k * MR + r].
struct GemmTile {
    const float* a[MAX_MR];
    const float* b;
    int64_t b_stride;  // floats from one vector of columns to the next
    int64_t K;
    const float* init;  // null: zeros
    int64_t ld_init;    // 0: one row for all
    float* c;
    int64_t ldc;
    const float* residual = nullptr;
    const float* mask = nullptr;  // mask of a ReLU: 0 where this is not positive
    int64_t ld_residual = 0, ld_mask = 0;
    float least = -INFINITY;
};

template <int MR, int VECS, bool IS_PACKED>
void multiply_tile(const GemmTile& tile) {
    vf sums[MR * VECS];
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE {
        sums[i] = tile.init ? load(tile.init + i / VECS * tile.ld_init + i % VECS * LANES) : vf{};
    });
    const float* a[MR];
    for (int r = 0; r < MR; r++) a[r] = tile.a[r];
    const float *b = tile.b, *packed = tile.a[0];
    const int64_t b_stride = tile.b_stride;
    micro_kernel<MR, VECS>(
        sums, tile.K, [&](auto r, int64_t k) MLSYS_INLINE { return IS_PACKED ? packed[k * MR + r] : a[r][k]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return load(b + k * LANES + v * b_stride); }, []() MLSYS_INLINE {});
    const vf least = splat(tile.least);
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE {
        constexpr int r = i / VECS, v = i % VECS;
        vf y = sums[i];
        if (tile.residual) y += load(tile.residual + r * tile.ld_residual + v * LANES);
        y = larger(least, y);
        if (tile.mask) y = chosen(load(tile.mask + r * tile.ld_mask + v * LANES) <= vf{}, vf{}, y);
        store(tile.c + r * tile.ldc + v * LANES, y);
    });
}

using MultiplyTile = void (*)(const GemmTile&);

template <bool IS_PACKED, int... I>
constexpr MultiplyTile multiply_tile_of(int mr, int vecs, std::integer_sequence<int, I...>) {
    constexpr MultiplyTile table[] = {multiply_tile<I / MAX_VECS + 1, I % MAX_VECS + 1, IS_PACKED>...};
    return table[(mr - 1) * MAX_VECS + vecs - 1];
}

template <bool IS_PACKED>
inline MultiplyTile multiply_tile_of(int mr, int vecs) {
    return multiply_tile_of<IS_PACKED>(mr, vecs, std::make_integer_sequence<int, MAX_MR * MAX_VECS>());
}

struct Gemm {
    View a;                    // the rows' first features, [rows...]; features lie side by side
    View out, residual, mask;  // [rows], of the rows' first columns, evenly spaced; rank 0: none
    View bias;                 // [N]; rank 0: none
    const float* weights;      // packed
    int64_t K, N;              // N: whole vectors
    int32_t is_relu;
};
MLSYS_STRUCT(Gemm, a, out, residual, mask, bias, weights, K, N, is_relu);

class GemmKernel : public Kernel {
  public:
    explicit GemmKernel(const Gemm& p) : p(p), rows(places_of(p.a)) {
        units = (rows.size() + UNIT_ROWS - 1) / UNIT_ROWS;
        parts = (p.K + KC - 1) / KC;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t n = 0; n < p.N; n += MAX_VECS * LANES) multiply(unit, part, n);
    }

  private:
    static constexpr int64_t UNIT_ROWS = 12 * MAX_MR;

    // Some features and columns of all rows of a unit.
    void multiply(int64_t unit, int64_t part, int64_t n) const {
        const int64_t first_k = p.K * part / parts, stop = std::min<int64_t>(rows.size(), (unit + 1) * UNIT_ROWS);
        const int vecs = std::min<int64_t>(MAX_VECS, (p.N - n) / LANES);
        const bool is_first = part == 0, is_last = part + 1 == parts;
        const float *a = p.a.as<const float>() + first_k, *bias = at(p.bias, 0, n);
        GemmTile tile;
        tile.b = p.weights + n * p.K + first_k * LANES;
        tile.b_stride = p.K * LANES;
        tile.K = p.K * (part + 1) / parts - first_k;
        tile.ldc = p.out.strides[0];
        tile.ld_init = is_first ? 0 : tile.ldc;
        if (is_last && p.is_relu) tile.least = 0;
        for (int64_t row = unit * UNIT_ROWS; row < stop; row += MAX_MR) {
            const int mr = std::min<int64_t>(MAX_MR, stop - row);
            for (int r = 0; r < mr; r++) tile.a[r] = a + rows[row + r];
            tile.c = p.out.as<float>() + row * tile.ldc + n;
            tile.init = is_first ? bias : tile.c;
            if (is_last) {
                tile.residual = at(p.residual, row, n), tile.ld_residual = p.residual.strides[0];
                tile.mask = at(p.mask, row, n), tile.ld_mask = p.mask.strides[0];
            }
            multiply_tile_of<false>(mr, vecs)(tile);
        }
    }

    static const float* at(const View& view, int64_t m, int64_t n) {
        return view.rank ? view.as<const float>() + m * view.strides[0] + n : nullptr;
    }

    const Gemm p;
    const std::vector<int64_t> rows;
    int64_t parts;
};

struct WeightGradient {  // weight [M, N] = dy^T [M, K] x [K, N]; K: rows of dy and x
    View dy, x;      // the rows' first elements, of one shape; a row lies side by side, in whole vectors
    View weight;     // result [M, N], row by row
    View bias;       // result [M]: the sum of dy over the rows; rank 0: not wanted
    int64_t M, N, threads;
};
MLSYS_STRUCT(WeightGradient, dy, x, weight, bias, M, N, threads);

// A unit is some columns of dy, which are rows of the gradient. KC rows at a time of dy and of x are packed for tiles; the
// result holds the sums.
class WeightGradientKernel : public Kernel {
  public:
    explicit WeightGradientKernel(const WeightGradient& g) : g(g), dy_rows(places_of(g.dy)), x_rows(places_of(g.x)) {
        const int64_t wanted = std::max(g.threads, (g.M + MAX_M - 1) / MAX_M);
        some = (g.M + wanted - 1) / wanted;
        some = (some + 3 * LANES - 1) / (3 * LANES) * (3 * LANES);  // whole tiles and vectors
        units = (g.M + some - 1) / some;
        scratch_nbytes = (some / MAX_MR * A_STEP + g.N / LANES * B_STEP) * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float *a = (float*)scratch, *b = a + some / MAX_MR * A_STEP;
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t k = 0; k < (int64_t)x_rows.size(); k += KC) {
                const int64_t first = unit * some, stop = std::min(g.M, first + some), K = std::min<int64_t>(KC, x_rows.size() - k);
                pack_x(k, K, b);
                pack_dy(k, K, first, stop, a);
                for (int64_t n = 0; n < g.N; n += MAX_VECS * LANES)
                    for (int64_t m = first; m < stop; m += MAX_MR)
                        multiply(k, K, m, std::min<int64_t>(MAX_MR, stop - m), n, a + (m - first) / MAX_MR * A_STEP, b);
            }
    }

  private:
    static constexpr int64_t MAX_M = 256;
    // Distance between packed tiles or vectors: no power of two, which would map to the same cache sets.
    static constexpr int64_t A_STEP = KC * MAX_MR + LANES, B_STEP = (KC + 1) * LANES;

    void pack_x(int64_t first_k, int64_t K, float* to) const {
        const float* x = g.x.as<const float>();
        for (int64_t k = 0; k < K; k++) {
            const float* from = x + x_rows[first_k + k];
            for (int64_t i = 0; i < g.N / LANES; i++) store(to + i * B_STEP + k * LANES, load(from + i * LANES));
        }
    }

    void pack_dy(int64_t first_k, int64_t K, int64_t first, int64_t stop, float* to) const {
        const float* dy = g.dy.as<const float>() + first;
        float* bias = g.bias.rank ? g.bias.as<float>() : nullptr;
        if (bias && first_k == 0) std::fill(bias + first, bias + stop, 0.0f);
        for (int64_t k = 0; k < K; k++) {
            const float* from = dy + dy_rows[first_k + k];
            int64_t tile = 0;
            for (; (tile + 1) * MAX_MR <= stop - first; tile++)
                std::memcpy(to + tile * A_STEP + k * MAX_MR, from + tile * MAX_MR, MAX_MR * sizeof(float));
            const int64_t rest = stop - first - tile * MAX_MR;
            for (int64_t r = 0; r < rest; r++) to[tile * A_STEP + k * rest + r] = from[tile * MAX_MR + r];
            if (bias)
                for (int64_t i = first; i < stop; i += LANES) store(bias + i, load(bias + i) + load(from + i - first));
        }
    }

    void multiply(int64_t k, int64_t K, int64_t m, int mr, int64_t n, const float* a, const float* b) const {
        GemmTile tile;
        tile.a[0] = a;
        tile.b = b + n / LANES * B_STEP;
        tile.b_stride = B_STEP;
        tile.K = K;
        tile.c = g.weight.as<float>() + m * g.N + n;
        tile.ldc = tile.ld_init = g.N;
        tile.init = k ? tile.c : nullptr;
        multiply_tile_of<true>(mr, std::min<int64_t>(MAX_VECS, (g.N - n) / LANES))(tile);
    }

    const WeightGradient g;
    const std::vector<int64_t> dy_rows, x_rows;
    int64_t some;
};

}  // namespace nimble
