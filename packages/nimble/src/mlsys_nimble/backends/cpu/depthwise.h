// Depthwise convolution: every channel its own window. Vectors run over the channels; a tile of pixels of one row shares
// each weight, and each pixel of the input is read once for all of the tile's pixels that its column reaches.
#pragma once

#include <algorithm>
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

constexpr int TILE_PIXELS = 4;
constexpr int SPAN_PIXELS = 64;          // of a unit at most
constexpr int LINE = 16;                 // floats of a line of the cache
constexpr int LEAST_CHANNELS = 4 * LINE; // of a piece: below, lines come from memory one by one
constexpr int ROWS_NBYTES = 24 << 10;    // of a window's rows, in the first-level cache
constexpr int IMAGE_NBYTES = 1 << 20;    // about what the second-level cache holds

class DepthwiseKernel : public Kernel {
  public:
    explicit DepthwiseKernel(const Depthwise& d) : d(d), epilogue(d.epilogue) {
        channels = d.x.shape[1];
        zeros.resize(std::max<int64_t>(channels, LANES));
        reach = (TILE_PIXELS - 1) * d.stride[1] + (d.kernel[1] - 1) * d.dilation[1] + 1;
        spans = (d.out.shape[3] + SPAN_PIXELS - 1) / SPAN_PIXELS;
        units = d.out.shape[0] * d.out.shape[2] * spans;
        // Channels are taken in pieces, each over all rows, so that a window's rows stay in the first-level cache; an image
        // that comes from farther than the second level is read as it lies.
        const int64_t row_nbytes = d.kernel[0] * std::min<int64_t>(d.x.shape[3], SPAN_PIXELS * d.stride[1]) * sizeof(float);
        const int64_t fitting = std::max<int64_t>(ROWS_NBYTES / std::max<int64_t>(row_nbytes, 1), LEAST_CHANNELS);
        const bool is_near = channels * d.x.shape[2] * d.x.shape[3] * (int64_t)sizeof(float) <= IMAGE_NBYTES;
        pieces = is_near ? std::max<int64_t>((channels + fitting / 2) / fitting, 1) : 1;
        units *= pieces;
        tile = channels < LANES ? tile_of<true>(d) : tile_of<false>(d);
        scratch_nbytes = d.kernel[0] * reach * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t row = unit / spans % (units / pieces / spans), n = row / d.out.shape[2], y = row % d.out.shape[2];
            const int64_t span = unit % spans, width = d.out.shape[3];
            const int64_t piece = unit / (units / pieces), lines = (channels + LINE - 1) / LINE;
            const Channels some{lines * piece / pieces * LINE, std::min(channels, lines * (piece + 1) / pieces * LINE)};
            const int64_t first = width * span / spans, stop = width * (span + 1) / spans;
            float* out = d.out.as<float>() + n * d.out.strides[0] + y * d.out.strides[2];
            const float* residual = nullptr;
            if (epilogue.has_residual)
                residual = d.residual.as<const float>() + n * d.residual.strides[0] + y * d.residual.strides[2];
            run_row(n, y, first, stop, some, out, d.out.strides[3], residual, d.residual.strides[3], (const float**)scratch);
        }
    }

    struct Channels {
        int64_t first, stop;  // the first a multiple of LANES
    };

    // Pixels [first, stop) of row y of image n; `out` and `residual` are where the row's pixel 0 would be.
    void run_row(
        int64_t n, int64_t y, int64_t first, int64_t stop, const Channels& channels, float* out, int64_t out_stride,
        const float* residual, int64_t residual_stride, const float** pointers) const {
        const float* image = d.x.as<const float>() + n * d.x.strides[0];
        const int64_t top = y * d.stride[0] - d.before[0];
        int first_row = 0, stop_row = d.kernel[0];  // of the window, within the image
        while (first_row < stop_row && top + first_row * d.dilation[0] < 0) first_row++;
        while (first_row < stop_row && top + (stop_row - 1) * d.dilation[0] >= d.x.shape[2]) stop_row--;
        for (int64_t pixel = first; pixel < stop; pixel += TILE_PIXELS) {
            const int some = std::min<int64_t>(TILE_PIXELS, stop - pixel);
            const int64_t left = pixel * d.stride[1] - d.before[1];
            const bool is_inside = left >= 0 && left + reach <= d.x.shape[3];
            const float** to = pointers;
            for (int ky = first_row; ky < stop_row; ky++) {
                const float* row = image + (top + ky * d.dilation[0]) * d.x.strides[2];
                for (int64_t j = left; j < left + reach; j++)
                    *to++ = is_inside || (j >= 0 && j < d.x.shape[3]) ? row + j * d.x.strides[3] : zeros.data();
            }
            const Target target{
                out + pixel * out_stride, out_stride, residual ? residual + pixel * residual_stride : nullptr,
                residual_stride, some, channels};
            tile(*this, pointers, first_row, stop_row, target);
        }
    }

  private:
    struct Target {
        float* out;
        int64_t out_stride;
        const float* residual;
        int64_t residual_stride;
        int pixels;
        Channels channels;
    };

    using Tile = void (*)(const DepthwiseKernel&, const float* const*, int, int, const Target&);

    template <bool IS_SHORT>
    static Tile tile_of(const Depthwise& d) {
        const int s = d.stride[1];
        switch (d.dilation[1] == 1 && s <= 2 ? d.kernel[1] : 0) {
            case 3: return s == 1 ? &run_tile<3, 1, IS_SHORT> : &run_tile<3, 2, IS_SHORT>;
            case 5: return s == 1 ? &run_tile<5, 1, IS_SHORT> : &run_tile<5, 2, IS_SHORT>;
            case 7: return s == 1 ? &run_tile<7, 1, IS_SHORT> : &run_tile<7, 2, IS_SHORT>;
            default: return &run_tile<0, 0, IS_SHORT>;
        }
    }

    // A tile of pixels, all channels. KW and SW: width of the window and stride; 0: whatever they are. IS_SHORT: there
    // are fewer channels than lanes.
    template <int KW, int SW, bool IS_SHORT>
    static void run_tile(
        const DepthwiseKernel& k, const float* const* pointers, int first_row, int stop_row, const Target& target) {
        int64_t next = target.channels.first;
        if constexpr (KW != 0 && !IS_SHORT)  // two vectors at once: four sums alone would wait for each other
            for (; next + 2 * LANES <= target.channels.stop; next += 2 * LANES)
                run_channels<KW, SW, IS_SHORT, 2>(k, pointers, first_row, stop_row, target, next);
        for (; next < target.channels.stop; next += LANES)
            run_channels<KW, SW, IS_SHORT, 1>(k, pointers, first_row, stop_row, target, next);
    }

    template <int KW, int SW, bool IS_SHORT, int VECS>
    static __attribute__((always_inline)) void run_channels(
        const DepthwiseKernel& k, const float* const* pointers, int first_row, int stop_row, const Target& target, int64_t next) {
        constexpr int REACH = KW ? (TILE_PIXELS - 1) * SW + KW : 1;
        const Depthwise& d = k.d;
        const int64_t width = std::max<int64_t>(k.channels, LANES);
        // The last vector reaches back over channels that are done already. They are stored again if these are this call's
        // own and nothing is added to them, else left out.
        const int64_t c = VECS > 1 ? next : std::clamp<int64_t>(k.channels - LANES, 0, next);
        if (!IS_SHORT && !target.residual && c >= target.channels.first) next = c;
        const int skip = next - c;
        const auto read = [&](const float* from) {
            return IS_SHORT ? load_first(from, k.channels) : load(from + c);
        };
        vf sums[VECS][TILE_PIXELS];
        for (int v = 0; v < VECS; v++)
            for (vf& sum : sums[v]) sum = load(d.bias + c + v * LANES);
        const float* const* from = pointers;
        for (int ky = first_row; ky < stop_row; ky++) {
            const float* weights = d.weights + ky * d.kernel[1] * width + c;
            if constexpr (KW != 0) {
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) {
                    vf w[KW];
                    for (int kx = 0; kx < KW; kx++) w[kx] = in_register(load(weights + kx * width + v * LANES));
#pragma GCC unroll 16
                    for (int j = 0; j < REACH; j++) {
                        const vf x = read(from[j] + v * LANES);
                        for (int p = 0; p < TILE_PIXELS; p++)
                            if (j - p * SW >= 0 && j - p * SW < KW) sums[v][p] = fma(x, w[j - p * SW], sums[v][p]);
                    }
                }
                from += REACH;
            } else {
                for (int kx = 0; kx < d.kernel[1]; kx++) {
                    const vf w = load(weights + kx * width);
                    for (int p = 0; p < TILE_PIXELS; p++)
                        sums[0][p] = fma(read(from[p * d.stride[1] + kx * d.dilation[1]]), w, sums[0][p]);
                }
                from += k.reach;
            }
        }
        const float* residual = target.residual ? target.residual + next : nullptr;
        float* out = target.out + next;
        if (target.pixels == TILE_PIXELS && !skip && k.epilogue.is_plain) {
            for (int p = 0; p < TILE_PIXELS; p++)
                for (int v = 0; v < VECS; v++) {
                    vf y = sums[v][p];
                    const float* added = residual ? residual + p * target.residual_stride + v * LANES : nullptr;
                    if (added) y += IS_SHORT ? load_first(added, k.channels) : load(added);
                    float* to = out + p * target.out_stride + v * LANES;
                    IS_SHORT ? store_first(to, k.epilogue.clamp(y), k.channels) : store(to, k.epilogue.clamp(y));
                }
            return;
        }
        constexpr int STEP = VECS * LANES;
        alignas(64) float kept[TILE_PIXELS * STEP + LANES] = {};
        for (int p = 0; p < TILE_PIXELS; p++)
            for (int v = 0; v < VECS; v++) store(kept + p * STEP + v * LANES, sums[v][p]);
        k.epilogue.apply(
            kept + skip, STEP, target.pixels, residual, target.residual_stride, out, target.out_stride,
            IS_SHORT ? k.channels : STEP - skip);
    }

    const Depthwise d;
    const BoundEpilogue epilogue;
    int64_t channels, reach, spans, pieces;
    std::vector<float> zeros;
    Tile tile;
};

}  // namespace nimble
