// Transpose in registers: vectors over columns from row-major weights [N][K], as torch keeps a Linear's.
#pragma once

#include <mlsys/gemm.h>

#include "kernel.h"

namespace nimble {

// Four features of LANES columns: out[i] has feature i, column n in lane n. `at(n)` points to the first feature of column n.
template <class At>
MLSYS_INLINE inline void four_features(const At& at, vf (&out)[4]) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    __m512 parts[4];  // of columns n, n + 4, n + 8 and n + 12
    unroll<4>([&](auto n) MLSYS_INLINE {
        __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(at(n)));
        x = _mm512_insertf32x4(x, _mm_loadu_ps(at(n + 4)), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(at(n + 8)), 2);
        parts[n] = _mm512_insertf32x4(x, _mm_loadu_ps(at(n + 12)), 3);
    });
    const __m512d low01 = (__m512d)_mm512_unpacklo_ps(parts[0], parts[1]), high01 = (__m512d)_mm512_unpackhi_ps(parts[0], parts[1]);
    const __m512d low23 = (__m512d)_mm512_unpacklo_ps(parts[2], parts[3]), high23 = (__m512d)_mm512_unpackhi_ps(parts[2], parts[3]);
    out[0] = (vf)_mm512_unpacklo_pd(low01, low23), out[1] = (vf)_mm512_unpackhi_pd(low01, low23);
    out[2] = (vf)_mm512_unpacklo_pd(high01, high23), out[3] = (vf)_mm512_unpackhi_pd(high01, high23);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    __m256 parts[4];  // of columns n and n + 4
    unroll<4>([&](auto n) MLSYS_INLINE {
        parts[n] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at(n))), _mm_loadu_ps(at(n + 4)), 1);
    });
    const __m256d low01 = (__m256d)_mm256_unpacklo_ps(parts[0], parts[1]), high01 = (__m256d)_mm256_unpackhi_ps(parts[0], parts[1]);
    const __m256d low23 = (__m256d)_mm256_unpacklo_ps(parts[2], parts[3]), high23 = (__m256d)_mm256_unpackhi_ps(parts[2], parts[3]);
    out[0] = (vf)_mm256_unpacklo_pd(low01, low23), out[1] = (vf)_mm256_unpackhi_pd(low01, low23);
    out[2] = (vf)_mm256_unpacklo_pd(high01, high23), out[3] = (vf)_mm256_unpackhi_pd(high01, high23);
#else
    for (int n = 0; n < LANES; n++)
        for (int i = 0; i < 4; i++) out[i][n] = at(n)[i];
#endif
}

}  // namespace nimble
