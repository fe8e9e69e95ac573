// Convolutions of groups of a few channels, in windows three wide: as in a depthwise convolution, vectors run over the
// results' channels, and each feature of a pixel is read once for all of the tile's pixels that its column reaches. Groups
// with fewer channels than a vector has lanes share a vector: each lane then reads the features of its group.
#pragma once

#include "depthwise.h"

namespace nimble {

struct Grouped {
    Depthwise convolution;  // weights: [vectors][rows of the window][width][3][LANES], zeros beyond the channels
    int32_t width;          // channels of a group, as many as it gives: a divisor of LANES
};
MLSYS_STRUCT(Grouped, convolution, width);

class GroupedKernel : public DepthwiseKernel {
  public:
    static constexpr int WINDOW = 3;                   // width of the window, in taps
    static constexpr int SUMS = LANES == 16 ? 14 : 7;  // pixels of a tile

    explicit GroupedKernel(const Grouped& g) : DepthwiseKernel(g.convolution, false, SUMS), width(g.width) {
        const bool shares = width < LANES;
        if (d.stride[1] == 1)
            span = shares ? &run_span<1, true> : &run_span<1, false>;
        else
            span = shares ? &run_span<2, true> : &run_span<2, false>;
    }

  private:
    template <int SW, bool SHARES>
    static void run_span(const DepthwiseKernel& base, Rows rows, int first_row, int stop_row, const Target& target) {
        const auto& k = static_cast<const GroupedKernel&>(base);
        for (int64_t next = 0; next < k.channels; next += LANES) {
            const int count = std::min<int64_t>(LANES, k.channels - next);
            for (int64_t pixel = 0; pixel < target.pixels;) {
                constexpr int HALF = (SUMS + 1) / 2;
                const bool is_whole = target.pixels - pixel > HALF;
                if (is_whole)
                    k.run_tile<SW, SHARES, SUMS>(rows, first_row, stop_row, pixel, next, count, target);
                else
                    k.run_tile<SW, SHARES, HALF>(rows, first_row, stop_row, pixel, next, count, target);
                pixel += is_whole ? SUMS : HALF;
            }
        }
    }

    template <int SW, bool SHARES, int TILE>
    __attribute__((noinline)) void run_tile(
        Rows rows, int first_row, int stop_row, int64_t pixel, int64_t next, int count, const Target& target) const {
        constexpr int REACH = (TILE - 1) * SW + WINDOW;
        vf sums[1][TILE];
        for (vf& sum : sums[0]) sum = load(d.bias + next);
        const float* weights = d.weights + (next / LANES * d.kernel[0] + first_row) * width * WINDOW * LANES;
        const vi group = lane_numbers() / width * width;  // first feature of each lane's group
        for (int ky = first_row; ky < stop_row; ky++) {
            const float* const* from = rows[ky] + pixel * SW;
            asm("" : "+r"(from));  // one register: its sums with constants are part of an instruction
            for (int k = 0; k < width; k++, weights += WINDOW * LANES) {
                vf w[WINDOW];
                for (int kx = 0; kx < WINDOW; kx++) w[kx] = in_register(load(weights + kx * LANES));
                const vi lanes = group + splat_int(k);
#pragma GCC unroll 32
                for (int j = 0; j < REACH; j++) {
                    const vf x = in_register(SHARES ? picked(load_first(from[j] + next, count), lanes) : splat(from[j][next + k]));
                    for (int p = 0; p < TILE; p++)
                        if (j - p * SW >= 0 && j - p * SW < WINDOW) sums[0][p] = fma(x, w[j - p * SW], sums[0][p]);
                }
            }
        }
        finish<1, TILE>(sums, pixel, std::min<int64_t>(TILE, target.pixels - pixel), 0, count, next, target);
    }

    const int width;
};

}  // namespace nimble
