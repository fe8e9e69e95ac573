// Rows times a packed weight, where the rows lie wherever they lie: each is a pointer, so nothing is gathered first.
#pragma once

#include <mlsys/gemm.h>
#include <mlsys/layout.h>
#include <mlsys/math.h>

#include <cstdint>

namespace batchmaker {

using namespace mlsys;

constexpr int UNITS = LANES == 16 ? 32 : 16;  // columns of a panel: as many units of one gate
constexpr int VECS = UNITS / LANES;
constexpr int ROWS = LANES == 16 ? 12 : 6;  // rows whose sums fit the registers beside a panel's weights
constexpr int DEPTH = 4096 / UNITS;         // input features at once: with them 16 kB of a panel stay in the first cache

// A weight [depth, columns] as panels [columns / UNITS][depth][UNITS]; columns beyond the last are zero.
struct Matrix {
    const float* panels = nullptr;
    int64_t depth = 0;

    const float* panel(int64_t which) const { return panels + which * depth * UNITS; }
};
MLSYS_STRUCT(Matrix, panels, depth);

template <int R>
inline void multiply_rows(const float* const* rows, int64_t first, int64_t count, const float* weight, float* sums) {
    vf acc[R * VECS];
    const float* at[R];
    unroll<R>([&](auto r) MLSYS_INLINE { at[r] = rows[r] + first; });
    unroll<R * VECS>([&](auto i) MLSYS_INLINE { acc[i] = load(sums + i * LANES); });
    multiply_add<R, VECS>(
        acc, count, [&](auto r, int64_t k) MLSYS_INLINE { return at[r][k]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return in_register(load(weight + k * UNITS + v * LANES)); },
        []() MLSYS_INLINE {});
    unroll<R * VECS>([&](auto i) MLSYS_INLINE { store(sums + i * LANES, acc[i]); });
}

template <int R>
inline void multiply_up_to(int count, const float* const* rows, int64_t first, int64_t depth, const float* weight,
                           float* sums) {
    if constexpr (R > 0) {
        if (count == R) return multiply_rows<R>(rows, first, depth, weight, sums);
        multiply_up_to<R - 1>(count, rows, first, depth, weight, sums);
    }
}

// sums [count][UNITS] += rows [count] times one panel of `matrix`.
inline void multiply(const float* const* rows, int count, const Matrix& matrix, int64_t panel, float* sums) {
    const float* weight = matrix.panel(panel);
    for (int64_t first = 0; first < matrix.depth; first += DEPTH) {
        int64_t depth = matrix.depth - first < DEPTH ? matrix.depth - first : DEPTH;
        in_groups(count, ROWS, [&](int row, int height) {  // 7 rows are 4 and 3, not 6 and 1
            multiply_up_to<ROWS>(height, rows + row, first, depth, weight + first * UNITS, sums + row * UNITS);
        });
    }
}

}  // namespace batchmaker
