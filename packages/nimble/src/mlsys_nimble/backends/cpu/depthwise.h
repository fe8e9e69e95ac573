// Depthwise convolution: every channel its own window. Vectors run over the channels; a tile of pixels of one row shares
// each weight, and each pixel of the input is read once for all of the tile's pixels that its column reaches.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "epilogue.h"

namespace nimble {

struct Depthwise {
    View x, residual, out;  // [N, C, H, W], channels side by side
    const float* weights;   // [taps][C], C at least LANES (zeros beyond the channels)
    const float* bias;      // [C]
    int32_t kernel[2], stride[2], before[2], dilation[2];
    Epilogue epilogue;
};
MLSYS_STRUCT(Depthwise, x, residual, out, weights, bias, kernel, stride, before, dilation, epilogue);

constexpr int TILE_PIXELS = 7;   // pixels computed together: most images' widths are multiples
constexpr int LEAST_PIXELS = 4;  // pixels of the smaller tile, for the rest of a row
constexpr int SPAN_PIXELS = 64;  // pixels of a work unit, at most
// Pixels whose distance is a multiple of a large power of two share few sets of the L1 cache. A window's rows are then
// copied side by side, PIECE channels at a time.
constexpr int PIECE = 32;
constexpr int SETS = 64, WAYS = 8, LINE_FLOATS = 16;  // the L1 cache: sets, ways, floats of a line, at least

class DepthwiseKernel : public Kernel {
  public:
    explicit DepthwiseKernel(const Depthwise& d, bool may_pack = true, int tile = TILE_PIXELS) : d(d), epilogue(d.epilogue) {
        channels = d.x.shape[1];
        zeros.resize(channels + LANES);
        spans = (d.out.shape[3] + SPAN_PIXELS - 1) / SPAN_PIXELS;
        const int64_t pixels = (d.out.shape[3] + spans - 1) / spans;
        columns = (pixels + tile - 2) * d.stride[1] + (d.kernel[1] - 1) * d.dilation[1] + 1;
        slots = (d.kernel[0] - 1) * d.dilation[0] + 1;
        if (may_pack && channels % PIECE == 0 && d.x.strides[3] % LINE_FLOATS == 0) {
            const int64_t sets = SETS / std::gcd(d.x.strides[3] / LINE_FLOATS, (int64_t)SETS);
            if (2 * sets * WAYS < d.kernel[0] * std::min(columns, d.x.shape[3])) pieces = channels / PIECE;
        }
        units = d.out.shape[0] * d.out.shape[2] * spans * pieces;
        span = channels < LANES ? span_of<true>(d) : span_of<false>(d);
        pointers_nbytes = ((slots + d.kernel[0] + slots * columns) * sizeof(void*) + 63) / 64 * 64;
        scratch_nbytes = pointers_nbytes + (pieces > 1 ? slots * columns * PIECE * sizeof(float) : 0);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const Pointers pointers = pointers_in(scratch);
        const int64_t height = d.out.shape[2], width = d.out.shape[3];
        for (int64_t unit = begin; unit < end; unit++) {  // rows of a span are adjacent
            const int64_t y = unit % height, n = unit / height % d.out.shape[0];
            const int64_t span = unit / height / d.out.shape[0] % spans, piece = unit / (units / pieces);
            float* out = d.out.as<float>() + n * d.out.strides[0] + y * d.out.strides[2];
            const float* residual = nullptr;
            if (epilogue.has_residual)
                residual = d.residual.as<const float>() + n * d.residual.strides[0] + y * d.residual.strides[2];
            run_row(
                n, y, width * span / spans, width * (span + 1) / spans, piece, out, d.out.strides[3], residual,
                d.residual.strides[3], pointers);
        }
    }

    // One thread's pointers to the pixels of image rows, shared by all windows that reach a row.
    struct Pointers {
        int64_t* made;              // [slots]: row, span and piece in each slot
        const float* const** rows;  // [rows of the window]: its slots
        const float** pixels;       // [slots][columns]
        float* packed;              // [slots][columns][PIECE], if there are pieces
    };

    // Scratch begins with the first slot's row; NEW is no valid row.
    Pointers pointers_in(void* scratch) const {
        int64_t* made = (int64_t*)scratch;
        if (*made == NEW) std::fill(made, made + slots, NEW);
        const float* const** rows = (const float* const**)(made + slots);
        return {made, rows, (const float**)(rows + d.kernel[0]), (float*)((char*)scratch + pointers_nbytes)};
    }

