// The fp32 GEMM micro-kernel, C[MR][NR] += A[MR][K] * B[K][NR] with all sums in registers, and packing of B in panels.
// NR is VECS vectors. The caller says where A and B are: rows of A by pointers, packed together, or taps of a window; B
// packed in panels or row-major. The epilogue is the caller's, too. Some GEMMs have loops of their own. Orca's over
// int8 or int4 weights and bf16 pairs decode two features a step, or multiply two in one instruction. Nimble's GEMV, in
// bf16, would not have its weights fit in registers. WindTunnel's over soft trees may round twice where there is no
// FMA: `fma` is a library call there. Orca's product of attention scores and values could use `micro_kernel`, but that
// changes what GCC inlines beside it on AVX-512: measure there first.
#pragma once

#include <utility>

#include <mlsys/vec.h>

namespace mlsys {

#define MLSYS_INLINE __attribute__((always_inline))

// Call f(0), ..., f(N - 1) with compile-time numbers, so that arrays indexed by them stay in registers.
template <class F, int... I>
MLSYS_INLINE inline void unroll(std::integer_sequence<int, I...>, F&& f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
MLSYS_INLINE inline void unroll(F&& f) {
    unroll(std::make_integer_sequence<int, N>(), f);
}

// sums[r * VECS + v] += a(r, k) * b(k, v) for 0 <= k < K, in the order of k; `prefetch()` follows each step.
//
// Few sums would wait for each other: COPIES of them, for features in turn, keep the pipes busy. The caller adds the copies
// with `add_copies`. Where a row's result may not depend on the number of rows, COPIES may not either.
template <int MR, int VECS, int COPIES = 1, class A, class B, class Prefetch>
MLSYS_INLINE inline void micro_kernel(
    vf (&sums)[COPIES * MR * VECS], int64_t K, const A& a, const B& b, const Prefetch& prefetch) {
    const auto step = [&](int64_t k, auto copy) MLSYS_INLINE {
        vf w[VECS];
        unroll<VECS>([&](auto v) MLSYS_INLINE { w[v] = b(k, v); });
        unroll<MR>([&](auto r) MLSYS_INLINE {
            const vf x = splat(a(r, k));
            unroll<VECS>([&](auto v) MLSYS_INLINE {
                constexpr int at = (decltype(copy)::value * MR + decltype(r)::value) * VECS + decltype(v)::value;
                sums[at] = fma(x, w[v], sums[at]);
            });
        });
        prefetch();
    };
    int64_t k = 0;
    for (; k + COPIES <= K; k += COPIES) unroll<COPIES>([&](auto copy) MLSYS_INLINE { step(k + copy, copy); });
    if constexpr (COPIES > 1)
        for (; k < K; k++) step(k, std::integral_constant<int, 0>());
}

// Add all copies to the first.
template <int COPIES, int N>
MLSYS_INLINE inline void add_copies(vf (&sums)[N]) {
    constexpr int SUMS = N / COPIES;
    unroll<N - SUMS>([&](auto i) MLSYS_INLINE { sums[i % SUMS] += sums[i + SUMS]; });
}

// Pack a panel [K][NR] of the columns at(k, 0), ..., at(k, N - 1); zeros beyond them.
template <int NR, class T, class At>
inline void pack_panel(T* panel, int64_t K, int64_t N, const At& at) {
    for (int64_t k = 0; k < K; k++)
        for (int n = 0; n < NR; n++) panel[k * NR + n] = n < N ? at(k, n) : T{};
}

// Split M rows in groups of at most `max_mr`, as even as can be: work(first row, rows of the group).
template <class Work>
inline void for_row_groups(int M, int max_mr, Work&& work) {
    const int groups = (M + max_mr - 1) / max_mr;
    for (int group = 0, row = 0; group < groups; group++) {
        const int mr = (M - row + groups - group - 1) / (groups - group);
        work(row, mr);
        row += mr;
    }
}

}  // namespace mlsys
