// GEMM of rows and a packed weight. Each row is a pointer, so nothing is gathered first.
#pragma once

#include <mlsys/gemm.h>
#include <mlsys/layout.h>
#include <mlsys/math.h>

#include <cstdint>

namespace batchmaker {

using namespace mlsys;

constexpr int UNITS = LANES == 16 ? 32 : 16;  // columns of a panel: as many units of one gate
constexpr int VECS = UNITS / LANES;
constexpr int MAX_MR = LANES == 16 ? 12 : 6;  // rows whose sums fit the registers beside a panel's weights
constexpr int KC = 4096 / UNITS;  // input features at once: their 16 KiB of a panel stay in the first-level cache

// A weight [K, N] as panels [N / UNITS][K][UNITS]; columns beyond the last are zero.
struct Matrix {
    const float* panels = nullptr;
    int64_t K = 0;

    const float* panel(int64_t which) const { return panels + which * K * UNITS; }
};
MLSYS_STRUCT(Matrix, panels, K);

template <int MR>
inline void multiply_tile(const float* const* rows, int64_t first_k, int64_t K, const float* panel, float* sums) {
    vf acc[MR * VECS];
    const float* a[MR];
    unroll<MR>([&](auto r) MLSYS_INLINE { a[r] = rows[r] + first_k; });
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { acc[i] = load(sums + i * LANES); });
    micro_kernel<MR, VECS>(
        acc, K, [&](auto r, int64_t k) MLSYS_INLINE { return a[r][k]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return in_register(load(panel + k * UNITS + v * LANES)); },
        []() MLSYS_INLINE {});
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { store(sums + i * LANES, acc[i]); });
}

// As `multiply_tile`, for `mr` rows, 1 to MR.
template <int MR = MAX_MR>
inline void multiply_rows(int mr, const float* const* rows, int64_t first_k, int64_t K, const float* panel, float* sums) {
    if constexpr (MR > 0) {
        if (mr == MR) return multiply_tile<MR>(rows, first_k, K, panel, sums);
        multiply_rows<MR - 1>(mr, rows, first_k, K, panel, sums);
    }
}

// sums [M][UNITS] += rows [M] times one panel of `matrix`.
inline void multiply(const float* const* rows, int M, const Matrix& matrix, int64_t panel, float* sums) {
    const float* b = matrix.panel(panel);
    for (int64_t k = 0; k < matrix.K; k += KC) {
        const int64_t K = matrix.K - k < KC ? matrix.K - k : KC;
        for_row_groups(M, MAX_MR, [&](int row, int mr) {  // 7 rows are 4 and 3, not 6 and 1
            multiply_rows(mr, rows + row, k, K, b + k * UNITS, sums + row * UNITS);
        });
    }
}

}  // namespace batchmaker
