// Windows over bytes. A window is a few runs of neighbouring bytes, each at a fixed offset from the pixel's first byte. Linears
// and 1x1 windows have one run, which is read in place. For other windows, the lines of x that a block's windows cover are
// copied to scratch, padded, with the features of each pixel side by side: far fewer bytes than copies of all windows.
//
// A work unit is one block of output pixels of one group, times one set of panels.
#pragma once

#include <algorithm>
#include <vector>

#include <mlsys/gemm.h>

#include "kernel.h"

namespace nimble {

constexpr int COPIED = 32;  // bytes at once; there is room for as many behind what is written

// `end`: end of the readable memory.
inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t count, const uint8_t* end) {
    if (from + (count + COPIED - 1) / COPIED * COPIED > end) {
        std::memcpy(to, from, count);
        return;
    }
    for (; count > 0; count -= COPIED, to += COPIED, from += COPIED) std::memcpy(to, from, COPIED);
}

// Features of `planes` planes, side by side in each of LANES pixels; up to 4 of them. Up to 4 * LANES bytes are written.
inline void interleave(uint8_t* to, const uint8_t* from, int64_t planes, int64_t apart) {
    vu words = load_bytes(from);
    for (int64_t plane = 1; plane < planes; plane++) words |= load_bytes(from + plane * apart) << (int)(8 * plane);
#if MLSYS_LANES == 16 && defined(__AVX512BW__)
    if (planes == 3) {  // words of 3 bytes: 12 of each 16 bytes, then the first three quarters of each
        const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
        const __m512i order = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
        words = (vu)_mm512_permutexvar_epi32(order, _mm512_shuffle_epi8((__m512i)words, bytes));
        std::memcpy(to, &words, 4 * LANES);
        return;
    }
#elif MLSYS_LANES == 8 && defined(__AVX2__)
    if (planes == 3) {
        const __m128i half = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
        const __m256i bytes = _mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(half));
        words = (vu)_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7));
        std::memcpy(to, &words, 4 * LANES);
        return;
    }
#endif
    uint8_t kept[4 * LANES];
    std::memcpy(kept, &words, sizeof kept);
    for (int64_t i = 0; i < LANES; i++)
        for (int64_t plane = 0; plane < planes; plane++) to[i * planes + plane] = kept[4 * i + plane];
}

// C has x, residual, out ([N, C, D, H, W]), kernel, stride, before, dilation and groups.
template <class C>
class Lines {
  public:
    Lines(const C& c, int tile_rows) : c(c) {
        channels = c.x.shape[1] / c.groups;
        N = c.out.shape[1] / c.groups;
        vecs = (N + LANES - 1) / LANES;
        panels = (vecs + PANEL_VECS - 1) / PANEL_VECS;
        taps = c.dilation[2] == 1 ? 1 : c.kernel[2];
        quads = (channels * c.kernel[2] / taps + 3) / 4;
        runs = (int64_t)c.kernel[0] * c.kernel[1] * taps;
        read = 1;
        for (int d = 0; d < 5; d++) read += (c.x.shape[d] - 1) * c.x.strides[d];
        is_direct = channels % 4 == 0 && c.x.strides[1] == 1 && (int64_t)c.kernel[0] * c.kernel[1] * c.kernel[2] == 1;
        for (int d = 0; d < SPACE; d++)
            is_direct &= c.before[d] == 0 && c.x.shape[2 + d] >= (c.out.shape[2 + d] - 1) * c.stride[d] + 1;
        for (int d = 0; d < 4; d++) {
            const int at = d ? 1 + d : 0;
            size[d] = c.out.shape[at], outs[d] = c.out.strides[at], residuals[d] = c.residual.strides[at];
            steps[d] = c.x.strides[at] * (d ? c.stride[d - 1] : 1);
        }
        if (is_direct) merge();
        choose_blocks(tile_rows);
        const int64_t columns = reach(block_columns, 2), height = reach(block_lines, 1);
        line_nbytes = columns * channels, plane_nbytes = height * line_nbytes;
        for (int kz = 0; kz < c.kernel[0]; kz++)
            for (int ky = 0; ky < c.kernel[1]; ky++)
                for (int kx = 0; kx < taps; kx++)
                    offsets.push_back(
                        kz * plane_nbytes + ky * c.dilation[1] * line_nbytes + kx * c.dilation[2] * channels);
        starts_nbytes = (block_lines * block_columns * sizeof(uint8_t*) + 63) / 64 * 64;
        scratch_nbytes = HEADER_NBYTES + starts_nbytes + (is_direct ? 0 : c.kernel[0] * plane_nbytes + COPIED);
    }

