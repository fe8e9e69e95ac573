// GEMM of a block of rows and a packed weight, float32 or int8, with an epilogue.
#pragma once

#include "codes.h"

#include <algorithm>

namespace encoder {

constexpr int MAX_MR = LANES == 16 ? 8 : 6;   // rows whose sums fit the registers beside a panel's weights
constexpr int KC = 4096 / NR;                 // features at once: their 16 KiB of a panel stay in the first-level cache
constexpr int BLOCK = 64;                     // rows that pass all weights of a layer while they stay in the second-level cache

template <int MR>
inline void multiply_tile(const float* a, int64_t lda, int64_t K, const float* panel, float* sums) {
    vf acc[MR * VECS];
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { acc[i] = load(sums + i * LANES); });
    micro_kernel<MR, VECS>(
        acc, K, [&](auto r, int64_t k) MLSYS_INLINE { return a[r * lda + k]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return in_register(load(panel + k * NR + v * LANES)); },
        []() MLSYS_INLINE {});
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { store(sums + i * LANES, acc[i]); });
}

// As `multiply_tile`, for `mr` rows, 1 to MR.
template <int MR = MAX_MR>
inline void multiply_rows(int mr, const float* a, int64_t lda, int64_t K, const float* panel, float* sums) {
    if constexpr (MR > 0) {
        if (mr == MR) return multiply_tile<MR>(a, lda, K, panel, sums);
        multiply_rows<MR - 1>(mr, a, lda, K, panel, sums);
    }
}

// c [M][N] = finish(a [M][K] times the weight, plus its bias), for at most BLOCK rows; N is a number of whole vectors.
// `finish(x, row, column)` gets a vector of sums.
template <class Finish>
inline void multiply(const float* a, int64_t lda, int M, const Matrix& weight, float* c, int64_t ldc, Finish&& finish) {
    alignas(64) float sums[BLOCK * NR];
    static thread_local CodedRows coded;
    const int64_t groups = weight.K / GROUP;
    if (weight.codes) quantise(a, lda, M, weight.K, coded);
    for (int64_t column = 0; column < weight.N; column += NR) {
        for (int row = 0; row < M; row++)
            for (int v = 0; v < NR; v += LANES) store(sums + row * NR + v, load(weight.bias + column + v));
        if (weight.codes) {
            const uint8_t* codes = weight.codes + column * weight.K;
            const float* scales = weight.scales + column * groups;
            for_row_groups(M, CODED_MR, [&](int row, int mr) {
                multiply_coded_rows(mr, coded, row, groups, codes, scales, sums + row * NR);
            });
        } else {
            const float* panel = weight.panels + column * weight.K;
            for (int64_t k = 0; k < weight.K; k += KC)
                for_row_groups(M, MAX_MR, [&](int row, int mr) {
                    multiply_rows(
                        mr, a + row * lda + k, lda, std::min<int64_t>(KC, weight.K - k), panel + k * NR, sums + row * NR);
                });
        }
        const int64_t width = std::min<int64_t>(NR, weight.N - column);
        for (int row = 0; row < M; row++)
            for (int64_t v = 0; v < width; v += LANES)
                store(c + row * ldc + column + v, finish(load(sums + row * NR + v), row, column + v));
    }
}

}  // namespace encoder
