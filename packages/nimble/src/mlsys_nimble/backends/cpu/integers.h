// Integer convolutions and linears: uint8 pixels times int8 weights, summed exactly in int32 (mlsys/dot.h), so the sums are
// the same on every machine and for every division of the work.
//
// A panel is 1 or 2 vectors of output columns; four neighbouring features of each column are adjacent. Windows are runs of
// bytes (lines.h); the last word of a run may hold features of the next pixel, whose weights are zero. Padding is the zero point.
#pragma once

#include "codes.h"
#include "lines.h"

namespace nimble {

constexpr int DOT_WORDS = ByteDot::WORDS;
MLSYS_CONSTANTS(DOT_WORDS);

struct IntegerConvolution {
    View x, residual, out;   // [N, C, D, H, W]; x uint8
    View parameters;         // scale and zero point of x, float32 [2]; rank 0: `zero_point`, and scales have its scale
    const int32_t* weights;  // [groups][panels][words of all runs][vectors][DOT_WORDS][LANES]
    const float* scales;     // [groups][N in whole vectors]
    const float* bias;
    const int32_t* sums;     // [N]: sum of each column's weights
    int32_t kernel[SPACE], stride[SPACE], before[SPACE], dilation[SPACE];
    int32_t groups;
    int32_t zero_point;
    Codes codes;
    Epilogue epilogue;
};
MLSYS_STRUCT(
    IntegerConvolution, x, residual, out, parameters, weights, scales, bias, sums, kernel, stride, before, dilation, groups,
    zero_point, codes, epilogue);

#if defined(MLSYS_DOT_PAIRS) && MLSYS_LANES == 8
constexpr int MAX_ROWS = 4;  // rows of a tile, at most, whose sums fit in the registers
#else
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;
#endif

constexpr int64_t AHEAD = 16;  // words between two prefetches of the next panel's weights

class IntegerConvolutionKernel : public Kernel {
  public:
    explicit IntegerConvolutionKernel(const IntegerConvolution& c) : c(c), finish(c.codes, c.epilogue), lines(c, MAX_ROWS) {
        units = lines.units;
        scratch_nbytes = lines.scratch_nbytes;
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const float* parameters = c.parameters.rank ? c.parameters.as<const float>() : nullptr;
        const int32_t zero_point = parameters ? (int32_t)parameters[1] : c.zero_point;
        lines.run(begin, end, scratch, zero_point, [&](auto... where) {
            multiply_panel(where..., zero_point, parameters ? parameters[0] : 1.0f);
        });
    }

  private:
    struct Tile {
        const uint8_t* const* starts;  // first byte of each pixel
        const char* residual;          // null: no residual
        char* out;
        int64_t residual_step, out_step;  // bytes between pixels
        const int32_t* weights;
        const float *scales, *bias;
        const int32_t* sums;
        const char* ahead;       // the next panel's weights that this tile prefetches
        int64_t ahead_nbytes;    // bytes to prefetch after each AHEAD words
        const int64_t* offsets;  // byte offset of each run from its pixel's first byte
        int64_t runs, quads;
        int32_t zero_point;
        float scale;
        int N;  // columns to store
    };

    void multiply_panel(
        const uint8_t* const* starts, int pixels, int64_t out, int64_t residual, int64_t group, int64_t panel,
        int32_t zero_point, float scale) const {
        const int64_t first = panel * PANEL_VECS, column = first * LANES, padded = group * lines.vecs * LANES + column;
        const int some = (int)std::min<int64_t>(PANEL_VECS, lines.vecs - first);
        Tile tile;
        tile.weights = c.weights + padded * lines.runs * lines.quads * DOT_WORDS;
        tile.scales = c.scales + padded;
        tile.bias = c.bias + padded;
        tile.sums = c.sums + padded;
        tile.offsets = lines.offsets.data();
        tile.runs = lines.runs;
        tile.quads = lines.quads;
        tile.zero_point = zero_point;
        tile.scale = scale;
        tile.N = (int)std::min<int64_t>(lines.N - column, some * LANES);
        tile.out_step = lines.outs[3] * finish.out_size();
        tile.residual_step = lines.residuals[3] * finish.residual_size();
        char* to = c.out.as<char>() + (out + group * lines.N + column) * finish.out_size();
        const char* add = nullptr;
        if (finish.has_residual()) add = c.residual.as<const char>() + (residual + group * lines.N + column) * finish.residual_size();
        const int64_t panel_words = lines.runs * lines.quads, word_nbytes = some * DOT_WORDS * LANES * sizeof(int32_t);
        const int64_t tiles = (pixels + MAX_ROWS - 1) / MAX_ROWS, part = panel_words * word_nbytes / tiles;
        const bool fetches = some == PANEL_VECS && panel_words >= 4 * AHEAD && tiles >= 8;
        tile.ahead_nbytes = AHEAD * word_nbytes / tiles;
        tile.ahead = (const char*)tile.weights + panel_words * word_nbytes;
        for_row_groups(pixels, MAX_ROWS, [&](int row, int count) {
            tile.starts = starts + row;
            tile.out = to + row * tile.out_step;
            tile.residual = add ? add + row * tile.residual_step : nullptr;
            multiply_of(count, some, fetches)(tile, finish);
            tile.ahead += part;
        });
    }

