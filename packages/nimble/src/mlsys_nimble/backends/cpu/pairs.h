// Convolutions and linears of bf16 pairs: pixels are rounded to bf16, weights are bf16 already, sums are floats. Bias, residual
// and activation follow in floats.
//
// A panel is 1 or 2 vectors of output columns; two neighbouring features of each column stand together, as one instruction of
// AVX512-BF16 multiplies them (mlsys/vec.h: add_pairs). Elsewhere two fused products do. Pixels are rounded as they are
// gathered to rows (windows.h).
#pragma once

#include "epilogue.h"
#include "windows.h"

namespace nimble {

struct PairsConvolution {
    View x, residual, out;    // [N, C, D, H, W]
    const uint32_t* weights;  // [groups][panels][K / 2][vectors][LANES]
    const float* bias;        // [groups][N in whole vectors]
    int32_t kernel[SPACE], stride[SPACE], before[SPACE], dilation[SPACE];
    int32_t groups;
    Epilogue epilogue;
};
MLSYS_STRUCT(PairsConvolution, x, residual, out, weights, bias, kernel, stride, before, dilation, groups, epilogue);

constexpr int MOST_ROWS = LANES == 16 ? 12 : 4;  // rows of a tile, at most, whose sums fit in the registers

// To the nearest, ties to even; NaN stays NaN.
inline void store_rounded(uint16_t* to, vf x) {
#if MLSYS_LANES == 16 && defined(__AVX512BF16__)
    store(to, x);
#else
    const vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    const vi is_number = x == x;
    const vh out = __builtin_convertvector((rounded & (vu)is_number) | (quiet & ~(vu)is_number), vh);
    std::memcpy(to, &out, sizeof out);
#endif
}

// Floats to rows of bf16. A vector behind a run may be written to: what follows in the row overwrites it.
struct RoundPixels {
    using From = float;
    using To = uint16_t;

    void pad(uint16_t* to, int64_t count) const { std::memset(to, 0, count * sizeof(uint16_t)); }
    void run(uint16_t* to, const float* from, int64_t count) const {
        for (; count >= LANES; count -= LANES, to += LANES, from += LANES) store_rounded(to, load(from));
        if (count) store_rounded(to, load_first(from, (int)count));
    }
    void apart(uint16_t* to, const float* from, int64_t count, int64_t gap) const {
        for (; count > 0; count -= LANES, to += LANES, from += LANES * gap) {
            float some[LANES] = {};
            for (int i = 0; i < std::min<int64_t>(count, LANES); i++) some[i] = from[i * gap];
            store_rounded(to, load(some));
        }
    }
    void end(uint16_t* to, const uint16_t* stop) const { std::memset(to, 0, (stop - to) * sizeof(uint16_t)); }
};

class PairsConvolutionKernel : public Kernel {
  public:
    explicit PairsConvolutionKernel(const PairsConvolution& c)
        : c(c), epilogue(c.epilogue), windows(c, {2, MOST_ROWS, 192, 384 << 10, 2 * MOST_ROWS, 2 * LANES}) {
        units = windows.units;
        scratch_nbytes = windows.scratch_nbytes;
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const auto multiply = [&](auto... where) { multiply_panel(where...); };
        windows.run(begin, end, scratch, RoundPixels(), multiply);
    }

  private:
    struct Tile {
        const uint16_t* rows[MOST_ROWS];
        const float* residuals[MOST_ROWS];
        float* outs[MOST_ROWS];
        const uint32_t* weights;
        const float* bias;
        const char* prefetch_from;  // weights of the next panel, a part of which each tile prefetches
        int64_t prefetch_step_nbytes;
        int N;  // columns to store
    };

