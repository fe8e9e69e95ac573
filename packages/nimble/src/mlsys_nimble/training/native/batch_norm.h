// Batch norm of training over channels-last images, taken as rows of channels: statistics, then one pass that applies
// them; for the backward pass likewise. Statistics are exact sums about a chunk's own mean, joined in double (Chan,
// Golub and LeVeque 1979), so they are the same whoever computes which chunk.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <mlsys/vec.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

using mlsys::fma;
using mlsys::LANES;
using mlsys::larger;
using mlsys::load;
using mlsys::splat;
using mlsys::store;
using mlsys::vf;

constexpr int64_t CHUNK_ELEMENTS = 4096;  // elements of a chunk of each tensor, which stays in the L1 cache

struct BatchNorm {
    View x, y;                          // [rows, channels], channels side by side and a whole number of vectors
    View weight, bias;                  // [channels]
    View running_mean, running_var;
    View residual;                      // as x; rank 0: none
    View mean, rstd;                    // results, [channels]
    View new_mean, new_var;
    float eps, momentum;
    int32_t is_relu;
};
MLSYS_STRUCT(BatchNorm, x, y, weight, bias, running_mean, running_var, residual, mean, rstd, new_mean, new_var, eps,
    momentum, is_relu);

struct BatchNormGradient {
    View dy, x, dx;                     // as BatchNorm's x
    View weight, mean, rstd;            // [channels]
    View dweight, dbias;
};
MLSYS_STRUCT(BatchNormGradient, dy, x, dx, weight, mean, rstd, dweight, dbias);

// Base of both passes: rows in chunks, and two numbers per chunk and channel.
class RowStatistics : public Kernel {
  public:
    explicit RowStatistics(const View& x) : rows(x.shape[0]), channels(x.shape[1]) {
        chunk = std::max<int64_t>(1, CHUNK_ELEMENTS / channels);
        units = (rows + chunk - 1) / chunk;
        first.resize(units * channels);
        second.resize(units * channels);
    }

    int64_t stop(int64_t unit) const { return std::min(rows, (unit + 1) * chunk); }

    const int64_t rows, channels;
    int64_t chunk;
    mutable std::vector<float> first, second;  // [units][channels]
};

class BatchNormStatistics : public RowStatistics {
  public:
    explicit BatchNormStatistics(const BatchNorm& b) : RowStatistics(b.x), b(b) {}

    void run(int64_t begin, int64_t end, void*) const override {
        const float* x = b.x.as<const float>();
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t c = 0; c < channels; c += LANES) {
                vf total[4] = {};
                const int64_t from = unit * chunk, to = stop(unit);
                int64_t row = from;
                for (; row + 4 <= to; row += 4)
                    for (int k = 0; k < 4; k++) total[k] += load(x + (row + k) * channels + c);
                for (; row < to; row++) total[0] += load(x + row * channels + c);
                const vf mean = ((total[0] + total[1]) + (total[2] + total[3])) * splat(1.0f / (float)(to - from));
                vf squares[4] = {};
                for (row = from; row + 4 <= to; row += 4)
                    for (int k = 0; k < 4; k++) {
                        const vf d = load(x + (row + k) * channels + c) - mean;
                        squares[k] = fma(d, d, squares[k]);
                    }
                for (; row < to; row++) {
                    const vf d = load(x + row * channels + c) - mean;
                    squares[0] = fma(d, d, squares[0]);
                }
                store(&first[unit * channels + c], mean);
                store(&second[unit * channels + c], (squares[0] + squares[1]) + (squares[2] + squares[3]));
            }
    }

    // Results that follow from the chunks' statistics.
    void finish() const {
        for (int64_t c = 0; c < channels; c++) {
            double mean = 0, squares = 0;
            int64_t count = 0;
            for (int64_t unit = 0; unit < units; unit++) {
                const int64_t some = stop(unit) - unit * chunk;
                const double delta = first[unit * channels + c] - mean;
                squares += second[unit * channels + c] + delta * delta * count * some / (double)(count + some);
                count += some;
                mean += delta * some / (double)count;
            }
            b.mean.as<float>()[c] = (float)mean;
            b.rstd.as<float>()[c] = (float)(1.0 / std::sqrt(squares / count + b.eps));
            b.new_mean.as<float>()[c] = (float)((1.0 - b.momentum) * b.running_mean.as<float>()[c] + b.momentum * mean);
            const double var = squares / (count - 1);
            b.new_var.as<float>()[c] = (float)((1.0 - b.momentum) * b.running_var.as<float>()[c] + b.momentum * var);
        }
    }

  private:
    const BatchNorm b;
};

// One unit: joins the chunks.
template <class Statistics>
class Finished : public Kernel {
  public:
    explicit Finished(const Statistics* of) : of(of) {}
    void run(int64_t begin, int64_t end, void*) const override {
        if (begin < end) of->finish();
    }

  private:
    const Statistics* of;
};