    // FETCHES: prefetch this tile's part of the next panel's weights during the computation; for large panels.
    template <int MR, int VECS, bool FETCHES>
    static __attribute__((noinline)) void multiply(const Tile& tile, const Finish& finish) {
        constexpr int SUMS = MR * VECS;
        constexpr int COPIES = SUMS >= 6 ? 1 : SUMS >= 3 ? 2 : 4;  // copies of few sums: additions wait for each other
        vi sums[COPIES * SUMS];
        const vi zero = splat_int(ByteDot::SUBTRACTED - tile.zero_point);
        unroll<COPIES * SUMS>([&](auto i) MLSYS_INLINE {
            sums[i] = i < SUMS ? load_as<vi>(tile.sums + i % VECS * LANES) * zero : vi{};
        });
        const uint8_t* rows[MR];
        unroll<MR>([&](auto r) MLSYS_INLINE { rows[r] = tile.starts[r]; });
        const int32_t* weights = tile.weights;
        [[maybe_unused]] const char *ahead = tile.ahead, *until = ahead;
        for (int64_t run = 0; run < tile.runs; run++) {
            int64_t at = tile.offsets[run];
            const int64_t end = at + 4 * tile.quads;
            const auto step = [&](int64_t at, const int32_t* weights, auto copy) MLSYS_INLINE {
                vi w[VECS][DOT_WORDS];
                unroll<VECS * DOT_WORDS>([&](auto i) MLSYS_INLINE {
                    w[i / DOT_WORDS][i % DOT_WORDS] = load_as<vi>(weights + i * LANES);
                });
                unroll<MR>([&](auto r) MLSYS_INLINE {
                    const auto u = ByteDot::weights(splat_int(load_as<int32_t>(rows[r] + at)));
                    unroll<VECS>([&](auto v) MLSYS_INLINE {
                        constexpr int sum = (decltype(copy)::value * MR + decltype(r)::value) * VECS + decltype(v)::value;
                        sums[sum] = ByteDot::add(sums[sum], u, w[v]);
                    });
                });
            };
            constexpr int64_t WORDS = VECS * DOT_WORDS * LANES;
            const auto steps = [&](int64_t stop) MLSYS_INLINE {
                for (; at + 4 * COPIES <= stop; at += 4 * COPIES, weights += COPIES * WORDS)
                    unroll<COPIES>([&](auto copy) MLSYS_INLINE { step(at + 4 * copy, weights + copy * WORDS, copy); });
            };
            if constexpr (FETCHES) {
                while (at < end) {
                    steps(std::min(end, at + 4 * AHEAD));
                    until += tile.ahead_nbytes;
                    for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
                }
            } else {
                steps(end);
            }
            if constexpr (COPIES > 1)
                for (; at < end; at += 4, weights += WORDS) step(at, weights, std::integral_constant<int, 0>());
        }
        if constexpr (COPIES > 1) unroll<(COPIES - 1) * SUMS>([&](auto i) MLSYS_INLINE { sums[i % SUMS] += sums[i + SUMS]; });
        vf scales[VECS], bias[VECS];
        unroll<VECS>([&](auto v) MLSYS_INLINE {
            scales[v] = load(tile.scales + v * LANES) * splat(tile.scale);
            bias[v] = load(tile.bias + v * LANES);
        });
        const auto value = [&](auto r, auto v) MLSYS_INLINE {
            return fma(__builtin_convertvector(sums[r * VECS + v], vf), scales[v], bias[v]);
        };
        if (finish.is_plain() && (HAS_MASKS || tile.N == VECS * LANES)) {
            const auto store_all = [&](const auto& made) MLSYS_INLINE {
                if (!finish.makes_codes) store_floats<MR, VECS>(tile, finish, made);
                else store_codes<MR, VECS>(tile, finish, made);
            };
            if (finish.is_in_steps() || !finish.makes_codes) {
                if (!tile.residual) return store_all(value);
                return finish.with_residual([&](const auto& load_from) MLSYS_INLINE {
                    store_all([&](auto r, auto v) MLSYS_INLINE {
                        return value(r, v) + load_from(tile.residual + r * tile.residual_step, v * LANES, columns<v, VECS>(tile));
                    });
                });
            }
        }
        alignas(64) float kept[MR][VECS * LANES];
        unroll<MR>([&](auto r) MLSYS_INLINE {
            unroll<VECS>([&](auto v) MLSYS_INLINE { store(&kept[r][v * LANES], value(r, v)); });
        });
        finish.apply(&kept[0][0], MR, VECS * LANES, tile.N, tile.residual, tile.residual_step);
        const vf inverse = splat(finish.rounding.inverse);
        if (finish.makes_codes) store_codes<MR, VECS>(tile, finish, [&](auto r, auto v) MLSYS_INLINE {
            return load(&kept[r][v * LANES]) * inverse;
        });
        else store_floats<MR, VECS>(tile, finish, [&](auto r, auto v) MLSYS_INLINE { return load(&kept[r][v * LANES]); });
    }

