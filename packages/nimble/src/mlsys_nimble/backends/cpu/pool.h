// Windows over channels-last images: the maximum or the average, vectors over channels. Small windows in a plane, the usual
// ones, slide: a tile of pixels first has its columns combined, which neighbours share.
#pragma once

#include <algorithm>
#include <vector>

#include "epilogue.h"

namespace nimble {

struct Pool {
    View x, residual, out;  // [N, C, D, H, W], channels side by side
    int32_t kernel[3], stride[3], before[3], dilation[3];
    int32_t is_average;
    int32_t counts_padding;
    Epilogue epilogue;
};
MLSYS_STRUCT(Pool, x, residual, out, kernel, stride, before, dilation, is_average, counts_padding, epilogue);

class PoolKernel : public Kernel {
  public:
    explicit PoolKernel(const Pool& p) : p(p), epilogue(p.epilogue) {
        channels = p.x.shape[1];
        units = p.out.shape[0] * p.out.shape[2] * p.out.shape[3];
        taps = (int64_t)p.kernel[0] * p.kernel[1] * p.kernel[2];
        scratch_nbytes = taps * sizeof(float*);
        if (p.kernel[0] == 1 && p.x.shape[2] == 1 && p.dilation[2] == 1 && p.before[0] == 0) slide = sliding();
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const float** inside = (const float**)scratch;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t y = unit % p.out.shape[3], slice = unit / p.out.shape[3];
            const int64_t z = slice % p.out.shape[2], n = slice / p.out.shape[2];
            const float* image = p.x.as<const float>() + n * p.x.strides[0];
            if (slide) {
                slide(*this, image, n, y);
                continue;
            }
            for (int64_t w = 0; w < p.out.shape[4]; w++) {
                const int count = find(image, z, y, w, inside);
                float* out = p.out.as<float>() + at(p.out, n, z, y, w);
                const float* residual = epilogue.has_residual ? p.residual.as<const float>() + at(p.residual, n, z, y, w) : nullptr;
                p.is_average ? average(inside, count, residual, out) : most(inside, count, residual, out);
            }
        }
    }

  private:
    using Slide = void (*)(const PoolKernel&, const float* image, int64_t n, int64_t y);

    Slide sliding() const {
        const int width = p.kernel[2], stride = p.stride[2];
        if (width == 3 && stride == 1) return p.is_average ? slide_row<3, 1, true> : slide_row<3, 1, false>;
        if (width == 3 && stride == 2) return p.is_average ? slide_row<3, 2, true> : slide_row<3, 2, false>;
        if (width == 2 && stride == 2) return p.is_average ? slide_row<2, 2, true> : slide_row<2, 2, false>;
        return nullptr;
    }

    template <bool IS_AVERAGE>
    static vf combined(vf a, vf b) {
        return IS_AVERAGE ? a + b : maximum(a, b);
    }

    // `count` rows, `step` apart, of one column.
    template <bool IS_AVERAGE>
    static vf column(const float* from, int64_t step, int count, int64_t channels) {
        vf y = splat(IS_AVERAGE ? 0.0f : -INFINITY);
        for (int r = 0; r < count; r++) y = combined<IS_AVERAGE>(y, load_first(from + r * step, std::min<int64_t>(channels, LANES)));
        return y;
    }

