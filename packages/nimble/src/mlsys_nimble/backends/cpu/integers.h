// Convolutions and linears of whole numbers: uint8 pixels times int8 weights, summed exactly in int32 (mlsys/dot.h), so the
// sums are the same on every machine and however the work is cut.
//
// A panel is 1 or 2 vectors of output columns; four neighbouring features of each column stand together. The pixels of
// a window are gathered to rows of features in scratch, a block of output pixels at a time (windows.h): bytes are few. Padding
// is the zero point. Rows of a linear, and of a 1x1 window, are read where they lie.
#pragma once

#include "codes.h"
#include "windows.h"

namespace nimble {

constexpr int DOT_WORDS = ByteDot::WORDS;
MLSYS_CONSTANTS(DOT_WORDS);

struct IntegerConvolution {
    View x, residual, out;   // [N, C, D, H, W]; x uint8
    View parameters;         // scale and zero point of x, float32 [2]; rank 0: `zero_point`, and scales have its scale
    const int32_t* weights;  // [groups][panels][K / 4][vectors][DOT_WORDS][LANES]
    const float* scales;     // [groups][N in whole vectors]
    const float* bias;
    const int32_t* sums;     // of each column's weights
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
constexpr int MAX_ROWS = 4;  // of a tile; the registers hold their sums
#else
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;
#endif

constexpr int COPIED = 32;  // bytes at once; there is room for as many behind what is written

// `end`: of the memory that may be read.
inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t count, const uint8_t* end) {
    if (from + (count + COPIED - 1) / COPIED * COPIED <= end) {
        for (; count > 0; count -= COPIED, to += COPIED, from += COPIED) std::memcpy(to, from, COPIED);
        return;
    }
    for (; count >= 32; count -= 32, to += 32, from += 32) std::memcpy(to, from, 32);
    if (count & 16) std::memcpy(to, from, 16), to += 16, from += 16;
    if (count & 8) std::memcpy(to, from, 8), to += 8, from += 8;
    if (count & 4) std::memcpy(to, from, 4), to += 4, from += 4;
    for (count &= 3; count; count--) *to++ = *from++;
}

// Codes to rows of codes.
struct CopyCodes {
    using From = uint8_t;
    using To = uint8_t;
    const uint8_t* stop;  // of the memory that may be read
    int32_t zero_point;

    void pad(uint8_t* to, int64_t count) const { std::memset(to, zero_point, count); }
    void run(uint8_t* to, const uint8_t* from, int64_t count) const { copy_bytes(to, from, count, stop); }
    void apart(uint8_t* to, const uint8_t* from, int64_t count, int64_t gap) const {
        for (int64_t i = 0; i < count; i++) to[i] = from[i * gap];
    }
    void end(uint8_t* to, const uint8_t* stop) const { std::memset(to, 0, stop - to); }
};

class IntegerConvolutionKernel : public Kernel {
  public:
    explicit IntegerConvolutionKernel(const IntegerConvolution& c)
        : c(c), finish(c.codes, c.epilogue), windows(c, {4, MAX_ROWS, 192, 256 << 10, 2 * MAX_ROWS, true, COPIED}) {
        units = windows.units;
        scratch_nbytes = windows.scratch_nbytes;
        read = 1;
        for (int d = 0; d < 5; d++) read += (c.x.shape[d] - 1) * c.x.strides[d];
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const float* parameters = c.parameters.rank ? c.parameters.as<const float>() : nullptr;
        const int32_t zero_point = parameters ? (int32_t)parameters[1] : c.zero_point;
        const CopyCodes copy{c.x.as<const uint8_t>() + read, zero_point};
        const auto multiply = [&](auto... where) { multiply_panel(where..., zero_point, parameters ? parameters[0] : 1.0f); };
        windows.run(begin, end, scratch, copy, multiply);
    }

  private:
    struct Tile {
        const uint8_t* rows[MAX_ROWS];
        const char* residuals[MAX_ROWS];  // null: there is none
        char* outs[MAX_ROWS];
        const int32_t* weights;
        const float *scales, *bias;
        const int32_t* sums;
        int32_t zero_point;
        float scale;
        int N;  // columns to store
    };

    void multiply_panel(
        const uint8_t* x, const uint8_t* gathered, const Place* places, int rows, int64_t group, int64_t panel,
        int32_t zero_point, float scale) const {
        const int64_t first = panel * PANEL_VECS, column = first * LANES, padded = group * windows.vecs * LANES + column;
        const int some = (int)std::min<int64_t>(PANEL_VECS, windows.vecs - first);
        Tile tile;
        tile.weights = c.weights + padded * windows.words * DOT_WORDS;
        tile.scales = c.scales + padded;
        tile.bias = c.bias + padded;
        tile.sums = c.sums + padded;
        tile.zero_point = zero_point;
        tile.scale = scale;
        tile.N = (int)std::min<int64_t>(windows.N - column, some * LANES);
        char* out = c.out.as<char>() + (group * windows.N + column) * finish.out_size();
        const char* residual = finish.has_residual() ? c.residual.as<const char>() + (group * windows.N + column) * finish.residual_size() : nullptr;
        for_row_groups(rows, MAX_ROWS, [&](int row, int count) {
            for (int r = 0; r < count; r++) {
                const Place& place = places[row + r];
                tile.rows[r] = windows.is_direct ? x + place.x : gathered + (row + r) * windows.row;
                tile.outs[r] = out + place.out * finish.out_size();
                tile.residuals[r] = residual ? residual + place.residual * finish.residual_size() : nullptr;
            }
            multiply_of(count, some)(tile, windows.words, finish);
        });
    }

