// Quantisation of floats to uint8, dequantisation, and max pooling over uint8 values.
#pragma once

#include <algorithm>
#include <cmath>

#include "codes.h"

namespace nimble {

struct Coding {
    View x, out;         // same shape; one is uint8, the other float32
    View parameters;     // scale and zero point, float32 [2]; rank 0: use this struct's
    float scale;
    Codes codes;         // inverse of the scale, zero point and range
};
MLSYS_STRUCT(Coding, x, out, parameters, scale, codes);

constexpr int64_t CODING_ELEMENTS = 8192;  // elements of a work unit, at most

class CodingKernel : public Kernel {
  public:
    explicit CodingKernel(const Coding& c) : c(c) {
        const int last = c.out.rank - 1;
        inner = c.out.shape[last];
        pieces = (inner + CODING_ELEMENTS - 1) / CODING_ELEMENTS;
        outer = 1;
        for (int d = 0; d < last; d++) outer *= c.out.shape[d];
        rows = std::max<int64_t>(1, CODING_ELEMENTS / inner);  // rows of a work unit
        units = (outer + rows - 1) / rows * pieces;
        is_dense = c.x.strides[last] == 1 && c.out.strides[last] == 1;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        float scale = c.scale;
        Codes codes = c.codes;
        if (c.parameters.rank) {
            const float* parameters = c.parameters.as<const float>();
            scale = parameters[0];
            codes.inverse = (float)(1.0 / (double)scale);
            codes.zero_point = (int32_t)parameters[1];
        }
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t piece = unit % pieces, first = inner * piece / pieces, stop = inner * (piece + 1) / pieces;
            for (int64_t row = unit / pieces * rows; row < std::min(outer, (unit / pieces + 1) * rows); row++) {
                int64_t from = 0, to = 0, rest = row;
                for (int d = c.out.rank - 2; d >= 0; d--) {
                    const int64_t i = rest % c.out.shape[d];
                    rest /= c.out.shape[d];
                    from += i * c.x.strides[d];
                    to += i * c.out.strides[d];
                }
                if (c.out.dtype == UINT8) code(c.x.as<const float>() + from, c.out.as<uint8_t>() + to, first, stop, codes);
                else decode(c.x.as<const uint8_t>() + from, c.out.as<float>() + to, first, stop, scale, codes.zero_point);
            }
        }
    }

  private:
    void code(const float* x, uint8_t* out, int64_t i, int64_t stop, const Codes& codes) const {
        const Rounding rounding(codes);
        if (is_dense)
            for (; i + LANES <= stop; i += LANES) store_bytes(out + i, rounding(load(x + i)));
        const int64_t x_step = c.x.strides[c.out.rank - 1], out_step = c.out.strides[c.out.rank - 1];
        for (; i < stop; i++) out[i * out_step] = (uint8_t)rounding(splat(x[i * x_step]))[0];
    }

    void decode(const uint8_t* x, float* out, int64_t i, int64_t stop, float scale, int32_t zero_point) const {
        const vf zero = splat((float)zero_point);
        if (is_dense)
            for (; i + LANES <= stop; i += LANES) store(out + i, (load_codes(x + i) - zero) * splat(scale));
        const int64_t x_step = c.x.strides[c.out.rank - 1], out_step = c.out.strides[c.out.rank - 1];
        for (; i < stop; i++) out[i * out_step] = ((float)x[i * x_step] - (float)zero_point) * scale;
    }

    const Coding c;
    int64_t inner, outer, pieces, rows;
    bool is_dense;
};

struct ChooseScale {
    View x, out;  // x [rows, elements], elements side by side; out: scale and zero point
    int32_t least, most;
    float eps;
};
MLSYS_STRUCT(ChooseScale, x, out, least, most, eps);

// Scale and zero point as PT2E's `choose_qparams` computes them, in float32.
class ChooseScaleKernel : public Kernel {
  public:
    explicit ChooseScaleKernel(const ChooseScale& c) : c(c) {}

