// One row against packed weights: the time is that of reading them, in one stream, from wherever they are.
#pragma once

#include <algorithm>

#include "weight.h"

namespace nimble {

struct Gemv {
    View x, residual, out;  // x [K]; residual, out [N]; all side by side
    const Weight* weights;  // [panels][K][NR]; the last panel has as many vectors as it takes
    const float* bias;      // [N], zeros to whole vectors
    Epilogue epilogue;
};
MLSYS_STRUCT(Gemv, x, residual, out, weights, bias, epilogue);

constexpr int ROW_VECS = 8;              // vectors of a panel; this many sums fill the FMA pipelines
MLSYS_CONSTANTS(ROW_VECS);
constexpr int PREFETCH_AHEAD = (4 << 10) / sizeof(Weight);  // weights

class GemvKernel : public Kernel {
  public:
    explicit GemvKernel(const Gemv& g) : g(g), epilogue(g.epilogue) {
        K = g.x.shape[0];
        N = g.out.shape[0];
        vecs = (N + LANES - 1) / LANES;
        units = (vecs + ROW_VECS - 1) / ROW_VECS;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        const float* x = g.x.as<const float>();
        const float* residual = epilogue.has_residual ? g.residual.as<const float>() : nullptr;
        float* out = g.out.as<float>();
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t n = unit * ROW_VECS * LANES, some = std::min<int64_t>(ROW_VECS, vecs - unit * ROW_VECS);
            alignas(64) float sums[ROW_VECS * LANES];
            multiply_panel(some, x, g.weights + n * K, g.bias + n, sums);
            epilogue.apply(
                sums, some * LANES, 1, residual ? residual + n : nullptr, 0, out + n, 0,
                std::min(N - n, some * LANES));
        }
    }

  private:
    void multiply_panel(int64_t some, const float* x, const Weight* weights, const float* bias, float* sums) const {
        switch (some) {
            case 1: return multiply<1>(x, weights, bias, sums);
            case 2: return multiply<2>(x, weights, bias, sums);
            case 3: return multiply<3>(x, weights, bias, sums);
            case 4: return multiply<4>(x, weights, bias, sums);
            case 5: return multiply<5>(x, weights, bias, sums);
            case 6: return multiply<6>(x, weights, bias, sums);
            case 7: return multiply<7>(x, weights, bias, sums);
            default: return multiply<8>(x, weights, bias, sums);
        }
    }

    // Panels of few vectors keep several sums of each, for features in turn, which are added at the end. No micro-kernel of
    // mlsys/gemm.h: that holds a step's weights in registers for all rows, and with bf16 eight vectors of them do not fit.
    template <int VECS>
    void multiply(const float* x, const Weight* weights, const float* bias, float* sums) const {
        constexpr int COPIES = ROW_VECS / VECS;
        vf total[COPIES][VECS] = {};
        for (int v = 0; v < VECS; v++) total[0][v] = load(bias + v * LANES);
        int64_t k = 0;
        for (; k + COPIES <= K; k += COPIES)
            for (int copy = 0; copy < COPIES; copy++) {
                const vf feature = splat(x[k + copy]);
                for (int v = 0; v < VECS; v++, weights += LANES) {
                    if (v % (64 / (LANES * sizeof(Weight))) == 0) __builtin_prefetch(weights + PREFETCH_AHEAD);
                    total[copy][v] = fma(feature, load(weights), total[copy][v]);
                }
            }
        for (; k < K; k++)
            for (int v = 0; v < VECS; v++, weights += LANES) total[0][v] = fma(splat(x[k]), load(weights), total[0][v]);
        for (int v = 0; v < VECS; v++) {
            for (int copy = 1; copy < COPIES; copy++) total[0][v] += total[copy][v];
            store(sums + v * LANES, total[0][v]);
        }
    }

    const Gemv g;
    const BoundEpilogue epilogue;
    int64_t K, N, vecs;
};

}  // namespace nimble