    // Columns of vector V of a tile.
    template <int V, int VECS>
    static inline __attribute__((always_inline)) int columns(const Tile& tile) {
        return V + 1 < VECS ? LANES : tile.N - V * LANES;
    }

    template <int MR, int VECS, class Value>
    static inline __attribute__((always_inline)) void store_floats(const Tile& tile, const Finish& finish, const Value& value) {
        unroll<MR>([&](auto r) MLSYS_INLINE {
            unroll<VECS>([&](auto v) MLSYS_INLINE {
                float* to = (float*)(tile.out + r * tile.out_step) + v * LANES;
                const vf y = finish.epilogue.clamp(value(r, v));
                const int count = columns<v, VECS>(tile);
                if (HAS_MASKS || count < LANES) store_first(to, y, count);
                else store(to, y);
            });
        });
    }

    // Four vectors at a time: rows of 2, or of 1. `value` is in steps of the result's scale.
    template <int MR, int VECS, class Value>
    static inline __attribute__((always_inline)) void store_codes(const Tile& tile, const Finish& finish, const Value& value) {
        constexpr int ROWS = 4 / VECS;
        unroll<(MR + ROWS - 1) / ROWS>([&](auto some) MLSYS_INLINE {
            vi steps[4];
            unroll<4>([&](auto i) MLSYS_INLINE {
                constexpr int row = decltype(some)::value * ROWS + i / VECS;
                if constexpr (row >= MR) steps[i] = vi{};
                else steps[i] = finish.rounding.in_steps(value(std::integral_constant<int, row>(), std::integral_constant<int, i % VECS>()));
            });
            const vq bytes = finish.rounding.pack(steps);
            unroll<ROWS>([&](auto r) MLSYS_INLINE {
                constexpr int row = decltype(some)::value * ROWS + r;
                if constexpr (row < MR) store_part<r, ROWS>((uint8_t*)tile.out + row * tile.out_step, bytes, tile.N);
            });
        });
    }

    using Multiply = void (*)(const Tile&, const Finish&);

    template <int VECS, bool FETCHES, int... MR>
    static constexpr Multiply multiply_of(int mr, std::integer_sequence<int, MR...>) {
        constexpr Multiply table[] = {multiply<MR + 1, VECS, FETCHES && (MR + 1 > MAX_ROWS / 2)>...};
        return table[mr - 1];
    }
    static Multiply multiply_of(int mr, int vecs, bool fetches) {
        constexpr auto every = std::make_integer_sequence<int, MAX_ROWS>();
        if (vecs == 1) return multiply_of<1, false>(mr, every);
        return fetches ? multiply_of<2, true>(mr, every) : multiply_of<2, false>(mr, every);
    }

    const IntegerConvolution c;
    const Finish finish;
    const Lines<IntegerConvolution> lines;
};

}  // namespace nimble
