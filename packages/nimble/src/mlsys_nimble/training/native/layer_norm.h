// Layer norm of training, which keeps each row's mean and 1 / standard deviation, and its gradients. Rows lie anywhere;
// their elements lie side by side, in whole vectors. The weights' gradients are summed over some rows each, and then all.
#pragma once

#include <cmath>

#include "gemm.h"

namespace nimble {

struct TrainingLayerNorm {
    View x, y;          // the rows' first elements, [rows...]; of the gradients y is dx
    View mean, rstd;    // [rows...]; results forward
    View dy;            // of gradients: as x
    View weight, bias;  // [width]; forward
    View dweight, dbias;
    int64_t width;
    float eps;
};
MLSYS_STRUCT(TrainingLayerNorm, x, y, mean, rstd, dy, weight, bias, dweight, dbias, width, eps);

class LayerNormRows : public Kernel {
  public:
    explicit LayerNormRows(const TrainingLayerNorm& n)
        : n(n), x_rows(places_of(n.x)), y_rows(places_of(n.y)), means(places_of(n.mean)), scales(places_of(n.rstd)) {
        units = (x_rows.size() + SOME_ROWS - 1) / SOME_ROWS;
    }

  protected:
    static constexpr int64_t SOME_ROWS = 64;

    int64_t stop(int64_t unit) const { return std::min<int64_t>(x_rows.size(), (unit + 1) * SOME_ROWS); }

    const TrainingLayerNorm n;
    const std::vector<int64_t> x_rows, y_rows, means, scales;
};

class LayerNormForward : public LayerNormRows {
  public:
    using LayerNormRows::LayerNormRows;

    void run(int64_t begin, int64_t end, void*) const override {
        const float *weight = n.weight.as<const float>(), *bias = n.bias.as<const float>();
        for (int64_t row = begin * SOME_ROWS; row < stop(end - 1); row++) {
            const float* x = n.x.as<const float>() + x_rows[row];
            float* y = n.y.as<float>() + y_rows[row];
            vf total{}, squares{};
            for (int64_t i = 0; i < n.width; i += LANES) total += load(x + i);
            const float mean = sum(total) / n.width;
            for (int64_t i = 0; i < n.width; i += LANES) {
                const vf away = load(x + i) - splat(mean);
                squares = fma(away, away, squares);
            }
            const float rstd = 1.0f / std::sqrt(sum(squares) / n.width + n.eps);
            for (int64_t i = 0; i < n.width; i += LANES)
                store(y + i, fma((load(x + i) - splat(mean)) * splat(rstd), load(weight + i), load(bias + i)));
            n.mean.as<float>()[means[row]] = mean;
            n.rstd.as<float>()[scales[row]] = rstd;
        }
    }
};

class LayerNormBackward : public LayerNormRows {
  public:
    explicit LayerNormBackward(const TrainingLayerNorm& n) : LayerNormRows(n), dy_rows(places_of(n.dy)), sums(2 * units * n.width) {}

    void run(int64_t begin, int64_t end, void*) const override {
        const float* weight = n.weight.as<const float>();
        for (int64_t unit = begin; unit < end; unit++) {
            float *dweight = &sums[2 * unit * n.width], *dbias = dweight + n.width;
            std::fill_n(dweight, 2 * n.width, 0.0f);
            for (int64_t row = unit * SOME_ROWS; row < stop(unit); row++) {
                const float *x = n.x.as<const float>() + x_rows[row], *dy = n.dy.as<const float>() + dy_rows[row];
                float* dx = n.y.as<float>() + y_rows[row];
                const float rstd = n.rstd.as<const float>()[scales[row]];
                const vf mean = splat(n.mean.as<const float>()[means[row]]), scale = splat(rstd);
                vf plain{}, along{};
                for (int64_t i = 0; i < n.width; i += LANES) {
                    const vf normal = (load(x + i) - mean) * scale, change = load(dy + i), g = change * load(weight + i);
                    plain += g;
                    along = fma(g, normal, along);
                    store(dweight + i, fma(change, normal, load(dweight + i)));
                    store(dbias + i, load(dbias + i) + change);
                }
                const vf first = splat(sum(plain) / n.width), second = splat(sum(along) / n.width);
                for (int64_t i = 0; i < n.width; i += LANES) {
                    const vf normal = (load(x + i) - mean) * scale;
                    store(dx + i, scale * (load(dy + i) * load(weight + i) - first - normal * second));
                }
            }
        }
    }

    void finish() const {
        float *dweight = n.dweight.as<float>(), *dbias = n.dbias.as<float>();
        for (int64_t i = 0; i < n.width; i += LANES) {
            vf total[2] = {};
            for (int64_t unit = 0; unit < units; unit++)
                for (int part = 0; part < 2; part++) total[part] += load(&sums[(2 * unit + part) * n.width + i]);
            store(dweight + i, total[0]);
            store(dbias + i, total[1]);
        }
    }

  private:
    const std::vector<int64_t> dy_rows;
    mutable std::vector<float> sums;  // [units][2][width]
};

}  // namespace nimble
