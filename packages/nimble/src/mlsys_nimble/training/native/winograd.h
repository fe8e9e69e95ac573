// Training with Winograd's convolutions (native/winograd.h), whose weights change at each step: transform of the
// weights, and their gradient. The gradient is the adjoint of the same minimal filtering: with U the transformed
// weights, dU sums over all tiles the products of x's points with those of dy, and dW = G^T dU G.
#pragma once

#include <algorithm>
#include <vector>

#include <mlsys/gemm.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

using mlsys::fma;
using mlsys::LANES;
using mlsys::load;
using mlsys::splat;
using mlsys::store;
using mlsys::vf;

struct WinogradWeights {
    View weight;        // [O, C, 3, 3]
    View bias;          // [O]; rank 0: none
    float* out;         // [points][panels][K][panel], as native/winograd.h reads it
    float* out_bias;    // [O]
    int32_t is_turned;  // 1: input gradient; output channels are summed and taps reversed
};
MLSYS_STRUCT(WinogradWeights, weight, bias, out, out_bias, is_turned);

struct WinogradGradient {
    View dy, x;  // [N, O, H', W'], [N, C, H, W], channels side by side and a whole number of vectors
    View out;    // [O, C, 3, 3], row by row
    int32_t before[2];
};
MLSYS_STRUCT(WinogradGradient, dy, x, out, before);

// Points of tiles of SIZE as in native/winograd.h: 0, +-P, +-Q and infinity, or 0, +-1 and infinity.
template <int SIZE>
struct Points {
    static constexpr int REACH = SIZE + 2, COUNT = REACH * REACH;
    static constexpr double P = 0.625, Q = 1.5;

    static vf sum(vf a, double x, vf b, double y, vf c, double z) {
        return fma(a, splat((float)x), fma(b, splat((float)y), c * splat((float)z)));
    }

    // Three taps to the points (Lavin and Gray 2015, section 4).
    static void of_taps(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step], c = x[2 * step];
        if constexpr (SIZE == 2) {
            const vf ends = (a + c) * splat(0.5f), middle = b * splat(0.5f);
            y[0] = a, y[1] = ends + middle, y[2] = ends - middle, y[3] = c;
        } else {
            constexpr double p = 1 / (2 * P * P * (P * P - Q * Q)), q = 1 / (2 * Q * Q * (Q * Q - P * P));
            y[0] = a * splat((float)(1 / (P * P * Q * Q)));
            y[1] = sum(a, p, b, p * P, c, p * P * P), y[2] = sum(a, p, b, -p * P, c, p * P * P);
            y[3] = sum(a, q, b, q * Q, c, q * Q * Q), y[4] = sum(a, q, b, -q * Q, c, q * Q * Q);
            y[5] = c;
        }
    }
    // Transpose of the transform above.
    static void to_taps(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step], c = x[2 * step], d = x[3 * step];
        if constexpr (SIZE == 2) {
            const vf half = splat(0.5f), ends = (b + c) * half;
            y[0] = a + ends, y[1] = (b - c) * half, y[2] = ends + d;
        } else {
            constexpr double p = 1 / (2 * P * P * (P * P - Q * Q)), q = 1 / (2 * Q * Q * (Q * Q - P * P));
            const vf e = x[4 * step], f = x[5 * step];
            const vf sum_p = b + c, sum_q = d + e;
            y[0] = sum(a, 1 / (P * P * Q * Q), sum_p, p, sum_q, q);
            y[1] = fma(b - c, splat((float)(p * P)), (d - e) * splat((float)(q * Q)));
            y[2] = sum(sum_p, p * P * P, sum_q, q * Q * Q, f, 1);
        }
    }
    // Pixels of x to points.
    static void of_pixels(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step], c = x[2 * step], d = x[3 * step];
        if constexpr (SIZE == 2) {
            y[0] = a - c, y[1] = b + c, y[2] = c - b, y[3] = b - d;
        } else {
            constexpr float pp = (float)(P * P), qq = (float)(Q * Q);
            const vf e = x[4 * step], f = x[5 * step];
            const vf even_p = fma(splat(-qq), c, e), odd_p = fma(splat(-qq), b, d);
            const vf even_q = fma(splat(-pp), c, e), odd_q = fma(splat(-pp), b, d);
            y[0] = fma(splat(pp * qq), a, fma(splat(-pp - qq), c, e));
            y[1] = fma(splat((float)P), odd_p, even_p), y[2] = fma(splat((float)-P), odd_p, even_p);
            y[3] = fma(splat((float)Q), odd_q, even_q), y[4] = fma(splat((float)-Q), odd_q, even_q);
            y[5] = fma(splat(pp * qq), b, fma(splat(-pp - qq), d, f));
        }
    }
    // Pixels of dy to points: the transpose of what makes results of points.
    static void of_results(const vf* x, int step, vf* y) {
        const vf a = x[0], b = x[step];
        if constexpr (SIZE == 2) {
            y[0] = a, y[1] = a + b, y[2] = a - b, y[3] = -b;
        } else {
            const vf c = x[2 * step], d = x[3 * step];
            const vf even_p = fma(splat((float)(P * P)), c, a), odd_p = fma(splat((float)(P * P)), d, b) * splat((float)P);
            const vf even_q = fma(splat((float)(Q * Q)), c, a), odd_q = fma(splat((float)(Q * Q)), d, b) * splat((float)Q);
            y[0] = a, y[1] = even_p + odd_p, y[2] = even_p - odd_p, y[3] = even_q + odd_q, y[4] = even_q - odd_q, y[5] = d;
        }
    }
};