    // Pixels [first, stop) of row y of image n; `out` and `residual` are where the row's pixel 0 would be.
    void run_row(
        int64_t n, int64_t y, int64_t first, int64_t stop, int64_t piece, float* out, int64_t out_stride,
        const float* residual, int64_t residual_stride, const Pointers& pointers) const {
        const int64_t top = y * d.stride[0] - d.before[0], left = first * d.stride[1] - d.before[1];
        int first_row = 0, stop_row = d.kernel[0];  // of the window, within the image
        while (first_row < stop_row && top + first_row * d.dilation[0] < 0) first_row++;
        while (first_row < stop_row && top + (stop_row - 1) * d.dilation[0] >= d.x.shape[2]) stop_row--;
        for (int ky = first_row; ky < stop_row; ky++)
            pointers.rows[ky] = point_at(n, top + ky * d.dilation[0], left, piece, pointers);
        span(
            *this, pointers.rows, first_row, stop_row,
            {out + first * out_stride, out_stride, residual ? residual + first * residual_stride : nullptr,
             residual_stride, stop - first, channels * piece / pieces, channels * (piece + 1) / pieces});
    }

  protected:
    struct Target {
        float* out;
        int64_t out_stride;
        const float* residual;
        int64_t residual_stride;
        int64_t pixels;
        int64_t first, stop;  // channels
    };

    using Rows = const float* const* const*;  // pointers to each window's pixels
    using Span = void (*)(const DepthwiseKernel&, Rows, int, int, const Target&);

    // Pointers to the pixels of row `y` of an image from column `left` on, zeros beyond the image.
    const float* const* point_at(int64_t n, int64_t y, int64_t left, int64_t piece, const Pointers& pointers) const {
        const int64_t slot = y % slots, row_number = (piece * d.x.shape[0] + n) * d.x.shape[2] + y;
        const int64_t which = row_number * d.out.shape[3] * d.stride[1] + left + d.before[1];
        const float** made = pointers.pixels + slot * columns;
        if (pointers.made[slot] == which) return made;
        pointers.made[slot] = which;
        const float* row = d.x.as<const float>() + n * d.x.strides[0] + y * d.x.strides[2];
        const int64_t pixel = d.x.strides[3], begin = std::clamp<int64_t>(-left, 0, columns);
        const int64_t end = std::clamp<int64_t>(d.x.shape[3] - left, begin, columns);
        for (int64_t j = 0; j < begin; j++) made[j] = zeros.data();
        if (pieces == 1) {
            for (int64_t j = begin; j < end; j++) made[j] = row + (left + j) * pixel;
        } else {
            float* packed = pointers.packed + slot * columns * PIECE;
            for (int64_t j = begin; j < end; j++) {
                std::memcpy(packed + j * PIECE, row + (left + j) * pixel + piece * PIECE, PIECE * sizeof(float));
                made[j] = packed + (j - piece) * PIECE;
            }
        }
        for (int64_t j = end; j < columns; j++) made[j] = zeros.data();
        return made;
    }

    // Store the sums of pixels from `pixel` on, `some` of a tile's: `count` channels from `next` on, which are those after
    // the first `skip`.
    template <int VECS, int TILE>
    __attribute__((always_inline)) void finish(
        const vf (&sums)[VECS][TILE], int64_t pixel, int some, int skip, int count, int64_t next, const Target& target) const {
        float* to = target.out + pixel * target.out_stride + next;
        const float* residual = target.residual ? target.residual + pixel * target.residual_stride + next : nullptr;
        const auto all = [&](auto&& read, auto&& write) MLSYS_INLINE {
            unroll<TILE>([&](auto p) MLSYS_INLINE {
                if (p >= some) return;
                for (int v = 0; v < VECS; v++)
                    write(to + v * LANES, epilogue.clamp(residual ? sums[v][p] + read(residual + v * LANES) : sums[v][p]));
                to += target.out_stride;
                if (residual) residual += target.residual_stride;
            });
        };
        if (epilogue.is_plain && count == VECS * LANES) {
            all([](const float* from) { return load(from); }, [](float* to, vf y) { store(to, y); });
        } else if (epilogue.is_plain && !skip && VECS == 1) {
            all([&](const float* from) { return load_first(from, count); }, [&](float* to, vf y) { store_first(to, y, count); });
        } else {
            constexpr int STEP = VECS * LANES;
            alignas(64) float kept[TILE * STEP + LANES];
            store(kept + TILE * STEP, vf{});  // read where some are skipped
            for (int p = 0; p < TILE; p++)
                for (int v = 0; v < VECS; v++) store(kept + p * STEP + v * LANES, sums[v][p]);
            epilogue.apply(
                kept + skip, STEP, some, residual, target.residual_stride, to, target.out_stride, count);
        }
    }

    const Depthwise d;
    const BoundEpilogue epilogue;
    int64_t channels, spans, columns, slots, pieces = 1, pointers_nbytes;
    Span span;

  private:
    std::vector<float> zeros;

    template <bool IS_SHORT>
    static Span span_of(const Depthwise& d) {
        const int s = d.stride[1];
        switch (d.dilation[1] == 1 && s <= 2 ? d.kernel[1] : 0) {
            case 3: return s == 1 ? &run_span<3, 1, IS_SHORT> : &run_span<3, 2, IS_SHORT>;
            case 5: return s == 1 ? &run_span<5, 1, IS_SHORT> : &run_span<5, 2, IS_SHORT>;
            case 7: return s == 1 ? &run_span<7, 1, IS_SHORT> : &run_span<7, 2, IS_SHORT>;
            default: return &run_span<0, 0, IS_SHORT>;
        }
    }

