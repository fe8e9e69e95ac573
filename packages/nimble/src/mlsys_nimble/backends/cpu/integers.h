// Convolutions and linears of whole numbers: uint8 pixels times int8 weights, summed exactly in int32 (mlsys/dot.h), so the
// sums are the same on every machine and however the work is cut.
//
// A panel is 1 or 2 vectors of output columns; four neighbouring features of each column stand together. The pixels of
// a window are gathered to rows of features in scratch, a block of output pixels at a time: bytes are few. Padding is the
// zero point. Rows of a linear, and of a 1x1 window, are read where they lie.
#pragma once

#include <algorithm>

#include <mlsys/gemm.h>

#include "codes.h"

namespace nimble {

constexpr int SPACE = 3;  // depth, height, width
constexpr int DOT_WORDS = ByteDot::WORDS;
MLSYS_CONSTANTS(SPACE, DOT_WORDS);

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

constexpr int PANEL_VECS = 2;
#if defined(MLSYS_DOT_PAIRS) && MLSYS_LANES == 8
constexpr int MAX_ROWS = 4;  // of a tile; the registers hold their sums
#else
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;
#endif
constexpr int BLOCK_ROWS = 192;
constexpr int LEAST_ROWS = 2 * MAX_ROWS;
constexpr int BLOCK_NBYTES = 256 << 10;  // of their features, in the second-level cache
constexpr int ENOUGH_UNITS = 16;

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

class IntegerConvolutionKernel : public Kernel {
  public:
    explicit IntegerConvolutionKernel(const IntegerConvolution& c) : c(c), finish(c.codes, c.epilogue) {
        channels = c.x.shape[1] / c.groups;
        N = c.out.shape[1] / c.groups;
        vecs = (N + LANES - 1) / LANES;
        panels = (vecs + PANEL_VECS - 1) / PANEL_VECS;
        const int64_t K = (int64_t)c.kernel[0] * c.kernel[1] * c.kernel[2] * channels;
        quads = (K + 3) / 4;
        pixels = c.out.shape[0] * c.out.shape[2] * c.out.shape[3] * c.out.shape[4];
        read = 1;
        for (int d = 0; d < 5; d++) read += (c.x.shape[d] - 1) * c.x.strides[d];
        is_direct = K % 4 == 0 && K == channels && c.x.strides[1] == 1;
        for (int d = 0; d < SPACE; d++) is_direct &= c.before[d] == 0 && c.x.shape[2 + d] >= (c.out.shape[2 + d] - 1) * c.stride[d] + 1;
        const int64_t fitting = BLOCK_NBYTES / (4 * std::max<int64_t>(quads, 1));
        int64_t limit = std::clamp<int64_t>(fitting, LEAST_ROWS, BLOCK_ROWS);
        while (limit > LEAST_ROWS && (pixels + limit - 1) / limit * c.groups * panels < ENOUGH_UNITS) limit -= MAX_ROWS;
        blocks = (pixels + limit - 1) / limit;
        block_rows = (pixels + blocks - 1) / blocks;
        block_rows = (block_rows + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS;
        blocks = (pixels + block_rows - 1) / block_rows;
        sets = std::clamp<int64_t>((ENOUGH_UNITS + blocks * c.groups - 1) / (blocks * c.groups), 1, panels);
        units = blocks * c.groups * sets;
        places_nbytes = (block_rows * sizeof(Place) + 63) / 64 * 64;
        scratch_nbytes = places_nbytes + (is_direct ? 0 : block_rows * quads * 4 + COPIED);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        Place* places = (Place*)scratch;
        uint8_t* gathered = (uint8_t*)scratch + places_nbytes;
        const uint8_t* x = c.x.as<const uint8_t>();
        const float* parameters = c.parameters.rank ? c.parameters.as<const float>() : nullptr;
        const int32_t zero_point = parameters ? (int32_t)parameters[1] : c.zero_point;
        int64_t placed = -1, made = -1;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t set = unit % sets, group = unit / sets % c.groups, block = unit / sets / c.groups;
            const int64_t first = block * block_rows;
            const int rows = (int)std::min(block_rows, pixels - first);
            if (placed != block) place(first, rows, places);
            placed = block;
            if (!is_direct && made != unit / sets) gather(x + group * channels * c.x.strides[1], places, rows, zero_point, gathered);
            made = unit / sets;
            for (int64_t panel = panels * set / sets; panel < panels * (set + 1) / sets; panel++)
                multiply_panel(
                    x + group * channels, gathered, places, rows, group, panel, zero_point, parameters ? parameters[0] : 1.0f);
        }
    }

  private:
    struct Place {
        int64_t out, residual, x;  // in elements; x: of the pixel that a 1x1 window reads
        int32_t n, at[SPACE];
    };