    template <int MR, int VECS>
    static __attribute__((noinline)) void multiply(const Tile& tile, int64_t quads, const Finish& finish) {
        constexpr int SUMS = MR * VECS;
        constexpr int COPIES = SUMS >= 6 ? 1 : SUMS >= 3 ? 2 : 4;  // few sums would wait for each other
        vi sums[COPIES * SUMS];
        const vi zero = splat_int(ByteDot::SUBTRACTED - tile.zero_point);
        unroll<COPIES * SUMS>([&](auto i) MLSYS_INLINE {
            sums[i] = i < SUMS ? load_as<vi>(tile.sums + i % VECS * LANES) * zero : vi{};
        });
        const uint8_t* rows[MR];
        unroll<MR>([&](auto r) MLSYS_INLINE { rows[r] = tile.rows[r]; });
        const int32_t* weights = tile.weights;
        const auto step = [&](int64_t k, auto copy) MLSYS_INLINE {
            vi w[VECS][DOT_WORDS];
            unroll<VECS * DOT_WORDS>([&](auto i) MLSYS_INLINE {
                w[i / DOT_WORDS][i % DOT_WORDS] = load_as<vi>(weights + (k * VECS * DOT_WORDS + i) * LANES);
            });
            unroll<MR>([&](auto r) MLSYS_INLINE {
                const auto u = ByteDot::weights(splat_int(load_as<int32_t>(rows[r] + 4 * k)));
                unroll<VECS>([&](auto v) MLSYS_INLINE {
                    constexpr int at = (decltype(copy)::value * MR + decltype(r)::value) * VECS + decltype(v)::value;
                    sums[at] = ByteDot::add(sums[at], u, w[v]);
                });
            });
        };
        int64_t k = 0;
        for (; k + COPIES <= quads; k += COPIES) unroll<COPIES>([&](auto copy) MLSYS_INLINE { step(k + copy, copy); });
        if constexpr (COPIES > 1) {
            for (; k < quads; k++) step(k, std::integral_constant<int, 0>());
            unroll<(COPIES - 1) * SUMS>([&](auto i) MLSYS_INLINE { sums[i % SUMS] += sums[i + SUMS]; });
        }
        vf scales[VECS], bias[VECS];
        unroll<VECS>([&](auto v) MLSYS_INLINE {
            scales[v] = load(tile.scales + v * LANES) * splat(tile.scale);
            bias[v] = load(tile.bias + v * LANES);
        });
        const auto value = [&](auto r, auto v) MLSYS_INLINE {
            return fma(__builtin_convertvector(sums[r * VECS + v], vf), scales[v], bias[v]);
        };
        if (finish.is_plain() && tile.N == VECS * LANES) {
            const auto each = [&](auto makes_codes) MLSYS_INLINE {
                unroll<MR>([&](auto r) MLSYS_INLINE {
                    unroll<VECS>([&](auto v) MLSYS_INLINE {
                        vf y = value(r, v);
                        if (tile.residuals[r]) y += finish.residual(tile.residuals[r] + v * LANES * finish.residual_size());
                        constexpr int size = decltype(makes_codes)::value ? 1 : 4;
                        finish.template store_plain<decltype(makes_codes)::value>(tile.outs[r] + v * LANES * size, y);
                    });
                });
            };
            if (finish.makes_codes) each(std::true_type());
            else each(std::false_type());
            return;
        }
        alignas(64) float kept[MR][VECS * LANES];
        unroll<MR>([&](auto r) MLSYS_INLINE {
            unroll<VECS>([&](auto v) MLSYS_INLINE { store(&kept[r][v * LANES], value(r, v)); });
        });
        for (int r = 0; r < MR; r++) finish.store_row(kept[r], tile.N, tile.residuals[r], tile.outs[r]);
    }

    using Multiply = void (*)(const Tile&, int64_t, const Finish&);

    template <int VECS, int... MR>
    static constexpr Multiply multiply_of(int mr, std::integer_sequence<int, MR...>) {
        constexpr Multiply table[] = {multiply<MR + 1, VECS>...};
        return table[mr - 1];
    }
    static Multiply multiply_of(int mr, int vecs) {
        constexpr auto every = std::make_integer_sequence<int, MAX_ROWS>();
        return vecs == 1 ? multiply_of<1>(mr, every) : multiply_of<2>(mr, every);
    }

    const IntegerConvolution c;
    const Finish finish;
    const Windows<IntegerConvolution> windows;
    int64_t read;  // bytes from the first to behind the last of x
};

}  // namespace nimble
