// What is done to a result before it is stored, and how its rows are stored.
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

// The same, ready for a loop: activations that only clamp are two instructions; the others go through tiles of sums.
struct Finish {
    float low = -INFINITY, high = INFINITY;
    int32_t activation = IDENTITY;  // where clamping is not all of it
    float slope = 0;
    bool has_residual = false, activates_first = false;
    bool is_plain = true;  // clamp(y + residual)

    Finish() = default;
    explicit Finish(const Epilogue& e)
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

    // `count` rows of `width` sums, `step` apart (whole vectors), to where rows are `out_stride` apart. The sums are lost.
    void rows(
        float* sums, int64_t step, int64_t count, const float* residual, int64_t residual_stride, float* out,
        int64_t out_stride, int64_t width) const {
        if (residual && !activates_first)
            for (int64_t r = 0; r < count; r++) add(sums + r * step, residual + r * residual_stride, width);
        if (activation) activate_all(sums, count * step / LANES, activation, slope);
        for (int64_t r = 0; r < count; r++) {
            if (residual && activates_first) add(sums + r * step, residual + r * residual_stride, width);
            copy(sums + r * step, out + r * out_stride, width);
        }
    }

  private:
    static void add(float* to, const float* from, int64_t width) {
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(to + i, load(to + i) + load(from + i));
        for (; i < width; i++) to[i] += from[i];
    }

    void copy(const float* from, float* to, int64_t width) const {
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(to + i, clamp(load(from + i)));
        if (i == width) return;
        float rest[LANES];
        store(rest, clamp(load(from + i)));
        std::memcpy(to + i, rest, (width - i) * sizeof(float));
    }
};

}  // namespace nimble