    void place(int64_t first, int rows, Place* to) const {
        int64_t rest = first;
        int32_t at[4];  // n, z, y, x
        for (int d = 3; d >= 1; d--) at[d] = rest % c.out.shape[1 + d], rest /= c.out.shape[1 + d];
        at[0] = rest;
        for (int r = 0; r < rows; r++, to++) {
            to->n = at[0];
            to->out = at[0] * c.out.strides[0], to->residual = at[0] * c.residual.strides[0], to->x = at[0] * c.x.strides[0];
            for (int d = 0; d < SPACE; d++) {
                to->at[d] = at[1 + d];
                to->out += at[1 + d] * c.out.strides[2 + d];
                to->residual += at[1 + d] * c.residual.strides[2 + d];
                to->x += (int64_t)at[1 + d] * c.stride[d] * c.x.strides[2 + d];
            }
            for (int d = 3; d >= 0; d--) {
                if (++at[d] < c.out.shape[d ? 1 + d : 0] || d == 0) break;
                at[d] = 0;
            }
        }
    }

    // Rows of features, the window's columns closest after the channels.
    void gather(const uint8_t* x, const Place* places, int rows, int32_t zero_point, uint8_t* to) const {
        const int64_t row = quads * 4, pixel = c.x.strides[4];
        const uint8_t* const end = c.x.as<const uint8_t>() + read;
        const bool is_run = c.dilation[2] == 1 && pixel == channels && c.x.strides[1] == 1;
        for (int r = 0; r < rows; r++, to += row) {
            uint8_t* next = to;
            const Place& place = places[r];
            const int64_t left = (int64_t)place.at[2] * c.stride[2] - c.before[2];
            for (int kz = 0; kz < c.kernel[0]; kz++)
                for (int ky = 0; ky < c.kernel[1]; ky++) {
                    const int64_t z = (int64_t)place.at[0] * c.stride[0] - c.before[0] + kz * c.dilation[0];
                    const int64_t y = (int64_t)place.at[1] * c.stride[1] - c.before[1] + ky * c.dilation[1];
                    const int64_t count = c.kernel[2] * channels;
                    if (z < 0 || z >= c.x.shape[2] || y < 0 || y >= c.x.shape[3]) {
                        std::memset(next, zero_point, count);
                        next += count;
                        continue;
                    }
                    const uint8_t* from = x + place.n * c.x.strides[0] + z * c.x.strides[2] + y * c.x.strides[3];
                    if (is_run && left >= 0 && left + c.kernel[2] <= c.x.shape[4]) {
                        copy_bytes(next, from + left * pixel, count, end);
                        next += count;
                        continue;
                    }
                    for (int kx = 0; kx < c.kernel[2]; kx++, next += channels) {
                        const int64_t w = left + kx * c.dilation[2];
                        if (w < 0 || w >= c.x.shape[4]) std::memset(next, zero_point, channels);
                        else if (c.x.strides[1] == 1) copy_bytes(next, from + w * pixel, channels, end);
                        else for (int64_t i = 0; i < channels; i++) next[i] = from[w * pixel + i * c.x.strides[1]];
                    }
                }
            std::memset(next, 0, to + row - next);
        }
    }

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
        const int64_t first = panel * PANEL_VECS, column = first * LANES, padded = group * vecs * LANES + column;
        const int some = (int)std::min<int64_t>(PANEL_VECS, vecs - first);
        Tile tile;
        tile.weights = c.weights + padded * quads * DOT_WORDS;
        tile.scales = c.scales + padded;
        tile.bias = c.bias + padded;
        tile.sums = c.sums + padded;
        tile.zero_point = zero_point;
        tile.scale = scale;
        tile.N = (int)std::min<int64_t>(N - column, some * LANES);
        char* out = c.out.as<char>() + (group * N + column) * finish.out_size();
        const char* residual = finish.has_residual() ? c.residual.as<const char>() + (group * N + column) * finish.residual_size() : nullptr;
        for_row_groups(rows, MAX_ROWS, [&](int row, int count) {
            for (int r = 0; r < count; r++) {
                const Place& place = places[row + r];
                tile.rows[r] = is_direct ? x + place.x : gathered + (row + r) * quads * 4;
                tile.outs[r] = out + place.out * finish.out_size();
                tile.residuals[r] = residual ? residual + place.residual * finish.residual_size() : nullptr;
            }
            multiply_of(count, some)(tile, quads, finish);
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
    int64_t channels, N, vecs, panels, quads, pixels;  // of a group; quads: of features, four each
    int64_t blocks, block_rows, sets, places_nbytes, read;  // read: bytes from the first to behind the last of x
    bool is_direct;
};

}  // namespace nimble