    void run(int64_t, int64_t, void*) const override {
        vf low{}, high{};  // zero is always in the range
        const int64_t count = c.x.shape[1];
        for (int64_t row = 0; row < c.x.shape[0]; row++) {
            const float* x = c.x.as<const float>() + row * c.x.strides[0];
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) {
                const vf next = load(x + i);
                low = smaller(low, next);
                high = larger(high, next);
            }
            for (; i < count; i++) low = smaller(low, splat(x[i])), high = larger(high, splat(x[i]));
        }
        const float least = -largest(-low), range = largest(high) - least;
        const float scale = std::max(range / (float)(c.most - c.least), c.eps);
        const float zero_point = (float)c.least - std::nearbyint(least / scale);
        float* out = c.out.as<float>();
        out[0] = scale;
        out[1] = std::min(std::max(zero_point, (float)c.least), (float)c.most);
    }

  private:
    const ChooseScale c;
};

struct CodesPool {
    View x, out;  // [N, C, D, H, W], uint8, channels side by side
    int32_t kernel[3], stride[3], before[3], dilation[3];
};
MLSYS_STRUCT(CodesPool, x, out, kernel, stride, before, dilation);

class CodesPoolKernel : public Kernel {
  public:
    explicit CodesPoolKernel(const CodesPool& p) : p(p) {
        units = p.out.shape[0] * p.out.shape[2] * p.out.shape[3];
        scratch_nbytes = (int64_t)p.kernel[0] * p.kernel[1] * p.kernel[2] * sizeof(uint8_t*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const uint8_t** inside = (const uint8_t**)scratch;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t y = unit % p.out.shape[3], z = unit / p.out.shape[3] % p.out.shape[2];
            const int64_t n = unit / p.out.shape[3] / p.out.shape[2];
            uint8_t* row = p.out.as<uint8_t>() + n * p.out.strides[0] + z * p.out.strides[2] + y * p.out.strides[3];
            for (int64_t w = 0; w < p.out.shape[4]; w++) most(inside, find(n, {z, y, w}, inside), row + w * p.out.strides[4]);
        }
    }

  private:
    struct Position {
        int64_t at[3];
    };

    int find(int64_t n, const Position& position, const uint8_t** inside) const {
        const uint8_t* image = p.x.as<const uint8_t>() + n * p.x.strides[0];
        int count = 0;
        int64_t tap[3];
        for (tap[0] = 0; tap[0] < p.kernel[0]; tap[0]++)
            for (tap[1] = 0; tap[1] < p.kernel[1]; tap[1]++)
                for (tap[2] = 0; tap[2] < p.kernel[2]; tap[2]++) {
                    const uint8_t* from = image;
                    bool is_inside = true;
                    for (int d = 0; d < 3; d++) {
                        const int64_t i = position.at[d] * p.stride[d] - p.before[d] + tap[d] * p.dilation[d];
                        is_inside &= i >= 0 && i < p.x.shape[2 + d];
                        from += i * p.x.strides[2 + d];
                    }
                    if (is_inside) inside[count++] = from;
                }
        return count;
    }

    void most(const uint8_t* const* inside, int count, uint8_t* out) const {
        typedef uint8_t vq __attribute__((vector_size(4 * LANES), may_alias));
        int64_t c = 0;
        for (; c + 4 * LANES <= p.out.shape[1]; c += 4 * LANES) {
            vq best{};
            for (int tap = 0; tap < count; tap++) {
                const vq x = load_as<vq>(inside[tap] + c);
                best = best > x ? best : x;
            }
            std::memcpy(out + c, &best, sizeof best);
        }
        for (; c < p.out.shape[1]; c++) {
            uint8_t best = 0;
            for (int tap = 0; tap < count; tap++) best = std::max(best, inside[tap][c]);
            out[c] = best;
        }
    }

    const CodesPool p;
};

}  // namespace nimble
