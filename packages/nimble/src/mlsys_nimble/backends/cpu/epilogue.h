// Epilogues of a GEMM's or convolution's sums, and the store of rows.
#pragma once

#include "kernel.h"

namespace nimble {

struct Epilogue {
    Activation activation;
    float slope;
    int32_t has_residual;
    int32_t activates_first;
};
MLSYS_STRUCT(Epilogue, activation, slope, has_residual, activates_first);

// One activation for `vecs` vectors in place: chosen once, so that the work on one overlaps with the work on the next.
inline __attribute__((noinline)) void activate_all(float* x, int64_t vecs, int32_t which, float slope) {
    with_activation(which, slope, [=](auto&& f) {
        for (int64_t i = 0; i < vecs * LANES; i += LANES) store(x + i, f(load(x + i)));
    });
}

// The same for M rows of N sums, which are stored in `c`.
inline __attribute__((noinline)) void store_activated(
    const float* sums, int64_t ld_sums, int64_t M, int32_t which, float slope, float* c, int64_t ldc, int64_t N) {
    with_activation(which, slope, [=](auto&& f) {
        for (int64_t m = 0; m < M; m++) {
            int64_t i = 0;
            for (; i + LANES <= N; i += LANES) store(c + m * ldc + i, f(load(sums + m * ld_sums + i)));
            if (i < N) store_first(c + m * ldc + i, f(load(sums + m * ld_sums + i)), N - i);
        }
    });
}

// An epilogue as loops use it: activations that only clamp are two instructions; the others go through tiles of sums.
struct BoundEpilogue {
    float low = -INFINITY, high = INFINITY;
    int32_t activation = IDENTITY;  // activation beyond clamping
    float slope = 0;
    bool has_residual = false, activates_first = false;
    bool is_plain = true;  // clamp(y + residual)

    BoundEpilogue() = default;
    explicit BoundEpilogue(const Epilogue& e)
        : slope(e.slope), has_residual(e.has_residual), activates_first(e.has_residual && e.activates_first) {
        if (!activates_first && (e.activation == RELU || e.activation == RELU6)) {
            low = 0;
            if (e.activation == RELU6) high = 6;
        } else {
            activation = e.activation;
        }
        is_plain = activation == IDENTITY && !activates_first;
    }

    vf clamp(vf x) const { return smaller(splat(high), larger(splat(low), x)); }

    // Apply it to M rows of N sums and store them in `c`. `ld_sums` is whole vectors. The sums are lost.
    void apply(
        float* sums, int64_t ld_sums, int64_t M, const float* residual, int64_t ld_residual, float* c, int64_t ldc,
        int64_t N) const {
        if (residual && !activates_first)
            for (int64_t m = 0; m < M; m++) add(sums + m * ld_sums, residual + m * ld_residual, N);
        if (activation && !(residual && activates_first))
            return store_activated(sums, ld_sums, M, activation, slope, c, ldc, N);
        if (activation) activate_all(sums, M * ld_sums / LANES, activation, slope);
        for (int64_t m = 0; m < M; m++) {
            if (residual && activates_first) add(sums + m * ld_sums, residual + m * ld_residual, N);
            copy(sums + m * ld_sums, c + m * ldc, N);
        }
    }

  private:
    static void add(float* to, const float* from, int64_t N) {
        int64_t i = 0;
        for (; i + LANES <= N; i += LANES) store(to + i, load(to + i) + load(from + i));
        for (; i < N; i++) to[i] += from[i];
    }

    void copy(const float* from, float* to, int64_t N) const {
        int64_t i = 0;
        for (; i + LANES <= N; i += LANES) store(to + i, clamp(load(from + i)));
        if (i == N) return;
        float rest[LANES];
        store(rest, clamp(load(from + i)));
        std::memcpy(to + i, rest, (N - i) * sizeof(float));
    }
};

}  // namespace nimble
