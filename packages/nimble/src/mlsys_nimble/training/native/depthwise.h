// Depthwise convolutions and their gradients over channels-last images: two vectors of channels at a time, each of them by
// itself, so that small images with many channels cost what they hold.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <mlsys/vec.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

struct Depthwise {
    View y, x;    // or dy: [N, C, H', W'] and [N, C, H, W], channels side by side and a whole number of vectors
    View weight;  // [C, 1, KH, KW]
    View out;     // as y, or as x; or [C, 1, KH, KW], row by row
    int32_t stride[2], before[2], dilation[2];
};
MLSYS_STRUCT(Depthwise, y, x, weight, out, stride, before, dilation);

constexpr int64_t SOME_CHANNELS = 2 * mlsys::LANES;

// y of x, or x's gradient of dy: each pixel of one image sums up weighted pixels of the other.
template <bool FORWARD>
class DepthwiseImage : public Kernel {
  public:
    explicit DepthwiseImage(const Depthwise& g)
        : g(g), from(FORWARD ? g.x : g.y), to(FORWARD ? g.y : g.x), channels(g.x.shape[1]), taps(g.weight.shape[2] * g.weight.shape[3]) {
        units = (channels + SOME_CHANNELS - 1) / SOME_CHANNELS * g.x.shape[0];
        scratch_nbytes = taps * SOME_CHANNELS * sizeof(float);
        for (int d = 0; d < 2; d++)
            for (int64_t at = 0; at < to.shape[2 + d]; at++) {
                sources[d].emplace_back();
                for (int64_t k = 0; k < g.weight.shape[2 + d]; k++) {
                    const int64_t step = FORWARD ? 1 : g.stride[d], tap = k * g.dilation[d];
                    const int64_t place = FORWARD ? at * g.stride[d] - g.before[d] + tap : at + g.before[d] - tap;
                    if (place >= 0 && place % step == 0 && place / step < from.shape[2 + d])
                        sources[d].back().emplace_back(k, place / step);
                }
            }
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* weights = (float*)scratch;  // [taps][SOME_CHANNELS]
        const float* weight = g.weight.as<const float>();
        const int64_t images = g.x.shape[0], wide = g.weight.shape[3], *step = g.weight.strides;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t c = unit / images * SOME_CHANNELS, some = std::min(SOME_CHANNELS, channels - c);
            if (unit == begin || unit % images == 0)
                for (int64_t i = 0; i < some; i++)
                    for (int64_t tap = 0; tap < taps; tap++)
                        weights[tap * SOME_CHANNELS + i] = weight[(c + i) * step[0] + tap / wide * step[2] + tap % wide * step[3]];
            if (some == SOME_CHANNELS)
                image<2>(unit % images, c, weights);
            else
                image<1>(unit % images, c, weights);
        }
    }

  private:
    template <int VECS>
    void image(int64_t n, int64_t c, const float* weights) const {
        const int64_t wide = g.weight.shape[3], row = from.shape[3] * channels;
        const float* source = from.as<const float>() + n * from.shape[2] * row + c;
        float* out = g.out.as<float>() + n * to.shape[2] * to.shape[3] * channels + c;
        for (const auto& rows : sources[0])
            for (const auto& columns : sources[1]) {
                mlsys::vf sums[VECS] = {};
                for (auto [ky, y] : rows)
                    for (auto [kx, x] : columns)
                        for (int v = 0; v < VECS; v++)
                            sums[v] = mlsys::fma(
                                mlsys::load(source + y * row + x * channels + v * mlsys::LANES),
                                mlsys::load(weights + (ky * wide + kx) * SOME_CHANNELS + v * mlsys::LANES), sums[v]);
                for (int v = 0; v < VECS; v++) mlsys::store(out + v * mlsys::LANES, sums[v]);
                out += channels;
            }
    }

    const Depthwise g;
    const View from, to;
    const int64_t channels, taps;
    std::vector<std::vector<std::pair<int64_t, int64_t>>> sources[2];  // of each row, and column, of `to`: (tap, from's)
};

// Sums over some images each; `finish` adds them up.
class DepthwiseWeightGradient : public Kernel {
  public:
    explicit DepthwiseWeightGradient(const Depthwise& g) : g(g), channels(g.x.shape[1]), taps(g.weight.shape[2] * g.weight.shape[3]) {
        const int64_t blocks = (channels + SOME_CHANNELS - 1) / SOME_CHANNELS;
        groups = std::clamp<int64_t>(16 / blocks, 1, g.x.shape[0]);
        units = blocks * groups;
        sums.resize(groups * taps * channels);
    }

    void run(int64_t begin, int64_t end, void*) const override {
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t c = unit / groups * SOME_CHANNELS, group = unit % groups;
            for (int64_t tap = 0; tap < taps; tap++) {
                float* to = &sums[(group * taps + tap) * channels + c];
                const int64_t first = g.x.shape[0] * group / groups, stop = g.x.shape[0] * (group + 1) / groups;
                if (channels - c >= SOME_CHANNELS)
                    add_up<2>(first, stop, c, tap / g.weight.shape[3], tap % g.weight.shape[3], to);
                else
                    add_up<1>(first, stop, c, tap / g.weight.shape[3], tap % g.weight.shape[3], to);
            }
        }
    }

    void finish() const {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t tap = 0; tap < taps; tap++) {
                float total = 0;
                for (int64_t group = 0; group < groups; group++) total += sums[(group * taps + tap) * channels + c];
                g.out.as<float>()[c * taps + tap] = total;
            }
    }

  private:
    // One tap: of its places in dy, those whose pixel of x is inside.
    template <int VECS>
    void add_up(int64_t first, int64_t stop, int64_t c, int64_t ky, int64_t kx, float* to) const {
        using namespace mlsys;
        int64_t from[2], past[2], shift[2];
        for (int d = 0; d < 2; d++) {
            shift[d] = (d ? kx : ky) * g.dilation[d] - g.before[d];
            from[d] = shift[d] < 0 ? (-shift[d] + g.stride[d] - 1) / g.stride[d] : 0;
            past[d] = std::min(g.y.shape[2 + d], (g.x.shape[2 + d] - shift[d] + g.stride[d] - 1) / g.stride[d]);
        }
        const int64_t row = g.x.shape[3] * channels, step = g.stride[1] * channels;
        vf sums[2][VECS] = {};
        for (int64_t n = first; n < stop; n++)
            for (int64_t y = from[0]; y < past[0]; y++) {
                const float* dy = g.y.as<const float>() + ((n * g.y.shape[2] + y) * g.y.shape[3] + from[1]) * channels + c;
                const float* x = g.x.as<const float>() + (n * g.x.shape[2] + y * g.stride[0] + shift[0]) * row +
                                 (from[1] * g.stride[1] + shift[1]) * channels + c;
                for (int64_t i = from[1]; i < past[1]; i++, dy += channels, x += step)
                    for (int v = 0; v < VECS; v++)
                        sums[i & 1][v] = fma(load(dy + v * LANES), load(x + v * LANES), sums[i & 1][v]);
            }
        for (int v = 0; v < VECS; v++) store(to + v * LANES, sums[0][v] + sums[1][v]);
    }

    const Depthwise g;
    const int64_t channels, taps;
    int64_t groups;
    mutable std::vector<float> sums;  // [groups][taps][C]
};

}  // namespace nimble