template <int SIZE>
class WinogradWeightsKernel : public Kernel {
  public:
    explicit WinogradWeightsKernel(const WinogradWeights& w) : w(w) {
        K = w.weight.shape[w.is_turned ? 0 : 1], N = w.weight.shape[w.is_turned ? 1 : 0];
        units = K;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        using At = Points<SIZE>;
        const float* weight = w.weight.as<const float>();
        const int64_t vecs = N / LANES, panels = std::max<int64_t>(vecs / 2, 1), *step = w.weight.strides;
        if (begin == 0 && w.bias.rank) std::copy_n(w.bias.as<const float>(), N, w.out_bias);
        for (int64_t k = begin; k < end; k++)
            for (int64_t v = 0; v < vecs; v++) {
                float gathered[9][LANES];
                for (int i = 0; i < LANES; i++) {
                    const int64_t column = v * LANES + i;
                    const float* from = weight + (w.is_turned ? k * step[0] + column * step[1] : column * step[0] + k * step[1]);
                    for (int tap = 0; tap < 9; tap++)
                        gathered[w.is_turned ? 8 - tap : tap][i] = from[tap / 3 * step[2] + tap % 3 * step[3]];
                }
                vf taps[9], rows[3 * At::REACH];  // rows: [x][i]
                for (int tap = 0; tap < 9; tap++) taps[tap] = load(gathered[tap]);
                for (int x = 0; x < 3; x++) At::of_taps(taps + x, 3, rows + x * At::REACH);
                const int64_t panel = std::min(v / 2, panels - 1), width = (panel + 1 < panels ? 2 : vecs - 2 * (panels - 1)) * LANES;
                float* out = w.out + (panel * 2 * K + v - panel * 2) * LANES + k * width;
                for (int i = 0; i < At::REACH; i++) {
                    vf points[At::REACH];
                    At::of_taps(rows + i, At::REACH, points);
                    for (int j = 0; j < At::REACH; j++) store(out + (i * At::REACH + j) * K * N, points[j]);
                }
            }
    }

  private:
    const WinogradWeights w;
    int64_t K, N;
};

constexpr int64_t GRADIENT_TILES_NBYTES = 768 << 10;  // bytes of one block's transformed pixels of x and dy
constexpr int64_t GRADIENT_SUMS_NBYTES = 4 << 20;     // bytes of all work units' sums, unless there are only two units