    // A row of results, windows WIDTH wide and STRIDE apart.
    template <int WIDTH, int STRIDE, bool IS_AVERAGE>
    static void slide_row(const PoolKernel& k, const float* image, int64_t n, int64_t y) {
        constexpr int PIXELS = 4, REACH = (PIXELS - 1) * STRIDE + WIDTH;
        const Pool& p = k.p;
        const int64_t top = y * p.stride[1] - p.before[1], step = p.dilation[1] * p.x.strides[3];
        int first = 0, stop = p.kernel[1];  // rows of the window within the image
        while (first < stop && top + first * p.dilation[1] < 0) first++;
        while (first < stop && top + (stop - 1) * p.dilation[1] >= p.x.shape[3]) stop--;
        const float* row = image + (top + first * p.dilation[1]) * p.x.strides[3];
        for (int64_t w = 0; w < p.out.shape[4]; w += PIXELS) {
            const int some = std::min<int64_t>(PIXELS, p.out.shape[4] - w);
            const int64_t left = w * STRIDE - p.before[2];
            const float* columns[REACH];  // null: outside
            int inside[PIXELS] = {};
            for (int j = 0; j < REACH; j++) {
                const bool is_inside = left + j >= 0 && left + j < p.x.shape[4];
                columns[j] = is_inside ? row + (left + j) * p.x.strides[4] : nullptr;
                for (int i = 0; i < PIXELS; i++) inside[i] += is_inside && j >= i * STRIDE && j < i * STRIDE + WIDTH;
            }
            float share[PIXELS];
            for (int i = 0; i < PIXELS; i++)
                share[i] = 1.0f / (p.counts_padding ? k.taps : std::max(inside[i] * (stop - first), 1));
            const float* residual = k.epilogue.has_residual ? p.residual.as<const float>() + at(p.residual, n, 0, y, w) : nullptr;
            float* out = p.out.as<float>() + at(p.out, n, 0, y, w);
            for (int64_t next = 0; next < k.channels; next += LANES) {
                // The last vector overlaps channels that are done already, where that changes nothing.
                const bool reaches_back = next + LANES > k.channels && k.channels >= LANES && !residual;
                const int64_t c = reaches_back ? k.channels - LANES : next;
                vf sums[REACH];
                for (int j = 0; j < REACH; j++) {
                    const float* from = columns[j] ? columns[j] + c : nullptr;
                    if (!from)
                        sums[j] = splat(IS_AVERAGE ? 0.0f : -INFINITY);
                    else if (stop - first == 3 && c + LANES <= k.channels)  // the usual window
                        sums[j] = combined<IS_AVERAGE>(combined<IS_AVERAGE>(load(from), load(from + step)), load(from + 2 * step));
                    else
                        sums[j] = column<IS_AVERAGE>(from, step, stop - first, k.channels - c);
                }
                vf results[PIXELS];
                for (int i = 0; i < PIXELS; i++) {
                    vf y = sums[i * STRIDE];
                    for (int j = 1; j < WIDTH; j++) y = combined<IS_AVERAGE>(y, sums[i * STRIDE + j]);
                    results[i] = IS_AVERAGE ? y * splat(share[i]) : y;
                }
                if (k.epilogue.is_plain && some == PIXELS && c + LANES <= k.channels) {
                    for (int i = 0; i < PIXELS; i++) {
                        vf y = results[i];
                        if (residual) y += load(residual + i * p.residual.strides[4] + c);
                        store(out + i * p.out.strides[4] + c, k.epilogue.clamp(y));
                    }
                    continue;
                }
                float kept[PIXELS * LANES];
                for (int i = 0; i < PIXELS; i++) store(kept + i * LANES, results[i]);
                k.epilogue.apply(
                    kept, LANES, some, residual ? residual + c : nullptr, p.residual.strides[4], out + c, p.out.strides[4],
                    std::min<int64_t>(LANES, k.channels - c));
            }
        }
    }

    static int64_t at(const View& view, int64_t n, int64_t z, int64_t y, int64_t w) {
        return n * view.strides[0] + z * view.strides[2] + y * view.strides[3] + w * view.strides[4];
    }

    // The pixels of a window that are in the image.
    int find(const float* image, int64_t z, int64_t y, int64_t w, const float** inside) const {
        const int64_t start[3] = {
            z * p.stride[0] - p.before[0], y * p.stride[1] - p.before[1], w * p.stride[2] - p.before[2]};
        int count = 0;
        for (int64_t i = 0; i < p.kernel[0]; i++) {
            const int64_t iz = start[0] + i * p.dilation[0];
            if (iz < 0 || iz >= p.x.shape[2]) continue;
            for (int64_t j = 0; j < p.kernel[1]; j++) {
                const int64_t iy = start[1] + j * p.dilation[1];
                if (iy < 0 || iy >= p.x.shape[3]) continue;
                for (int64_t k = 0; k < p.kernel[2]; k++) {
                    const int64_t iw = start[2] + k * p.dilation[2];
                    if (iw < 0 || iw >= p.x.shape[4]) continue;
                    inside[count++] = image + iz * p.x.strides[2] + iy * p.x.strides[3] + iw * p.x.strides[4];
                }
            }
        }
        return count;
    }

    void most(const float* const* inside, int count, const float* residual, float* out) const {
        over_channels(residual, out, [&](auto&& read) {
            vf y = splat(-INFINITY);
            for (int i = 0; i < count; i++) y = maximum(y, read(inside[i]));
            return y;
        });
    }

    void average(const float* const* inside, int count, const float* residual, float* out) const {
        const vf share = splat(1.0f / (p.counts_padding ? taps : std::max(count, 1)));
        over_channels(residual, out, [&](auto&& read) {
            vf y{};
            for (int i = 0; i < count; i++) y += read(inside[i]);
            return y * share;
        });
    }

    template <class Work>
    void over_channels(const float* residual, float* out, Work&& work) const {
        int64_t c = 0;
        for (; c + LANES <= channels; c += LANES) {
            const vf y = work([c](const float* from) { return load(from + c); });
            if (epilogue.is_plain && !residual)
                store(out + c, epilogue.clamp(y));
            else
                finish_some(y, residual, out, c, LANES);
        }
        if (c == channels) return;
        const int64_t some = channels - c;
        const vf y = work([c, some](const float* from) {
            float lanes[LANES] = {};
            for (int i = 0; i < some; i++) lanes[i] = from[c + i];
            return load(lanes);
        });
        finish_some(y, residual, out, c, some);
    }

    void finish_some(vf y, const float* residual, float* out, int64_t c, int64_t some) const {
        float kept[LANES];
        store(kept, y);
        epilogue.apply(kept, LANES, 1, residual ? residual + c : nullptr, 0, out + c, 0, some);
    }

    const Pool p;
    const BoundEpilogue epilogue;
    int64_t channels, taps;
    Slide slide = nullptr;
};

}  // namespace nimble
