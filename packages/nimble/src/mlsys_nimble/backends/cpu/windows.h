// Rows of features for the windows of a convolution, gathered for one block of output pixels at a time, and the work units,
// for products of bf16 pairs (pairs.h).
//
// A row consists of 32-bit words with a few neighbouring features each. A work unit is one block of pixels of one group, times
// one set of panels. A linear is a convolution over a line of pixels.
#pragma once

#include <algorithm>

#include <mlsys/gemm.h>

#include "kernel.h"

namespace nimble {

// An output pixel: where its results go, and its window.
struct Place {
    int64_t out, residual;  // in elements
    int32_t n, at[SPACE];
};

// Sizes that a kernel chooses.
struct Blocking {
    int features;       // features of a 32-bit word
    int rows;           // rows of a tile
    int64_t most_rows;  // rows of a block, at most
    int64_t nbytes;     // bytes of a block's rows, at most, unless that is fewer than `least_rows` rows
    int64_t least_rows;
    int64_t spare_nbytes;  // behind the rows, that copies may write to
};

// C has x, residual, out, kernel, stride, before, dilation and groups. Copy moves features from x to rows:
//     pad(to, count)               features outside x
//     run(to, from, count)         side by side
//     apart(to, from, count, gap)  every gap-th
//     end(to, stop)                what is left of the last word
// with types Copy::From, Copy::To.
template <class C>
class Windows {
  public:
    Windows(const C& c, const Blocking& b) : c(c) {
        channels = c.x.shape[1] / c.groups;
        N = c.out.shape[1] / c.groups;
        vecs = (N + LANES - 1) / LANES;
        panels = (vecs + PANEL_VECS - 1) / PANEL_VECS;
        const int64_t K = (int64_t)c.kernel[0] * c.kernel[1] * c.kernel[2] * channels;
        words = (K + b.features - 1) / b.features;
        row = words * b.features;
        pixels = c.out.shape[0] * c.out.shape[2] * c.out.shape[3] * c.out.shape[4];
        const int64_t fitting = b.nbytes / (4 * std::max<int64_t>(words, 1));
        int64_t limit = std::clamp<int64_t>(fitting, b.least_rows, b.most_rows);
        while (limit > b.least_rows && (pixels + limit - 1) / limit * c.groups * panels < ENOUGH_UNITS) limit -= b.rows;
        blocks = (pixels + limit - 1) / limit;
        block_rows = (pixels + blocks - 1) / blocks;
        block_rows = (block_rows + b.rows - 1) / b.rows * b.rows;
        blocks = (pixels + block_rows - 1) / block_rows;
        sets = std::clamp<int64_t>((ENOUGH_UNITS + blocks * c.groups - 1) / (blocks * c.groups), 1, panels);
        units = blocks * c.groups * sets;
        places_nbytes = (block_rows * sizeof(Place) + 63) / 64 * 64;
        scratch_nbytes = HEADER_NBYTES + places_nbytes + block_rows * words * 4 + b.spare_nbytes;
    }

    // Call multiply(gathered rows, places, number of rows, group, panel) for each panel of the units.
    template <class Copy, class Multiply>
    void run(int64_t begin, int64_t end, void* scratch, const Copy& copy, const Multiply& multiply) const {
        int64_t& made = *(int64_t*)scratch;  // the block and group in scratch
        Place* places = (Place*)((char*)scratch + HEADER_NBYTES);
        auto* gathered = (typename Copy::To*)((char*)places + places_nbytes);
        const auto* x = c.x.template as<const typename Copy::From>();
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t set = unit % sets, group = unit / sets % c.groups, block = unit / sets / c.groups;
            const int64_t first = block * block_rows;
            const int rows = (int)std::min(block_rows, pixels - first);
            if (made == Kernel::NEW || made / c.groups != block) place(first, rows, places);
            if (made != unit / sets) gather(copy, x + group * channels * c.x.strides[1], places, rows, gathered);
            made = unit / sets;
            for (int64_t panel = panels * set / sets; panel < panels * (set + 1) / sets; panel++)
                multiply(gathered, places, rows, group, panel);
        }
    }

    int64_t channels, N, vecs, panels, words, row, pixels;  // per group; row: features of a row, in whole words
    int64_t units, scratch_nbytes;

  private:
    static constexpr int64_t HEADER_NBYTES = 64;
    static constexpr int ENOUGH_UNITS = 16;  // work units that a few workers share evenly

    void place(int64_t first, int rows, Place* to) const {
        int64_t rest = first;
        int32_t at[4];  // n, z, y, x
        for (int d = 3; d >= 1; d--) at[d] = rest % c.out.shape[1 + d], rest /= c.out.shape[1 + d];
        at[0] = rest;
        for (int r = 0; r < rows; r++, to++) {
            to->n = at[0];
            to->out = at[0] * c.out.strides[0], to->residual = at[0] * c.residual.strides[0];
            for (int d = 0; d < SPACE; d++) {
                to->at[d] = at[1 + d];
                to->out += at[1 + d] * c.out.strides[2 + d];
                to->residual += at[1 + d] * c.residual.strides[2 + d];
            }
            for (int d = 3; d >= 0; d--) {
                if (++at[d] < c.out.shape[d ? 1 + d : 0] || d == 0) break;
                at[d] = 0;
            }
        }
    }

    // The window's columns are closest after the channels.
    template <class Copy>
    void gather(const Copy& copy, const typename Copy::From* x, const Place* places, int rows, typename Copy::To* to) const {
        const int64_t pixel = c.x.strides[4], apart = c.x.strides[1];
        const bool is_run = c.dilation[2] == 1 && pixel == channels && apart == 1;
        for (int r = 0; r < rows; r++, to += row) {
            auto* next = to;
            const Place& place = places[r];
            const int64_t left = (int64_t)place.at[2] * c.stride[2] - c.before[2];
            for (int kz = 0; kz < c.kernel[0]; kz++)
                for (int ky = 0; ky < c.kernel[1]; ky++) {
                    const int64_t z = (int64_t)place.at[0] * c.stride[0] - c.before[0] + kz * c.dilation[0];
                    const int64_t y = (int64_t)place.at[1] * c.stride[1] - c.before[1] + ky * c.dilation[1];
                    const int64_t count = c.kernel[2] * channels;
                    if (z < 0 || z >= c.x.shape[2] || y < 0 || y >= c.x.shape[3]) {
                        copy.pad(next, count);
                        next += count;
                        continue;
                    }
                    const auto* from = x + place.n * c.x.strides[0] + z * c.x.strides[2] + y * c.x.strides[3];
                    if (is_run && left >= 0 && left + c.kernel[2] <= c.x.shape[4]) {
                        copy.run(next, from + left * pixel, count);
                        next += count;
                        continue;
                    }
                    for (int kx = 0; kx < c.kernel[2]; kx++, next += channels) {
                        const int64_t w = left + kx * c.dilation[2];
                        if (w < 0 || w >= c.x.shape[4]) copy.pad(next, channels);
                        else if (apart == 1) copy.run(next, from + w * pixel, channels);
                        else copy.apart(next, from + w * pixel, channels, apart);
                    }
                }
            copy.end(next, to + row);
        }
    }

    const C c;
    int64_t blocks, block_rows, sets, places_nbytes;
};

}  // namespace nimble
