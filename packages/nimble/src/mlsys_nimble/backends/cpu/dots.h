// One row times weights as torch keeps them, [N][K]: dot products of the row with each. No copy of the weights is made.
#pragma once

#include <algorithm>

#include "epilogue.h"
#include "own_weights.h"

namespace nimble {

struct Dots {
    View x, residual, out;  // x [K]; residual, out [N]; all side by side
    const float* weights;   // [N][K]
    const float* bias;      // [N], zeros to whole vectors
    Epilogue epilogue;
};
MLSYS_STRUCT(Dots, x, residual, out, weights, bias, epilogue);

class DotsKernel : public Kernel {
  public:
    explicit DotsKernel(const Dots& d) : d(d), epilogue(d.epilogue) {
        K = d.x.shape[0];
        N = d.out.shape[0];
        units = (N + LANES - 1) / LANES;
        // Prefetch the next columns' weights, unless they are so far ahead that they would leave the cache again.
        ahead = SIDE * K * (int64_t)sizeof(float) <= FAR_AHEAD_NBYTES ? SIDE * K : NEAR_AHEAD;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        const float* residual = epilogue.has_residual ? d.residual.as<const float>() : nullptr;
        float* out = d.out.as<float>();
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t n = unit * LANES, some = std::min<int64_t>(N - n, LANES);
            alignas(64) float parts[LANES * LANES], sums[LANES];
            for (int64_t i = 0; i < some; i += SIDE) multiply(d.weights + (n + i) * K, some - i - 1, parts + i * LANES);
            for (int64_t i = (some + SIDE - 1) / SIDE * SIDE; i < LANES; i++) store(parts + i * LANES, vf{});
            store(sums, load(d.bias + n) + added(parts));
            epilogue.apply(sums, LANES, 1, residual ? residual + n : nullptr, 0, out + n, 0, some);
        }
    }

  private:
    static constexpr int SIDE = 8;                           // columns at once: enough sums to fill the FMA pipelines
    static constexpr int64_t FAR_AHEAD_NBYTES = 128 << 10, NEAR_AHEAD = 512;  // floats

    // Partial sums of the columns up to `last`, SIDE at most, a vector each; those behind repeat the last one.
    void multiply(const float* weights, int64_t last, float* parts) const {
        const float* x = d.x.as<const float>();
        const float* columns[SIDE];
        for (int i = 0; i < SIDE; i++) columns[i] = weights + std::min<int64_t>(i, last) * K;
        vf sums[SIDE] = {};
        int64_t k = 0;
        for (; k + LANES <= K; k += LANES) {
            const vf features = load(x + k);
            unroll<SIDE>([&](auto i) MLSYS_INLINE {
                __builtin_prefetch(columns[i] + k + ahead, 0, 2);
                sums[i] = fma(features, load(columns[i] + k), sums[i]);
            });
        }
        if (k < K) {
            const int some = K - k;
            const vf features = load_first(x + k, some);
            unroll<SIDE>([&](auto i) MLSYS_INLINE { sums[i] = fma(features, load_first(columns[i] + k, some), sums[i]); });
        }
        unroll<SIDE>([&](auto i) MLSYS_INLINE { store(parts + i * LANES, sums[i]); });
    }

    // The sum of each of LANES vectors.
    static vf added(const float* parts) {
        vf total{};
        for (int i = 0; i < LANES; i += 4) {
            vf each[4];
            four_features([&](auto n) MLSYS_INLINE { return parts + n * LANES + i; }, each);
            total += (each[0] + each[1]) + (each[2] + each[3]);
        }
        return total;
    }

    const Dots d;
    const BoundEpilogue epilogue;
    int64_t K, N, ahead;
};

}  // namespace nimble
