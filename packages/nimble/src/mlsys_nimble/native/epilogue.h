// What is done to a result before it is stored, and how its rows are stored.
#pragma once

#include "kernel.h"
#include "math.h"

namespace nimble {

struct Epilogue {
    int32_t activation;
    float slope;
    int32_t has_residual;
    int32_t activates_first;
};

// The same, ready for a loop: activations that only clamp are two instructions; the others are called.
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

    vf operator()(vf y) const { return clamp(activation ? activate(y, activation, slope) : y); }
    vf operator()(vf y, vf residual) const {
        if (activates_first) return activate(y, activation, slope) + residual;
        return (*this)(y + residual);
    }

    // `width` elements of a row from `from` to `to`; `from` may be read up to a whole vector.
    void row(const float* from, const float* residual, float* to, int64_t width) const {
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vf y = load(from + i);
            store(to + i, has_residual ? (*this)(y, load(residual + i)) : (*this)(y));
        }
        if (i == width) return;
        float rest[LANES] = {};
        std::memcpy(rest, from + i, (width - i) * sizeof(float));
        vf y = load(rest);
        if (has_residual) {
            std::memcpy(rest, residual + i, (width - i) * sizeof(float));
            y = (*this)(y, load(rest));
        } else {
            y = (*this)(y);
        }
        store(rest, y);
        std::memcpy(to + i, rest, (width - i) * sizeof(float));
    }
};

inline __attribute__((noinline)) vf finish_slowly(const Finish& finish, vf y, const float* residual) {
    return residual ? finish(y, load(residual)) : finish(y);
}

}  // namespace nimble
