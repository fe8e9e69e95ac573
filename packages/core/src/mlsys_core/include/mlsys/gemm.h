// The register tile under fp32 products: ROWS rows times VECS vectors of columns, all sums in registers.
//
// Where rows and weights come from is the caller's: rows found by pointers, packed together, or taps of a window; weights
// packed in panels. What follows the sum (the epilogue) is the caller's, too.
#pragma once

#include <utility>

#include <mlsys/vec.h>

namespace mlsys {

#define MLSYS_INLINE __attribute__((always_inline))

// f(0), ..., f(N - 1), each with its number known to the compiler: what is indexed by it stays in registers.
template <class F, int... I>
MLSYS_INLINE inline void unroll(std::integer_sequence<int, I...>, F&& f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
MLSYS_INLINE inline void unroll(F&& f) {
    unroll(std::make_integer_sequence<int, N>(), f);
}

// sums[r * VECS + v] += a(r, k) * b(k, v) for 0 <= k < depth, in the order of k; `prefetch()` follows each step.
//
// Few sums would wait for each other: COPIES of them, for features in turn, keep the pipes busy. The caller adds the copies
// with `add_copies`. Where a row's result may not depend on the number of rows, COPIES may not either.
template <int ROWS, int VECS, int COPIES = 1, class A, class B, class Prefetch>
MLSYS_INLINE inline void multiply_add(
    vf (&sums)[COPIES * ROWS * VECS], int64_t depth, const A& a, const B& b, const Prefetch& prefetch) {
    const auto step = [&](int64_t k, auto copy) MLSYS_INLINE {
        vf w[VECS];
        unroll<VECS>([&](auto v) MLSYS_INLINE { w[v] = b(k, v); });
        unroll<ROWS>([&](auto r) MLSYS_INLINE {
            const vf x = splat(a(r, k));
            unroll<VECS>([&](auto v) MLSYS_INLINE {
                constexpr int at = (decltype(copy)::value * ROWS + decltype(r)::value) * VECS + decltype(v)::value;
                sums[at] = fma(x, w[v], sums[at]);
            });
        });
        prefetch();
    };
    int64_t k = 0;
    for (; k + COPIES <= depth; k += COPIES) unroll<COPIES>([&](auto copy) MLSYS_INLINE { step(k + copy, copy); });
    if constexpr (COPIES > 1)
        for (; k < depth; k++) step(k, std::integral_constant<int, 0>());
}

// Add all copies to the first.
template <int COPIES, int N>
MLSYS_INLINE inline void add_copies(vf (&sums)[N]) {
    constexpr int SUMS = N / COPIES;
    unroll<N - SUMS>([&](auto i) MLSYS_INLINE { sums[i % SUMS] += sums[i + SUMS]; });
}

// Pack a panel [depth][WIDTH] of the columns at(k, 0), ..., at(k, columns - 1); zeros beyond them.
template <int WIDTH, class T, class At>
inline void pack_panel(T* to, int64_t depth, int64_t columns, const At& at) {
    for (int64_t k = 0; k < depth; k++)
        for (int c = 0; c < WIDTH; c++) to[k * WIDTH + c] = c < columns ? at(k, c) : T{};
}

// Split `rows` in groups of at most `most` that are as even as can be: work(first row, rows of the group).
template <class Work>
inline void in_groups(int rows, int most, Work&& work) {
    const int groups = (rows + most - 1) / most;
    for (int group = 0, row = 0; group < groups; group++) {
        const int some = (rows - row + groups - group - 1) / (groups - group);
        work(row, some);
        row += some;
    }
}

}  // namespace mlsys