template <int SIZE>
class WinogradWeightGradient : public Kernel {
  public:
    explicit WinogradWeightGradient(const WinogradGradient& g) : g(g), inputs(g.x.shape[1]), outputs(g.dy.shape[1]) {
        high = (g.dy.shape[2] + SIZE - 1) / SIZE, wide = (g.dy.shape[3] + SIZE - 1) / SIZE;
        tiles = g.dy.shape[0] * high * wide;
        const int64_t sums_nbytes = At::COUNT * inputs * outputs * sizeof(float);
        units = std::min(tiles, std::clamp<int64_t>(GRADIENT_SUMS_NBYTES / sums_nbytes, 2, 8) / 2 * 2);
        const int64_t fitting = GRADIENT_TILES_NBYTES / (At::COUNT * (inputs + outputs) * (int64_t)sizeof(float));
        const int64_t longest = (tiles + units - 1) / units;
        const int64_t blocks = (longest + std::max<int64_t>(fitting, 24) - 1) / std::max<int64_t>(fitting, 24);
        most_tiles = (longest + blocks - 1) / blocks;
        scratch_nbytes = At::COUNT * most_tiles * (inputs + outputs) * sizeof(float);
        sums.resize(units * At::COUNT * inputs * outputs);
        zeros.resize(std::max(inputs, outputs));
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* pixels = (float*)scratch;                            // [points][tiles][C]
        float* results = pixels + At::COUNT * most_tiles * inputs;  // [points][tiles][O]
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t last = tiles * (unit + 1) / units;
            for (int64_t first = tiles * unit / units, start = first; first < last; first += most_tiles) {
                const int64_t some = std::min(most_tiles, last - first);
                for (int64_t t = 0; t < some; t++) {
                    transform<At::REACH>(g.x, inputs, first + t, g.before[0], g.before[1], pixels + t * inputs, At::of_pixels);
                    transform<SIZE>(g.dy, outputs, first + t, 0, 0, results + t * outputs, At::of_results);
                }
                for (int point = 0; point < At::COUNT; point++)
                    multiply(
                        pixels + point * most_tiles * inputs, results + point * most_tiles * outputs, some, first > start,
                        &sums[(unit * At::COUNT + point) * inputs * outputs]);
            }
        }
    }

    // Gradient of one input channel's weights.
    void finish(int64_t c) const {
        for (int64_t o = 0; o < outputs; o += LANES) {
            vf rows[At::REACH * 3];  // [j][tap]
            for (int j = 0; j < At::REACH; j++) {
                vf points[At::REACH] = {};
                for (int64_t unit = 0; unit < units; unit++)
                    for (int i = 0; i < At::REACH; i++)
                        points[i] += load(&sums[((unit * At::COUNT + i * At::REACH + j) * inputs + c) * outputs + o]);
                At::to_taps(points, 1, rows + j * 3);
            }
            float taps[9][LANES];
            for (int y = 0; y < 3; y++) {
                vf made[3];
                At::to_taps(rows + y, 3, made);
                for (int x = 0; x < 3; x++) store(taps[y * 3 + x], made[x]);
            }
            float* out = g.out.as<float>() + (o * inputs + c) * 9;
            for (int i = 0; i < LANES; i++)
                for (int tap = 0; tap < 9; tap++) out[i * inputs * 9 + tap] = taps[tap][i];
        }
    }

    const WinogradGradient g;
    const int64_t inputs, outputs;

  private:
    using At = Points<SIZE>;

    // A tile of WINDOW x WINDOW pixels to its points.
    template <int WINDOW, class F>
    void transform(const View& view, int64_t channels, int64_t tile, int64_t up, int64_t left, float* to, F&& points_of) const {
        const int64_t n = tile / (high * wide), ty = tile / wide % high, tx = tile % wide;
        const float* image = view.as<const float>() + n * view.shape[2] * view.shape[3] * channels;
        const float* from[WINDOW * WINDOW];
        for (int i = 0; i < WINDOW; i++)
            for (int j = 0; j < WINDOW; j++) {
                const int64_t y = ty * SIZE - up + i, x = tx * SIZE - left + j;
                const bool is_inside = y >= 0 && y < view.shape[2] && x >= 0 && x < view.shape[3];
                from[i * WINDOW + j] = is_inside ? image + (y * view.shape[3] + x) * channels : zeros.data();
            }
        for (int64_t c = 0; c < channels; c += LANES) {
            vf rows[WINDOW * At::REACH];  // [j][i]
            for (int j = 0; j < WINDOW; j++) {
                vf column[WINDOW];
                for (int i = 0; i < WINDOW; i++) column[i] = load(from[i * WINDOW + j] + c);
                points_of(column, 1, rows + j * At::REACH);
            }
            for (int i = 0; i < At::REACH; i++) {
                vf points[At::REACH];
                points_of(rows + i, At::REACH, points);
                for (int j = 0; j < At::REACH; j++) store(to + (i * At::REACH + j) * most_tiles * channels + c, points[j]);
            }
        }
    }

    // C [inputs][outputs] = or += x^T [inputs][K] times dy [K][outputs], four rows and two vectors at a time; K: tiles.
    void multiply(const float* x, const float* dy, int64_t K, bool adds, float* c) const {
        int64_t n = 0;
        for (; n + 2 * LANES <= outputs; n += 2 * LANES)
            for (int64_t m = 0; m < inputs; m += 4) multiply_tile<4, 2>(x + m, dy + n, K, adds, c + m * outputs + n);
        for (; n < outputs; n += LANES)
            for (int64_t m = 0; m < inputs; m += 8) multiply_tile<8, 1>(x + m, dy + n, K, adds, c + m * outputs + n);
    }
    template <int MR, int VECS>
    void multiply_tile(const float* x, const float* dy, int64_t K, bool adds, float* c) const {
        vf sums[MR * VECS];
        const auto at = [&](int i) { return c + i / VECS * outputs + i % VECS * LANES; };
        unroll<MR * VECS>([&](auto i) MLSYS_INLINE { sums[i] = adds ? load(at(i)) : vf{}; });
        micro_kernel<MR, VECS>(
            sums, K, [&](auto r, int64_t k) MLSYS_INLINE { return x[k * inputs + r]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(dy + k * outputs + v * LANES); }, []() MLSYS_INLINE {});
        unroll<MR * VECS>([&](auto i) MLSYS_INLINE { store(at(i), sums[i]); });
    }

    int64_t high, wide, tiles, most_tiles;
    mutable std::vector<float> sums;  // [units][points][C][O]
    std::vector<float> zeros;
};

// One unit per input channel: joins the sums.
template <int SIZE>
class WinogradWeightFinish : public Kernel {
  public:
    explicit WinogradWeightFinish(const WinogradWeightGradient<SIZE>* of) : of(of) { units = of->inputs; }
    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t c = begin; c < end; c++) of->finish(c);
    }

  private:
    const WinogradWeightGradient<SIZE>* of;
};

}  // namespace nimble
