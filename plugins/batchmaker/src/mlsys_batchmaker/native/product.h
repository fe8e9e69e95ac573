// Rows times a packed weight, where the rows lie wherever they lie: each is a pointer, so nothing is gathered first.
#pragma once

#include <mlsys/vec.h>

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

// Every loop over R and VECS is unrolled, or the compiler keeps the sums in memory.
#define BATCHMAKER_UNROLL _Pragma("GCC unroll 32")

template <int R>
inline void multiply_rows(const float* const* rows, int64_t first, int64_t count, const float* weight, float* sums) {
    vf acc[R * VECS];
    const float* at[R];
    BATCHMAKER_UNROLL
    for (int r = 0; r < R; r++) at[r] = rows[r] + first;
    BATCHMAKER_UNROLL
    for (int i = 0; i < R * VECS; i++) acc[i] = load(sums + i * LANES);
    for (int64_t k = 0; k < count; k++) {
        vf w[VECS];
        BATCHMAKER_UNROLL
        for (int v = 0; v < VECS; v++) w[v] = in_register(load(weight + k * UNITS + v * LANES));
        BATCHMAKER_UNROLL
        for (int i = 0; i < R * VECS; i++) acc[i] = fma(splat(at[i / VECS][k]), w[i % VECS], acc[i]);
    }
    BATCHMAKER_UNROLL
    for (int i = 0; i < R * VECS; i++) store(sums + i * LANES, acc[i]);
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
        // Blocks of nearly equal height: 7 rows are 4 and 3, not 6 and 1.
        int blocks = (count + ROWS - 1) / ROWS;
        for (int block = 0, row = 0; block < blocks; block++) {
            int height = (count - row + blocks - block - 1) / (blocks - block);
            multiply_up_to<ROWS>(height, rows + row, first, depth, weight + first * UNITS, sums + row * UNITS);
            row += height;
        }
    }
}

inline vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }
inline vf tanh(vf x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

}  // namespace batchmaker