    // A row's pixels, all channels. KW and SW: width of the window and stride; 0: whatever they are. IS_SHORT: there are
    // fewer channels than lanes.
    template <int KW, int SW, bool IS_SHORT>
    static void run_span(const DepthwiseKernel& k, Rows rows, int first_row, int stop_row, const Target& target) {
        int64_t next = target.first;
        if constexpr (KW != 0 && !IS_SHORT && LANES == 16)  // two vectors' sums are in registers
            for (; next + 2 * LANES <= target.stop; next += 2 * LANES)
                run_channels<KW, SW, IS_SHORT, 2>(k, rows, first_row, stop_row, target, next);
        for (; next < target.stop; next += LANES)
            run_channels<KW, SW, IS_SHORT, 1>(k, rows, first_row, stop_row, target, next);
    }

    template <int KW, int SW, bool IS_SHORT, int VECS>
    static __attribute__((noinline)) void run_channels(
        const DepthwiseKernel& k, Rows rows, int first_row, int stop_row, const Target& target, int64_t next) {
        // The last vector overlaps channels that are done already: they are stored again if there is no residual, else
        // skipped.
        const int64_t c = VECS > 1 ? next : std::clamp<int64_t>(k.channels - LANES, 0, next);
        if (!IS_SHORT && !target.residual) next = c;
        const int skip = next - c;
        vf bias[VECS];
        for (int v = 0; v < VECS; v++) bias[v] = load(k.d.bias + c + v * LANES);
        const auto run_tile = [&](auto size, int64_t pixel, int some) MLSYS_INLINE {
            constexpr int TILE = decltype(size)::value;
            vf sums[VECS][TILE];
            for (int v = 0; v < VECS; v++)
                for (vf& sum : sums[v]) sum = bias[v];
            add_window<KW, SW, IS_SHORT, VECS, TILE>(k, rows, pixel, first_row, stop_row, c, sums);
            k.finish<VECS, TILE>(sums, pixel, some, skip, IS_SHORT ? k.channels : VECS * LANES - skip, next, target);
        };
        for (int64_t pixel = 0; pixel < target.pixels;) {
            const int64_t left = target.pixels - pixel;
            if (left <= LEAST_PIXELS || left == 2 * LEAST_PIXELS) {
                run_tile(std::integral_constant<int, LEAST_PIXELS>(), pixel, std::min<int64_t>(LEAST_PIXELS, left));
                pixel += LEAST_PIXELS;
            } else {
                run_tile(std::integral_constant<int, TILE_PIXELS>(), pixel, std::min<int64_t>(TILE_PIXELS, left));
                pixel += TILE_PIXELS;
            }
        }
    }

    // Add the window's products to the sums of a tile's pixels, of the channels from `c` on.
    template <int KW, int SW, bool IS_SHORT, int VECS, int TILE>
    static __attribute__((always_inline)) void add_window(
        const DepthwiseKernel& k, Rows rows, int64_t pixel, int first_row, int stop_row, int64_t c,
        vf (&sums)[VECS][TILE]) {
        constexpr int REACH = KW ? (TILE - 1) * SW + KW : 1;
        const Depthwise& d = k.d;
        const int64_t width = std::max<int64_t>(k.channels, LANES), column = pixel * (KW ? SW : d.stride[1]);
        const auto read = [&](const float* from) MLSYS_INLINE {
            return IS_SHORT ? load_first(from, k.channels) : load(from + c);
        };
        const float* weights = d.weights + first_row * d.kernel[1] * width + c;
        for (int ky = first_row; ky < stop_row; ky++) {
            const float* const* from = rows[ky] + column;
            asm("" : "+r"(from));  // one register: its sums with constants are part of an instruction
            if constexpr (KW != 0) {
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) {
                    vf w[KW];
                    for (int kx = 0; kx < KW; kx++) w[kx] = in_register(load(weights + kx * width + v * LANES));
#pragma GCC unroll 20
                    for (int j = 0; j < REACH; j++) {
                        const vf x = in_register(read(from[j] + v * LANES));
                        for (int p = 0; p < TILE; p++)
                            if (j - p * SW >= 0 && j - p * SW < KW) sums[v][p] = fma(x, w[j - p * SW], sums[v][p]);
                    }
                }
            } else {
                for (int kx = 0; kx < d.kernel[1]; kx++) {
                    const vf w = load(weights + kx * width);
                    for (int p = 0; p < TILE; p++)
                        sums[0][p] = fma(read(from[p * d.stride[1] + kx * d.dilation[1]]), w, sums[0][p]);
                }
            }
            weights += d.kernel[1] * width;
        }
    }
};

}  // namespace nimble