    void multiply_panel(const uint16_t* gathered, const Place* places, int rows, int64_t group, int64_t panel) const {
        const int64_t first = panel * PANEL_VECS, column = first * LANES, padded = group * windows.vecs * LANES + column;
        const int some = (int)std::min<int64_t>(PANEL_VECS, windows.vecs - first);
        const int groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
        Tile tile;
        tile.weights = c.weights + padded * windows.words;
        tile.bias = c.bias + padded;
        tile.N = (int)std::min<int64_t>(windows.N - column, some * LANES);
        tile.prefetch_from = (const char*)(tile.weights + windows.words * some * LANES);
        tile.prefetch_step_nbytes = (some * LANES * (int64_t)sizeof(uint32_t) + groups - 1) / groups;
        float* out = c.out.as<float>() + group * windows.N + column;
        const float* residual = epilogue.has_residual ? c.residual.as<const float>() + group * windows.N + column : nullptr;
        for_row_groups(rows, MOST_ROWS, [&](int row, int count) {
            for (int r = 0; r < count; r++) {
                const Place& place = places[row + r];
                tile.rows[r] = gathered + (row + r) * windows.row;
                tile.outs[r] = out + place.out;
                tile.residuals[r] = residual ? residual + place.residual : nullptr;
            }
            multiply_of(count, some)(tile, windows.words, epilogue);
            tile.prefetch_from += windows.words * tile.prefetch_step_nbytes;
        });
    }

    template <int MR, int VECS>
    static __attribute__((noinline)) void multiply(const Tile& tile, int64_t words, const BoundEpilogue& epilogue) {
        constexpr int SUMS = MR * VECS;
        constexpr int COPIES = SUMS >= 8 ? 1 : SUMS >= 4 ? 2 : 4;  // copies of few sums: additions wait for each other
        vf sums[COPIES * SUMS];
        unroll<COPIES * SUMS>([&](auto i) MLSYS_INLINE { sums[i] = i < SUMS ? load(tile.bias + i % VECS * LANES) : vf{}; });
        const uint16_t* rows[MR];
        unroll<MR>([&](auto r) MLSYS_INLINE { rows[r] = tile.rows[r]; });
        const uint32_t* weights = tile.weights;
        const char* prefetch_from = tile.prefetch_from;
        const auto step = [&](int64_t k, auto copy) MLSYS_INLINE {
            vu w[VECS];
            unroll<VECS>([&](auto v) MLSYS_INLINE { w[v] = load_as<vu>(weights + (k * VECS + v) * LANES); });
            unroll<MR>([&](auto r) MLSYS_INLINE {
                const vu pair = (vu)splat_int(load_as<int32_t>(rows[r] + 2 * k));
                unroll<VECS>([&](auto v) MLSYS_INLINE {
                    constexpr int at = (decltype(copy)::value * MR + decltype(r)::value) * VECS + decltype(v)::value;
                    sums[at] = add_pairs(sums[at], pair, w[v]);
                });
            });
            __builtin_prefetch(prefetch_from, 0, 2);
            prefetch_from += tile.prefetch_step_nbytes;
        };
        int64_t k = 0;
        for (; k + COPIES <= words; k += COPIES) unroll<COPIES>([&](auto copy) MLSYS_INLINE { step(k + copy, copy); });
        if constexpr (COPIES > 1)
            for (; k < words; k++) step(k, std::integral_constant<int, 0>());
        add_copies<COPIES>(sums);
        if (epilogue.is_plain && tile.N == VECS * LANES) {
            unroll<MR>([&](auto r) MLSYS_INLINE {
                unroll<VECS>([&](auto v) MLSYS_INLINE {
                    vf y = sums[r * VECS + v];
                    if (tile.residuals[r]) y += load(tile.residuals[r] + v * LANES);
                    store(tile.outs[r] + v * LANES, epilogue.clamp(y));
                });
            });
            return;
        }
        alignas(64) float kept[MR][VECS * LANES];
        unroll<MR>([&](auto r) MLSYS_INLINE {
            unroll<VECS>([&](auto v) MLSYS_INLINE { store(&kept[r][v * LANES], sums[r * VECS + v]); });
        });
        for (int r = 0; r < MR; r++) epilogue.apply(kept[r], VECS * LANES, 1, tile.residuals[r], 0, tile.outs[r], 0, tile.N);
    }

    using Multiply = void (*)(const Tile&, int64_t, const BoundEpilogue&);

    template <int VECS, int... MR>
    static constexpr Multiply multiply_of(int mr, std::integer_sequence<int, MR...>) {
        constexpr Multiply table[] = {multiply<MR + 1, VECS>...};
        return table[mr - 1];
    }
    static Multiply multiply_of(int mr, int vecs) {
        constexpr auto every = std::make_integer_sequence<int, MOST_ROWS>();
        return vecs == 1 ? multiply_of<1>(mr, every) : multiply_of<2>(mr, every);
    }

    const PairsConvolution c;
    const BoundEpilogue epilogue;
    const Windows<PairsConvolution> windows;
};

}  // namespace nimble
