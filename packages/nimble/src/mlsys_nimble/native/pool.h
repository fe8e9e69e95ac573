// Windows over channels-last images: the maximum or the average, vectors over channels.
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

class PoolKernel : public Kernel {
  public:
    explicit PoolKernel(const Pool& p) : p(p), finish(p.epilogue) {
        channels = p.x.shape[1];
        units = p.out.shape[0] * p.out.shape[2] * p.out.shape[3];
        taps = (int64_t)p.kernel[0] * p.kernel[1] * p.kernel[2];
        scratch_nbytes = taps * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const float** inside = (const float**)scratch;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t y = unit % p.out.shape[3], slice = unit / p.out.shape[3];
            const int64_t z = slice % p.out.shape[2], n = slice / p.out.shape[2];
            const float* image = p.x.as<const float>() + n * p.x.strides[0];
            for (int64_t w = 0; w < p.out.shape[4]; w++) {
                const int count = find(image, z, y, w, inside);
                float* out = p.out.as<float>() + at(p.out, n, z, y, w);
                const float* residual = finish.has_residual ? p.residual.as<const float>() + at(p.residual, n, z, y, w) : nullptr;
                p.is_average ? average(inside, count, residual, out) : most(inside, count, residual, out);
            }
        }
    }

  private:
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
            if (finish.is_plain && !residual)
                store(out + c, finish.clamp(y));
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
        finish.rows(kept, LANES, 1, residual ? residual + c : nullptr, 0, out + c, 0, some);
    }

    const Pool p;
    const Finish finish;
    int64_t channels, taps;
};

}  // namespace nimble