class BatchNormApply : public Kernel {
  public:
    explicit BatchNormApply(const BatchNorm& b) : b(b), rows(b.x.shape[0]), channels(b.x.shape[1]) {
        chunk = std::max<int64_t>(1, 2 * CHUNK_ELEMENTS / channels);
        units = (rows + chunk - 1) / chunk;
        scratch_nbytes = 2 * channels * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float *scale = (float*)scratch, *shift = scale + channels;
        for (int64_t c = 0; c < channels; c++) {
            scale[c] = b.rstd.as<float>()[c] * b.weight.as<float>()[c];
            shift[c] = b.bias.as<float>()[c] - b.mean.as<float>()[c] * scale[c];
        }
        const float* residual = b.residual.rank ? b.residual.as<const float>() : nullptr;
        if (residual)
            b.is_relu ? apply<true, true>(begin, end, scale, shift, residual) : apply<true, false>(begin, end, scale, shift, residual);
        else
            b.is_relu ? apply<false, true>(begin, end, scale, shift, residual) : apply<false, false>(begin, end, scale, shift, residual);
    }

  private:
    template <bool ADDS, bool RELU>
    void apply(int64_t begin, int64_t end, const float* scale, const float* shift, const float* residual) const {
        const float* x = b.x.as<const float>();
        float* y = b.y.as<float>();
        for (int64_t row = begin * chunk; row < std::min(rows, end * chunk); row++)
            for (int64_t c = 0, at = row * channels; c < channels; c += LANES, at += LANES) {
                vf out = fma(load(x + at), load(scale + c), load(shift + c));
                if (ADDS) out += load(residual + at);
                if (RELU) out = larger(out, vf{});
                store(y + at, out);
            }
    }

    const BatchNorm b;
    const int64_t rows, channels;
    int64_t chunk;
};

// Sums of dy and of dy * (x - mean).
class BatchNormGradientSums : public RowStatistics {
  public:
    explicit BatchNormGradientSums(const BatchNormGradient& b) : RowStatistics(b.x), b(b), scale(channels), shift(channels) {}

    void run(int64_t begin, int64_t end, void*) const override {
        const float *x = b.x.as<const float>(), *dy = b.dy.as<const float>();
        for (int64_t unit = begin; unit < end; unit++)
            for (int64_t c = 0; c < channels; c += LANES) {
                const vf mean = load(b.mean.as<const float>() + c);
                vf sums[2] = {}, products[2] = {};
                int64_t row = unit * chunk;
                for (; row + 2 <= stop(unit); row += 2)
                    for (int k = 0; k < 2; k++) {
                        const vf d = load(dy + (row + k) * channels + c);
                        sums[k] += d;
                        products[k] = fma(d, load(x + (row + k) * channels + c) - mean, products[k]);
                    }
                for (; row < stop(unit); row++) {
                    const vf d = load(dy + row * channels + c);
                    sums[0] += d;
                    products[0] = fma(d, load(x + row * channels + c) - mean, products[0]);
                }
                store(&first[unit * channels + c], sums[0] + sums[1]);
                store(&second[unit * channels + c], products[0] + products[1]);
            }
    }

    void finish() const {
        for (int64_t c = 0; c < channels; c++) {
            double total = 0, product = 0;
            for (int64_t unit = 0; unit < units; unit++) {
                total += first[unit * channels + c];
                product += second[unit * channels + c];
            }
            const double rstd = b.rstd.as<float>()[c];
            b.dbias.as<float>()[c] = (float)total;
            b.dweight.as<float>()[c] = (float)(product * rstd);
            scale[c] = (float)(rstd * rstd * product / rows);
            shift[c] = (float)(total / rows);
        }
    }

    const BatchNormGradient b;
    mutable std::vector<float> scale, shift;  // dx = (dy - shift - (x - mean) * scale) * rstd * weight
};

class BatchNormGradientApply : public Kernel {
  public:
    explicit BatchNormGradientApply(const BatchNormGradientSums* of) : of(of), b(of->b), rows(of->rows), channels(of->channels) {
        chunk = std::max<int64_t>(1, 2 * CHUNK_ELEMENTS / channels);
        units = (rows + chunk - 1) / chunk;
        scratch_nbytes = channels * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const float *x = b.x.as<const float>(), *dy = b.dy.as<const float>(), *mean = b.mean.as<const float>();
        float *dx = b.dx.as<float>(), *factor = (float*)scratch;
        for (int64_t c = 0; c < channels; c++) factor[c] = b.rstd.as<float>()[c] * b.weight.as<float>()[c];
        for (int64_t row = begin * chunk; row < std::min(rows, end * chunk); row++)
            for (int64_t c = 0, at = row * channels; c < channels; c += LANES, at += LANES) {
                const vf centred = load(x + at) - load(mean + c);
                const vf rest = load(dy + at) - load(&of->shift[c]) - centred * load(&of->scale[c]);
                store(dx + at, rest * load(factor + c));
            }
    }

  private:
    const BatchNormGradientSums* of;
    const BatchNormGradient b;
    const int64_t rows, channels;
    int64_t chunk;
};

}  // namespace nimble
