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

constexpr int TILE_PIXELS = 4;
constexpr int ENOUGH_PIECES = 32;  // units to share among some workers evenly
constexpr int SPAN_PIXELS = 64;  // of a unit at most

// Compilers would rather read a weight again for each product than keep it; loads are what this kernel is short of.
inline vf in_register(vf x) {
#if defined(__AVX__) && (MLSYS_LANES == 8 || defined(__AVX512F__))
    asm("" : "+v"(x));
#endif
    return x;
}

class DepthwiseKernel : public Kernel {
  public:
    explicit DepthwiseKernel(const Depthwise& d) : d(d), finish(d.epilogue) {
        channels = d.x.shape[1];
        zeros.resize(std::max<int64_t>(channels, LANES));
        reach = (TILE_PIXELS - 1) * d.stride[1] + (d.kernel[1] - 1) * d.dilation[1] + 1;
        spans = (d.out.shape[3] + SPAN_PIXELS - 1) / SPAN_PIXELS;
        units = d.out.shape[0] * d.out.shape[2] * spans;
        // Few rows are cut along the channels, too.
        pieces = std::clamp<int64_t>(channels / (8 * LANES), 1, (ENOUGH_PIECES + units - 1) / std::max<int64_t>(units, 1));
        units *= pieces;
        const int s = d.stride[1];
        switch (d.dilation[1] == 1 && s <= 2 && channels >= LANES ? d.kernel[1] : 0) {
            case 3: tile = s == 1 ? &run_tile<3, 1, false> : &run_tile<3, 2, false>; break;
            case 5: tile = s == 1 ? &run_tile<5, 1, false> : &run_tile<5, 2, false>; break;
            case 7: tile = s == 1 ? &run_tile<7, 1, false> : &run_tile<7, 2, false>; break;
            default: tile = channels < LANES ? &run_tile<0, 0, true> : &run_tile<0, 0, false>;
        }
        scratch_nbytes = d.kernel[0] * reach * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t piece = unit % pieces, vecs = (channels + LANES - 1) / LANES;
            const Channels some{vecs * piece / pieces * LANES, std::min(channels, vecs * (piece + 1) / pieces * LANES)};
            const int64_t row = unit / pieces / spans, n = row / d.out.shape[2], y = row % d.out.shape[2];
            const int64_t span = unit / pieces % spans, width = d.out.shape[3];
            const int64_t first = width * span / spans, stop = width * (span + 1) / spans;
            float* out = d.out.as<float>() + n * d.out.strides[0] + y * d.out.strides[2];
            const float* residual = nullptr;
            if (finish.has_residual)
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
            const float** to = pointers;
            for (int ky = first_row; ky < stop_row; ky++) {
                const float* row = image + (top + ky * d.dilation[0]) * d.x.strides[2];
                for (int64_t j = left; j < left + reach; j++)
                    *to++ = j >= 0 && j < d.x.shape[3] ? row + j * d.x.strides[3] : zeros.data();
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

    // A tile of pixels, all channels. KW and SW: width of the window and stride; 0: whatever they are. IS_SHORT: there
    // are fewer channels than lanes.
    template <int KW, int SW, bool IS_SHORT>
    static void run_tile(
        const DepthwiseKernel& k, const float* const* pointers, int first_row, int stop_row, const Target& target) {
        constexpr int REACH = KW ? (TILE_PIXELS - 1) * SW + KW : 1;
        const Depthwise& d = k.d;
        const int64_t width = std::max<int64_t>(k.channels, LANES);
        for (int64_t next = target.channels.first; next < target.channels.stop; next += LANES) {
            // The last vector reaches back over channels that are done already; only the others are stored.
            const int64_t c = std::clamp<int64_t>(k.channels - LANES, 0, next);
            const int skip = next - c;
            const auto read = [&](const float* from) {
                if constexpr (!IS_SHORT) return load(from + c);
                float some[LANES] = {};
                for (int i = 0; i < k.channels; i++) some[i] = from[i];
                return load(some);
            };
            vf sums[TILE_PIXELS];
            for (vf& sum : sums) sum = load(d.bias + c);
            const float* const* from = pointers;
            for (int ky = first_row; ky < stop_row; ky++) {
                const float* weights = d.weights + ky * d.kernel[1] * width + c;
                if constexpr (KW != 0) {
                    vf w[KW];
                    for (int kx = 0; kx < KW; kx++) w[kx] = in_register(load(weights + kx * width));
#pragma GCC unroll 16
                    for (int j = 0; j < REACH; j++) {
                        const vf x = read(from[j]);
                        for (int p = 0; p < TILE_PIXELS; p++)
                            if (j - p * SW >= 0 && j - p * SW < KW) sums[p] = fma(x, w[j - p * SW], sums[p]);
                    }
                    from += REACH;
                } else {
                    for (int kx = 0; kx < d.kernel[1]; kx++) {
                        const vf w = load(weights + kx * width);
                        for (int p = 0; p < TILE_PIXELS; p++)
                            sums[p] = fma(read(from[p * d.stride[1] + kx * d.dilation[1]]), w, sums[p]);
                    }
                    from += k.reach;
                }
            }
            if (target.pixels == TILE_PIXELS && !skip && !IS_SHORT && k.finish.is_plain) {
                for (int p = 0; p < TILE_PIXELS; p++) {
                    if (target.residual) sums[p] += load(target.residual + p * target.residual_stride + c);
                    store(target.out + p * target.out_stride + c, k.finish.clamp(sums[p]));
                }
                continue;
            }
            for (int p = 0; p < target.pixels; p++) {
                const float* residual = target.residual ? target.residual + p * target.residual_stride + c : nullptr;
                float* out = target.out + p * target.out_stride + c;
                if (!skip && !IS_SHORT) {
                    store(out, finish_slowly(k.finish, sums[p], residual));
                } else {
                    float kept[LANES];
                    store(kept, sums[p]);
                    const int64_t some = IS_SHORT ? k.channels : LANES - skip;
                    k.finish.row(kept + skip, residual ? residual + skip : nullptr, out + skip, some);
                }
            }
        }
    }

    const Depthwise d;
    const Finish finish;
    int64_t channels, reach, spans, pieces;
    std::vector<float> zeros;
    void (*tile)(const DepthwiseKernel&, const float* const*, int, int, const Target&);
};

}  // namespace nimble
