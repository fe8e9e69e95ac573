// The epilogue of a GEMM's tile: bias, activation or gate, the sum with the target, and the largest logits on the way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "operators.h"
#include "rows.h"

namespace orca {

struct Peak {  // a row's largest logit so far
    float value = -INFINITY;
    int column = 0;
    bool operator<(const Peak& other) const {
        return value < other.value || (value == other.value && column > other.column);
    }
    void see(vf x, int first, int lanes) {
        if (!any_from(x, value)) return;
        for (int i = 0; i < lanes; i++) *this = std::max(*this, Peak{x[i], first + i});
    }
};

inline vf load_some(const float* from, int lanes) {
    if (lanes == LANES) return load(from);
    float kept[LANES] = {};
    std::memcpy(kept, from, lanes * sizeof(float));
    return load(kept);
}

template <class T>
inline void store_some(T* to, vf x, int lanes) {
    if (lanes == LANES) return store(to, x);
    T kept[LANES];
    store(kept, x);
    std::memcpy(to, kept, lanes * sizeof(T));
}

// Prefetch what `apply_epilogue` will write, while the tile is multiplied.
inline void prefetch_target(const Gemm& op, const Register& target, int panel, int first, int rows) {
    if (!target.floats) return;
    const int column = op.column + panel * PANEL / (op.is_gated ? 2 : 1), size = target.is_bf16 ? 2 : 4;
    const char* to = (const char*)target.floats + (first * target.stride + column) * size;
    const int bytes = (op.is_gated ? PANEL : TILE_PANELS * PANEL) * size;
    for (int r = 0; r < rows; r++, to += target.stride * size)
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(to + at, 1, 2);
}

// Finish a tile's rows from `first`: bias, activation or gate, and the sum with what is there. `peaks`: of all rows; null:
// not wanted.
inline void apply_epilogue(const Gemm& op, const Register& target, Peak* peaks, int panel, int first, int rows, const float* sums) {
    constexpr int COLUMNS = TILE_PANELS * PANEL;
    const int own = panel * PANEL / (op.is_gated ? 2 : 1), column = op.column + own;
    const int some = std::min(op.is_gated ? PANEL : COLUMNS, op.num_columns - own);
    const float* bias = op.bias ? op.bias + panel * PANEL : nullptr;
    Peak* peak = peaks ? peaks + first : nullptr;
    const auto sum_of = [&](const float* row, int c) { return bias ? load(row + c) + load(bias + c) : load(row + c); };
    with_activation(op.activation, 0.0f, [&](auto&& f) {
        for (int r = 0; r < rows; r++) {
            const float* from = sums + r * COLUMNS;
            const int64_t at = (first + r) * target.stride + column;
            for (int c = 0; c < some; c += LANES) {
                vf x = sum_of(from, c);
                if (op.limit != 0.0f) {
                    const vf gate = clamped(x, -INFINITY, op.limit);
                    x = gate * sigmoid(splat(op.slope) * gate) * (clamped(sum_of(from, c + PANEL), -op.limit, op.limit) + splat(1.0f));
                } else {
                    x = f(x);
                    if (op.is_gated) x *= sum_of(from, c + PANEL);
                }
                const int lanes = std::min(LANES, some - c);
                if (peak) peak[r].see(x, column + c, lanes);
                if (!target.floats) continue;
                if (target.is_bf16)
                    store_some(target.halves() + at + c, x, lanes);
                else
                    store_some(target.floats + at + c, op.accumulates ? x + load_some(target.floats + at + c, lanes) : x, lanes);
            }
        }
    });
}

}  // namespace orca
