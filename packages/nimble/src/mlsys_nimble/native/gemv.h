// One row against packed weights: the time is that of reading them, so that several panels are read side by side, whose
// sums do not wait for each other.
#pragma once

#include "epilogue.h"

namespace nimble {

constexpr int BESIDE = 4;  // panels of two vectors

// The sums of `BESIDE` panels, each [depth][2 vectors], that lie one after another from `weights`; `sums` [8 vectors].
inline void multiply_row(const float* x, int64_t depth, const float* weights, const float* bias, float* sums) {
    constexpr int WIDTH = 2 * LANES;
    vf total[BESIDE][2];
    for (int p = 0; p < BESIDE; p++)
        for (int v = 0; v < 2; v++) total[p][v] = load(bias + p * WIDTH + v * LANES);
    const float* from[BESIDE];
    for (int p = 0; p < BESIDE; p++) from[p] = weights + p * depth * WIDTH;
    for (int64_t k = 0; k < depth; k++) {
        const vf feature = splat(x[k]);
        for (int p = 0; p < BESIDE; p++)
            for (int v = 0; v < 2; v++)
                total[p][v] = fma(feature, load(from[p] + k * WIDTH + v * LANES), total[p][v]);
    }
    for (int p = 0; p < BESIDE; p++)
        for (int v = 0; v < 2; v++) store(sums + p * WIDTH + v * LANES, total[p][v]);
}

}  // namespace nimble
