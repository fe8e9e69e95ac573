// A depthwise convolution and a 1x1 convolution of its result, a row of pixels at a time: the row between them stays in the
// cache of the worker that makes it.
#pragma once

#include <vector>

#include "depthwise.h"
#include "gemm.h"

namespace nimble {

struct Separable {
    Depthwise depthwise;  // `out`: the shape between the two, no data
    View residual, out;   // [N, O, H, W], channels side by side
    const float* weights; // [panels][C][panel]
    const float* bias;    // [O], zeros to whole vectors
    Epilogue epilogue;
};
MLSYS_STRUCT(Separable, depthwise, residual, out, weights, bias, epilogue);

class SeparableKernel : public Kernel {
  public:
    explicit SeparableKernel(const Separable& s) : s(s), first(s.depthwise, false), epilogue(s.epilogue) {
        K = s.depthwise.x.shape[1];
        N = s.out.shape[1];
        vecs = (N + LANES - 1) / LANES;
        panels = std::max<int64_t>(vecs / 2, 1);
        width = (K + 15) / 16 * 16;  // whole lines of the cache
        spans = (s.out.shape[3] + SPAN_PIXELS - 1) / SPAN_PIXELS;
        units = s.out.shape[0] * s.out.shape[2] * spans;
        pointers_nbytes = (first.scratch_nbytes + 63) / 64 * 64;
        scratch_nbytes = pointers_nbytes + SPAN_PIXELS * (width * sizeof(float) + sizeof(float*));
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const auto pointers = first.pointers_in(scratch);
        float* between = (float*)((char*)scratch + pointers_nbytes);  // [pixels][width]
        const float** rows = (const float**)(between + SPAN_PIXELS * width);
        for (int r = 0; r < SPAN_PIXELS; r++) rows[r] = between + r * width;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t y = unit % s.out.shape[2], n = unit / s.out.shape[2] % s.out.shape[0];
            const int64_t span = unit / s.out.shape[2] / s.out.shape[0];
            const int64_t from = s.out.shape[3] * span / spans, stop = s.out.shape[3] * (span + 1) / spans;
            first.run_row(n, y, from, stop, 0, between - from * width, width, nullptr, 0, pointers);
            float* out = s.out.as<float>() + n * s.out.strides[0] + y * s.out.strides[2] + from * s.out.strides[3];
            const float* residual = nullptr;
            if (epilogue.has_residual)
                residual = s.residual.as<const float>() + n * s.residual.strides[0] + y * s.residual.strides[2] +
                           from * s.residual.strides[3];
            for (int64_t panel = 0; panel < panels; panel++)
                multiply_panel(rows, stop - from, panel, residual, out);
        }
    }

  private:
    void multiply_panel(const float* const* rows, int M, int64_t panel, const float* residual, float* out) const {
        const int panel_vecs = panel + 1 < panels || vecs == 1 ? std::min<int>(vecs, 2) : vecs - 2 * (panels - 1);
        const int64_t n = panel * 2 * LANES;
        Tile tile{};
        tile.taps = 1;
        tile.weights = s.weights + n * K;
        tile.ldb = panel_vecs * LANES;
        tile.bias = s.bias + n;
        tile.c = out + n;
        tile.ldc = s.out.strides[3];
        tile.residual = residual ? residual + n : nullptr;
        tile.ld_residual = s.residual.strides[3];
        tile.N = std::min<int64_t>(panel_vecs * LANES, N - n);
        multiply_rows(rows, M, K, tile, epilogue, panel_vecs);
    }

    const Separable s;
    const DepthwiseKernel first;
    const BoundEpilogue epilogue;
    int64_t K, N, vecs, panels, width, spans, pointers_nbytes;
};

}  // namespace nimble
