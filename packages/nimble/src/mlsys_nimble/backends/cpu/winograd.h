// 3x3 convolution with stride 1 by Winograd's minimal filtering (Lavin and Gray 2015): tiles of SIZE x SIZE results from
// (SIZE + 2)^2 products a channel instead of 9 SIZE^2. A unit takes some tiles through all three steps: it transforms
// their pixels into scratch, multiplies each of the transform's points with its own packed matrix, a panel at a time, and
// transforms the products back while they are in the first-level cache.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace nimble {

struct Winograd {
    View x, residual, out;  // [N, C, H, W], channels side by side, C and O multiples of LANES
    const float* weights;   // [points][panels][C][panel], transformed
    const float* bias;      // [O]
    int32_t before[2];      // padding
    Epilogue epilogue;
};
MLSYS_STRUCT(Winograd, x, residual, out, weights, bias, before, epilogue);

constexpr int64_t TRANSFORMED_NBYTES = (LANES == 16 ? 640 : 256) << 10;  // bytes of a work unit's pixels, in the L2 cache
constexpr int64_t MAX_TILES = 48, LEAST_TILES = LANES == 16 ? 16 : 12;

template <int SIZE>
class WinogradKernel : public Kernel {
  public:
    explicit WinogradKernel(const Winograd& w) : w(w), epilogue(w.epilogue) {
        channels = w.x.shape[1], N = w.out.shape[1];
        high = (w.out.shape[2] + SIZE - 1) / SIZE, wide = (w.out.shape[3] + SIZE - 1) / SIZE;
        tiles = w.out.shape[0] * high * wide;
        vecs = N / LANES;
        panels = std::max<int64_t>(vecs / 2, 1);
        const int64_t fitting = TRANSFORMED_NBYTES / (POINTS * channels * (int64_t)sizeof(float));
        const int64_t limit = std::clamp<int64_t>(fitting / 6 * 6, LEAST_TILES, MAX_TILES);
        blocks = (tiles + limit - 1) / limit;
        if (tiles > LEAST_TILES) blocks = (blocks + 1) / 2 * 2;  // two workers are the common case
        most_tiles = (tiles + blocks - 1) / blocks;
        groups = blocks >= 4 ? 1 : std::min<int64_t>(panels, 2);  // groups of panels; each transforms all pixels again, so at most 2
        units = blocks * groups;
        zeros.resize(channels);
        scratch_nbytes = POINTS * most_tiles * (channels + MAX_VECS * LANES) * sizeof(float) + most_tiles * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* pixels = (float*)scratch;                                 // [points][tiles][C]
        float* products = pixels + POINTS * most_tiles * channels;       // [points][tiles][panel]
        const float** rows = (const float**)(products + POINTS * most_tiles * MAX_VECS * LANES);
        alignas(64) const float none[MAX_VECS * LANES] = {};
        const BoundEpilogue as_is;
        int64_t transformed = -1;  // index of the block whose transformed pixels are in scratch; -1: none
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t block = unit / groups, group = unit % groups;
            const int64_t first = tiles * block / blocks, some = tiles * (block + 1) / blocks - first;
            for (int64_t t = 0; t < some && block != transformed; t++) transform(first + t, pixels + t * channels);
            transformed = block;
            for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++) {
                const int panel_vecs = panel + 1 < panels ? 2 : vecs - 2 * (panels - 1);
                Tile tile{};
                tile.taps = 1;
                tile.ldb = panel_vecs * LANES;
                tile.bias = none;
                tile.ldc = tile.N = panel_vecs * LANES;
                for (int point = 0; point < POINTS; point++) {
                    for (int64_t t = 0; t < some; t++) rows[t] = pixels + (point * most_tiles + t) * channels;
                    tile.weights = w.weights + (point * N + panel * 2 * LANES) * channels;
                    tile.c = products + point * most_tiles * panel_vecs * LANES;
                    // Weights of the next point, or of the next panel's first point: too far apart for the hardware
                    // prefetcher.
                    const int64_t next = point + 1 < POINTS ? N : 2 * LANES - (POINTS - 1) * N;
                    tile.prefetch_from = (const char*)(tile.weights + next * channels);
                    multiply_rows(rows, some, channels, tile, as_is, panel_vecs);
                }
                for (int64_t t = 0; t < some; t++)
                    for (int v = 0; v < panel_vecs; v++)
                        finish_tile(
                            first + t, products + (t * panel_vecs + v) * LANES, most_tiles * panel_vecs * LANES,
                            panel * 2 * LANES + v * LANES);
            }
        }
    }

  private:
    static constexpr int REACH = SIZE + 2, POINTS = REACH * REACH;
    // Tiles of 4 are taken at 0, +-P, +-Q and infinity; these round a third as much as the customary 1 and 2, and every
    // constant made of them is exact. packing.py has them too.
    static constexpr float P = 0.625f, Q = 1.5f;

    // Along one dimension: REACH pixels to REACH points, and those of the products to SIZE results.
    static void to_points(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step], c = x[2 * step], d = x[3 * step];
        if constexpr (SIZE == 2) {
            y[0] = a - c, y[1] = b + c, y[2] = c - b, y[3] = b - d;
        } else {
            const vf e = x[4 * step], f = x[5 * step];
            const vf even_p = fma(splat(-Q * Q), c, e), odd_p = fma(splat(-Q * Q), b, d);
            const vf even_q = fma(splat(-P * P), c, e), odd_q = fma(splat(-P * P), b, d);
            y[0] = fma(splat(P * P * Q * Q), a, fma(splat(-P * P - Q * Q), c, e));
            y[1] = fma(splat(P), odd_p, even_p), y[2] = fma(splat(-P), odd_p, even_p);
            y[3] = fma(splat(Q), odd_q, even_q), y[4] = fma(splat(-Q), odd_q, even_q);
            y[5] = fma(splat(P * P * Q * Q), b, fma(splat(-P * P - Q * Q), d, f));
        }
    }
    static void to_results(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step], c = x[2 * step], d = x[3 * step];
        if constexpr (SIZE == 2) {
            y[0] = a + b + c, y[1] = b - c - d;
        } else {
            const vf e = x[4 * step], f = x[5 * step];
            const vf sum_p = b + c, difference_p = b - c, sum_q = d + e, difference_q = d - e;
            y[0] = a + sum_p + sum_q;
            y[1] = fma(splat(P), difference_p, splat(Q) * difference_q);
            y[2] = fma(splat(P * P), sum_p, splat(Q * Q) * sum_q);
            y[3] = fma(splat(P * P * P), difference_p, fma(splat(Q * Q * Q), difference_q, f));
        }
    }

    void transform(int64_t tile, float* to) const {
        const int64_t n = tile / (high * wide), ty = tile / wide % high, tx = tile % wide;
        const float* image = w.x.as<const float>() + n * w.x.strides[0];
        const float* from[POINTS];
        for (int i = 0; i < REACH; i++)
            for (int j = 0; j < REACH; j++) {
                const int64_t y = ty * SIZE - w.before[0] + i, x = tx * SIZE - w.before[1] + j;
                const bool inside = y >= 0 && y < w.x.shape[2] && x >= 0 && x < w.x.shape[3];
                from[i * REACH + j] = inside ? image + y * w.x.strides[2] + x * w.x.strides[3] : zeros.data();
            }
        for (int64_t c = 0; c < channels; c += LANES) {
            vf rows[POINTS];  // [j][i]: rows done, columns not
            for (int j = 0; j < REACH; j++) {
                vf column[REACH];
                for (int i = 0; i < REACH; i++) column[i] = load(from[i * REACH + j] + c);
                to_points(column, 1, rows + j * REACH);
            }
            for (int i = 0; i < REACH; i++) {
                vf points[REACH];
                to_points(rows + i, REACH, points);
                for (int j = 0; j < REACH; j++) store(to + (i * REACH + j) * most_tiles * channels + c, points[j]);
            }
        }
    }

    void finish_tile(int64_t tile, const float* products, int64_t step, int64_t column) const {
        const int64_t n = tile / (high * wide), oy = tile / wide % high * SIZE, ox = tile % wide * SIZE;
        vf rows[REACH * SIZE];  // [j][i]
        for (int j = 0; j < REACH; j++) {
            vf points[REACH];
            for (int i = 0; i < REACH; i++) points[i] = load(products + (i * REACH + j) * step);
            to_results(points, 1, rows + j * SIZE);
        }
        const vf bias = load(w.bias + column);
        const int64_t inside_y = std::min<int64_t>(SIZE, w.out.shape[2] - oy), inside_x = std::min<int64_t>(SIZE, w.out.shape[3] - ox);
        float* out = w.out.as<float>() + n * w.out.strides[0] + oy * w.out.strides[2] + ox * w.out.strides[3] + column;
        const float* residual = nullptr;
        if (epilogue.has_residual)
            residual = w.residual.as<const float>() + n * w.residual.strides[0] + oy * w.residual.strides[2] +
                       ox * w.residual.strides[3] + column;
        for (int i = 0; i < inside_y; i++) {
            vf results[SIZE];
            to_results(rows + i, SIZE, results);
            float sums[SIZE * LANES];
            for (int j = 0; j < SIZE; j++) store(sums + j * LANES, results[j] + bias);
            epilogue.apply(
                sums, LANES, inside_x, residual ? residual + i * w.residual.strides[2] : nullptr, w.residual.strides[3],
                out + i * w.out.strides[2], w.out.strides[3], LANES);
        }
    }

    const Winograd w;
    const BoundEpilogue epilogue;
    int64_t channels, N, high, wide, tiles, vecs, panels, blocks, groups, most_tiles;
    std::vector<float> zeros;
};

}  // namespace nimble