    // Call multiply(first bytes of pixels, their number, element of out, element of residual, group, panel); the pixels are
    // outs[3] apart in out, and residuals[3] in the residual.
    template <class Multiply>
    void run(int64_t begin, int64_t end, void* scratch, int32_t zero_point, const Multiply& multiply) const {
        int64_t& made = *(int64_t*)scratch;  // the block and group in scratch
        const uint8_t** starts = (const uint8_t**)((char*)scratch + HEADER_NBYTES);
        uint8_t* lines = (uint8_t*)starts + starts_nbytes;
        const bool is_flat = block_columns == size[3] && outs[2] == outs[3] * size[3] && residuals[2] == residuals[3] * size[3];
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t set = unit % sets, group = unit / sets % c.groups;
            int64_t rest = unit / sets / c.groups;
            Block b;
            b.at[3] = rest % across * block_columns, rest /= across;
            b.at[2] = rest % down * block_lines, rest /= down;
            b.at[1] = rest % size[1], b.at[0] = rest / size[1];
            b.lines = std::min(block_lines, size[2] - b.at[2]), b.columns = std::min(block_columns, size[3] - b.at[3]);
            if (made != unit / sets) {
                const uint8_t* x = c.x.template as<const uint8_t>() + group * channels * c.x.strides[1];
                if (!is_direct) copy(b, x, zero_point, lines);
                for (int64_t y = 0; y < b.lines; y++) {
                    const uint8_t* from = lines + y * c.stride[1] * line_nbytes;
                    int64_t step = c.stride[2] * channels;
                    if (is_direct) from = x + place(b, y, steps), step = steps[3];
                    for (int64_t i = 0; i < b.columns; i++) starts[y * b.columns + i] = from + i * step;
                }
            }
            made = unit / sets;
            const int64_t pieces = is_flat ? 1 : b.lines, count = b.lines * b.columns / pieces;
            for (int64_t panel = panels * set / sets; panel < panels * (set + 1) / sets; panel++)
                for (int64_t y = 0; y < pieces; y++)
                    multiply(starts + y * count, (int)count, place(b, y, outs), place(b, y, residuals), group, panel);
        }
    }

    int64_t channels, N, vecs, panels, quads, runs;  // per group; quads: words of a run
    int64_t units, scratch_nbytes;
    int64_t outs[4], residuals[4];  // distances of neighbours: n, z, y, x
    std::vector<int64_t> offsets;   // byte offset of each run from its pixel's first byte

  private:
    static constexpr int64_t HEADER_NBYTES = 64;
    static constexpr int64_t ENOUGH_UNITS = 16;                      // work units that a few workers share evenly
    static constexpr int64_t ENOUGH_PANELS = 12;                     // panels of all blocks: fewer blocks read weights less often
    static constexpr int64_t MOST_PIXELS = 224, NBYTES = 256 << 10;  // pixels of a block, bytes of their features, at most

    struct Block {
        int64_t at[4], lines, columns;
    };

    static int64_t place(const Block& b, int64_t y, const int64_t (&distances)[4]) {
        return b.at[0] * distances[0] + b.at[1] * distances[1] + (b.at[2] + y) * distances[2] + b.at[3] * distances[3];
    }

    int64_t reach(int64_t count, int d) const { return (count - 1) * c.stride[d] + (c.kernel[d] - 1) * c.dilation[d] + 1; }

    // Merge evenly spaced pixels into one line.
    void merge() {
        for (int d = 2; d >= 0; d--) {
            if (size[d] == 1) continue;
            const bool is_even = steps[d] == steps[3] * size[3] && outs[d] == outs[3] * size[3] &&
                                 residuals[d] == residuals[3] * size[3];
            if (!is_even) return;
            size[3] *= size[d], size[d] = 1;
        }
    }

    void choose_blocks(int tile_rows) {
        int64_t limit = std::clamp<int64_t>(NBYTES / channels, 2 * tile_rows, MOST_PIXELS);
        for (;; limit -= tile_rows) {
            across = (size[3] + limit - 1) / limit;
            block_columns = (size[3] + across - 1) / across;
            across = (size[3] + block_columns - 1) / block_columns;
            block_lines = std::clamp<int64_t>(limit / block_columns, 1, across > 1 ? 1 : size[2]);
            down = (size[2] + block_lines - 1) / block_lines;
            block_lines = (size[2] + down - 1) / down;
            if (limit < 3 * tile_rows || size[0] * size[1] * down * across * c.groups * panels >= ENOUGH_PANELS) break;
        }
        const int64_t blocks = size[0] * size[1] * down * across;
        sets = std::clamp<int64_t>((ENOUGH_UNITS + blocks * c.groups - 1) / (blocks * c.groups), 1, panels);
        units = blocks * c.groups * sets;
    }

    void copy(const Block& b, const uint8_t* x, int32_t zero_point, uint8_t* to) const {
        const uint8_t* stop = c.x.template as<const uint8_t>() + read;
        const int64_t columns = reach(b.columns, 2), left = b.at[3] * c.stride[2] - c.before[2];
        const int64_t before = std::clamp<int64_t>(-left, 0, columns);
        const int64_t inside = std::clamp<int64_t>(c.x.shape[4] - left, before, columns) - before;
        for (int kz = 0; kz < c.kernel[0]; kz++)
            for (int64_t i = 0; i < reach(b.lines, 1); i++) {
                const int64_t z = b.at[1] * c.stride[0] - c.before[0] + kz * c.dilation[0];
                const int64_t y = b.at[2] * c.stride[1] - c.before[1] + i;
                uint8_t* line = to + kz * plane_nbytes + i * line_nbytes;
                if (z < 0 || z >= c.x.shape[2] || y < 0 || y >= c.x.shape[3] || inside == 0) {
                    std::memset(line, zero_point, columns * channels);
                    continue;
                }
                std::memset(line, zero_point, before * channels);
                const uint8_t* from = x + b.at[0] * c.x.strides[0] + z * c.x.strides[2] + y * c.x.strides[3] +
                                      (left + before) * c.x.strides[4];
                copy_pixels(line + before * channels, from, inside, stop);
                std::memset(line + (before + inside) * channels, zero_point, (columns - before - inside) * channels);
            }
    }

    void copy_pixels(uint8_t* to, const uint8_t* from, int64_t count, const uint8_t* stop) const {
        const int64_t pixel = c.x.strides[4], apart = c.x.strides[1];
        if (apart == 1 && pixel == channels) return copy_bytes(to, from, count * channels, stop);
        int64_t i = 0;
        if (pixel == 1 && channels <= 4)
            for (; i + LANES <= count; i += LANES, from += LANES, to += LANES * channels) interleave(to, from, channels, apart);
        for (; i < count; i++, from += pixel, to += channels) {
            if (apart == 1) copy_bytes(to, from, channels, stop);
            else
                for (int64_t ch = 0; ch < channels; ch++) to[ch] = from[ch * apart];
        }
    }

    const C c;
    int64_t taps, read;  // bytes of x, from the first to the last that is read
    int64_t size[4], steps[4];  // of out and of x: n, z, y, x
    int64_t across, down, block_columns, block_lines, sets;
    int64_t line_nbytes, plane_nbytes, starts_nbytes;
    bool is_direct;
};

}  // namespace nimble
