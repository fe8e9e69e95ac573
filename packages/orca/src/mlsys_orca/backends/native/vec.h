// What a transformer needs beside the core's vectors: how wide panels are, and the activations.
#pragma once

#include <mlsys/layout.h>
#include <mlsys/vec.h>

namespace orca {

using namespace mlsys;

constexpr int PANEL = 16;  // columns of a packed weight, and slots of a block of keys: both are read side by side
MLSYS_CONSTANTS(PANEL);
constexpr int VECS = PANEL / LANES;

inline vf tanh(vf x) {  // an absolute error of 1e-7; what a GeLU or a soft cap makes of it is as exact
    vf e = exp(x + x);
    return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}

inline vf erf(vf x) {  // Abramowitz and Stegun, 7.1.26: an absolute error of 1.5e-7
    vf size = x < vf{} ? -x : x;
    vf t = splat(1.0f) / fma(size, splat(0.3275911f), splat(1.0f));
    vf p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    vf y = splat(1.0f) - p * t * exp(-size * size);
    return x < vf{} ? -y : y;
}

// 1 / x, to 2 units in the last place; x is not 0, nor beyond 2^126.
inline vf reciprocal(vf x) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    const vf guess = _mm512_rcp14_ps(x);
    return fma(guess, fma(-x, guess, splat(1.0f)), guess);
#else
    return splat(1.0f) / x;
#endif
}

MLSYS_ENUM(Activation, IDENTITY, SILU, GELU, GELU_TANH, RELU);

// Calls `use` with the function: chosen once, so that the work on one vector overlaps with the work on the next.
template <class Use>
inline void with_activation(int32_t which, Use&& use) {
    switch (which) {
        case SILU: return use([](vf x) { return x * reciprocal(splat(1.0f) + exp(-x)); });
        case GELU: return use([](vf x) { return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.70710678f))); });
        case GELU_TANH:  // (1 + tanh(y)) / 2 is 1 / (1 + e^-2y)
            return use([](vf x) {
                const vf twice = splat(-1.59576912f) * fma(splat(0.044715f) * x, x * x, x);
                return x * reciprocal(splat(1.0f) + exp(twice));
            });
        case RELU: return use([](vf x) { return larger(x, vf{}); });
        default: return use([](vf x) { return x; });
    }
}

}  // namespace orca
