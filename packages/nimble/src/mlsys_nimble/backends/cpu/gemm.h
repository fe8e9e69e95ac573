// The GEMM under convolutions and linears: a few rows, each found by pointers, times one packed panel of weights.
//
// A *panel* is 1 to 3 vectors of output columns; the weights of one input feature stand side by side in it. A row is a
// pointer for each *tap* of a window, to K features there; a plain GEMM has one tap. Tiles are settled when a kernel is
// made, so that an element's value does not depend on how the units are cut.
#pragma once

#include <mlsys/gemm.h>

#include "weight.h"

namespace nimble {

constexpr int MAX_VECS = 3;                     // vectors of a panel, at most
constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // vector registers for sums; the others hold weights and a feature
constexpr int max_mr(int vecs) { return REGISTERS / vecs; }
constexpr int MAX_MR = REGISTERS;
// Weights that lie beyond the second-level cache are prefetched during the multiplication. With 16 lanes the
// micro-kernel prefetches after each feature: many requests at once would delay the loads that follow them. With
// shorter vectors the caller prefetches between tiles.
constexpr bool PREFETCHES = LANES == 16;

// Copies of each sum. A few sums leave the pipes idle between dependent additions, so features go to several copies in
// turn, and the copies are added at the end.
constexpr int copies_of(int sums) { return sums >= 8 ? 1 : sums >= 4 ? 2 : 4; }

// Features multiplied in one pass over the rows. More than ROWS_IN_REGISTERS row pointers do not fit in the general
// registers: each is then loaded from the stack once a pass. Sums still run in the order of the features.
constexpr int ROWS_IN_REGISTERS = 10;
constexpr int features_of(int rows, int vecs) {
    return rows <= ROWS_IN_REGISTERS || vecs > 1 ? 1 : LANES == 16 ? 4 : 2;  // their weights fit beside the sums
}

// A part of the sum: taps [first_tap, stop_tap), features [first_k, first_k + K) of each.
struct Part {
    int first_tap, stop_tap;
    int first_k, K;
    bool is_first, is_last;
};

// Operands and results of one tile of rows. NR: columns of the panel, whole vectors.
struct Tile {
    const float* const* rows;  // row r's tap t is rows[r * taps + t]
    int64_t taps;
    const Weight* weights;     // the part's weights, [taps][K][NR]
    int64_t ldb;               // floats from one feature's weights to the next; NR if packed
    const float* bias;         // [NR]
    float* sums;               // between parts, [rows][NR]
    float* c;
    int64_t ldc;
    const float* residual;
    int64_t ld_residual;
    int N;  // columns to store, at most NR
    const char* prefetch_from = nullptr;  // PREFETCHES: weights to prefetch, and bytes prefetched per feature
    int64_t prefetch_step_nbytes = 0;
};

template <int MR, int VECS>
__attribute__((noinline)) void multiply(const Part& part, const Tile& tile, const BoundEpilogue& epilogue) {
    constexpr int NR = VECS * LANES, SUMS = MR * VECS;
    constexpr int COPIES = copies_of(SUMS);
    vf sums[COPIES * SUMS];
    unroll<COPIES * SUMS>([&](auto i) MLSYS_INLINE { sums[i] = vf{}; });
    if (part.is_first) unroll<SUMS>([&](auto i) MLSYS_INLINE { sums[i] = load(tile.bias + i % VECS * LANES); });

    const Weight* weights = tile.weights;
    const int64_t ldb = tile.ldb;
    const char* prefetch_from = tile.prefetch_from ? tile.prefetch_from : (const char*)weights;
    for (int tap = part.first_tap; tap < part.stop_tap; tap++, weights += part.K * ldb) {
        const float* rows[MR];
        unroll<MR>([&](auto r) MLSYS_INLINE { rows[r] = tile.rows[r * tile.taps + tap] + part.first_k; });
        const auto prefetch = [&]() MLSYS_INLINE {
            if constexpr (PREFETCHES) __builtin_prefetch(prefetch_from, 0, 2), prefetch_from += tile.prefetch_step_nbytes;
        };
        constexpr int FEATURES = features_of(MR, VECS);
        int64_t first = 0;
        if constexpr (FEATURES > 1)
            for (; first + FEATURES <= part.K; first += FEATURES) {
                vf w[FEATURES];
                unroll<FEATURES>([&](auto k) MLSYS_INLINE {
                    w[k] = in_register(load(weights + (first + k) * ldb));
                    prefetch();
                });
                unroll<MR>([&](auto r) MLSYS_INLINE {
                    const float* row = rows[r] + first;
                    unroll<FEATURES>([&](auto k) MLSYS_INLINE { sums[r] = fma(splat(row[k]), w[k], sums[r]); });
                });
            }
        micro_kernel<MR, VECS, COPIES>(
            sums, part.K - first, [&](auto r, int64_t k) MLSYS_INLINE { return rows[r][first + k]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(weights + (first + k) * ldb + v * LANES); }, prefetch);
    }
    add_copies<COPIES>(sums);
    if (!part.is_first)  // each part is summed by itself, then added: less rounding in long sums
        unroll<SUMS>([&](auto i) MLSYS_INLINE { sums[i] += load(tile.sums + i * LANES); });

    if (part.is_last && epilogue.is_plain && tile.N > NR - LANES) {
        const vf low = splat(epilogue.low), high = splat(epilogue.high);
        const int last = tile.N - (NR - LANES);  // columns of the last vector
        const auto finish = [&](auto&& read, auto&& write) MLSYS_INLINE {
            if (epilogue.has_residual)
                unroll<SUMS>([&](auto i) MLSYS_INLINE {
                    const float* from = tile.residual + i / VECS * tile.ld_residual + i % VECS * LANES;
                    sums[i] += i % VECS == VECS - 1 ? read(from) : load(from);
                });
            unroll<SUMS>([&](auto i) MLSYS_INLINE {
                float* to = tile.c + i / VECS * tile.ldc + i % VECS * LANES;
                const vf y = smaller(high, larger(low, sums[i]));
                i % VECS == VECS - 1 ? write(to, y) : store(to, y);
            });
        };
        if (last == LANES)
            finish([](const float* from) { return load(from); }, [](float* to, vf y) { store(to, y); });
        else
            finish(
                [&](const float* from) { return load_first(from, last); },
                [&](float* to, vf y) { store_first(to, y, last); });
        return;
    }
    alignas(64) float kept[SUMS * LANES];
    float* to = part.is_last ? kept : tile.sums;
    unroll<SUMS>([&](auto i) MLSYS_INLINE { store(to + i * LANES, sums[i]); });
    if (part.is_last)
        epilogue.apply(kept, NR, MR, tile.residual, tile.ld_residual, tile.c, tile.ldc, tile.N);
}

using Multiply = void (*)(const Part&, const Tile&, const BoundEpilogue&);

template <int VECS, int... MR>
constexpr Multiply multiply_of(int mr, std::integer_sequence<int, MR...>) {
    constexpr Multiply table[] = {multiply<MR + 1, VECS>...};
    return table[mr - 1];
}

// `mr` is 1 to max_mr(vecs).
inline Multiply multiply_of(int mr, int vecs) {
    switch (vecs) {
        case 1: return multiply_of<1>(mr, std::make_integer_sequence<int, max_mr(1)>());
        case 2: return multiply_of<2>(mr, std::make_integer_sequence<int, max_mr(2)>());
        default: return multiply_of<3>(mr, std::make_integer_sequence<int, max_mr(3)>());
    }
}

// Bytes of the next panel that each of `groups` groups of rows prefetches per feature.
inline int64_t prefetch_step(int vecs, int groups) { return (vecs * LANES * (int64_t)sizeof(Weight) + groups - 1) / groups; }

// C = M rows times one panel; prefetches as many weights from `tile.prefetch_from` on, unless that is null.
inline void multiply_rows(const float* const* rows, int M, int64_t K, Tile tile, const BoundEpilogue& epilogue, int vecs) {
    const Part part{0, 1, 0, (int)K, true, true};
    const int mr = max_mr(vecs), groups = (M + mr - 1) / mr;
    if (tile.prefetch_from) tile.prefetch_step_nbytes = prefetch_step(vecs, groups);
    const Tile all = tile;
    for_row_groups(M, mr, [&](int row, int some) {
        tile.rows = rows + row;
        tile.c = all.c + row * tile.ldc;
        if (tile.residual) tile.residual = all.residual + row * tile.ld_residual;
        multiply_of(some, vecs)(part, tile, epilogue);
        if (tile.prefetch_from) tile.prefetch_from += K * tile.prefetch_step_nbytes;
    });
}

}  // namespace nimble
