// Convolution as a GEMM of rows found by pointers and packed weights (Dukhan 2019, "The Indirect Convolution
// Algorithm"): one pointer per output pixel of an image and tap, bound ahead of time because tensors do not move; padding
// points to a row of zeros, and further images lie a stride apart. A 1x1 window over evenly spaced pixels needs no
// pointers, and so is a linear. Few input channels (an image) are first copied, a band of input rows at a time, to a
// padded one in scratch, in which a row of the window is one run of features; that also takes images whose channels are
// planes.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm.h"

namespace nimble {

struct Convolution {
    View x, residual, out;  // [N, C, D, H, W]
    const Weight* weights;  // [groups][panels][taps][C / groups][panel]
    const float* bias;      // [groups][N of the panels], zeros if there is none
    int32_t kernel[SPACE], stride[SPACE], before[SPACE], dilation[SPACE];
    int32_t groups;
    Epilogue epilogue;
};
MLSYS_STRUCT(Convolution, x, residual, out, weights, bias, kernel, stride, before, dilation, groups, epilogue);

constexpr int PART = 320;         // features of one part of a sum: 20 KiB of a panel, in the first-level cache
constexpr int WHOLE = 400;        // up to this many features stay one part: storing sums between parts would cost more
// With more features, each part of the pixels is read once for SET_PANELS panels, if the pixels exceed FAR_NBYTES, what
// stays in the L2 cache. Processors with AVX-512 have 1 MiB of L2 and gain nothing: they make more work units instead.
constexpr int SET_PANELS = LANES == 16 ? 1 : 4, FAR_NBYTES = 512 << 10;
constexpr int BLOCK_ROWS = LANES == 16 ? 192 : 96;  // output pixels of a work unit, at most
constexpr int LEAST_ROWS = 24;    // rows of a block, at least: with fewer, weights are read too often
constexpr int ENOUGH_UNITS = 32;  // work units that a few workers share evenly
constexpr int BLOCK_NBYTES = (LANES == 16 ? 640 : 192) << 10;  // bytes of a block's features, which stay in the L2 cache
constexpr int BAND_CHANNELS = 7;  // input channels, at most, of a convolution that copies bands of rows
MLSYS_CONSTANTS(BAND_CHANNELS);
constexpr int NEAR_NBYTES = 256 << 10;  // bytes of weights that stay in the L2 cache
constexpr int LINE_NBYTES = 64;

// Return the number of pixels, counted from the innermost dimension, that are one stride apart.
inline int64_t collapsed(const View& view) {
    int64_t run = view.shape[4];
    for (int d = 3; d >= 0; d--) {
        const int dim = d == 1 ? -1 : d;
        if (dim < 0) continue;
        if (view.shape[dim] != 1 && view.strides[dim] != run * view.strides[4]) return run;
        run *= view.shape[dim];
    }
    return run;
}

// Where the width is 1, the stride between pixels is that of the next dimension that is longer than 1.
inline View spaced(View view) {
    for (int d : {3, 2, 0})
        if (view.shape[4] == 1 && view.shape[d] != 1) {
            std::swap(view.shape[4], view.shape[d]);
            std::swap(view.strides[4], view.strides[d]);
        }
    return view;
}

class ConvolutionKernel : public Kernel {
  public:
    explicit ConvolutionKernel(const Convolution& c) : c(c), epilogue(c.epilogue) {
        channels = c.x.shape[1] / c.groups;
        N = c.out.shape[1] / c.groups;
        vecs = (N + LANES - 1) / LANES;
        panels = std::max<int64_t>(vecs / 2, 1);
        taps = (int64_t)c.kernel[0] * c.kernel[1] * c.kernel[2];
        K = taps * channels;
        const View out = spaced(c.out), residual = spaced(c.residual);
        int64_t run = collapsed(out);
        if (epilogue.has_residual) run = std::min(run, collapsed(residual));
        ldc = out.strides[4];
        ld_residual = residual.strides[4];
        bands = c.groups == 1 && (c.x.strides[1] != 1 || channels <= BAND_CHANNELS);
        bool pointwise = taps == 1 && !bands;
        for (int d = 0; d < SPACE; d++) pointwise &= c.stride[d] == 1 && c.x.shape[2 + d] == c.out.shape[2 + d];
        if (pointwise) {
            const View x = spaced(c.x);
            const int64_t x_run = collapsed(x);
            lda = x.strides[4];
            is_direct = x_run >= run || x_run >= BLOCK_ROWS;
            if (is_direct) run = std::min(run, x_run);
        }
        if (bands) {
            make_bands();
        } else {
            int64_t pixels = 1;
            for (int d : {0, 2, 3, 4}) pixels *= c.x.shape[d];
            sets = panels;
            if (is_direct && channels > WHOLE && pixels * channels * (int64_t)sizeof(float) > FAR_NBYTES)
                sets = (panels + SET_PANELS - 1) / SET_PANELS;
            set_panels = (panels + sets - 1) / sets;
            make_blocks(run);
            if (!is_direct) make_pointers();
            make_parts(channels, taps);
            units = (int64_t)blocks.size() * c.groups * sets;
            by_panels = K * N > pixels * channels;
            from_afar = K * N * (int64_t)sizeof(Weight) > NEAR_NBYTES;
            sums_nbytes = parts.size() > 1 ? (int64_t)most_rows * (2 * set_panels + 1) * LANES * sizeof(float) : 0;
            scratch_nbytes = sums_nbytes;
            if (!is_direct && moves()) scratch_nbytes += most_rows * taps * sizeof(float*);
        }
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        if (bands) return run_bands(begin, end, scratch);
        const float* x = c.x.as<const float>();
        const float** made = (const float**)((char*)scratch + sums_nbytes);
        int64_t made_for = -1;
        for (int64_t unit = begin; unit < end; unit++) {
            const Unit at = this->at(unit);
            const int64_t index = at.block, group = at.set / sets, set = at.set % sets;
            const Block& block = blocks[index];
            const float* const* rows = nullptr;
            if (!is_direct) {
                if (moves() && made_for != index) point_at(block, x, made);
                made_for = index;
                rows = moves() ? made : pointers.data() + block.first * taps;
            }
            multiply_block(block, rows, x + block.x_offset, taps, group, set, (float*)scratch);
        }
    }

  private:
    struct Unit {
        int64_t block, set;  // index over the sets of all groups
    };

    // Where weights are larger than pixels, workers share the panels, and each is read from memory once; else the blocks.
    Unit at(int64_t unit) const {
        const int64_t all = c.groups * sets, some = (int64_t)blocks.size();
        if (by_panels) return {unit % some, unit / some};
        return {unit / all, unit % all};
    }

    struct Block {
        int64_t first;  // pixel
        int rows;
        int64_t out_offset, residual_offset, x_offset;
    };

    // The table's pointers are valid for one image at a fixed address.
    bool moves() const { return !c.x.data || c.out.shape[0] > 1; }

    // Write the pointers of a block's pixels, which may lie in several images.
    void point_at(const Block& block, const float* x, const float** __restrict made) const {
        const int64_t table = pixels_of_image() * taps, end = (block.first + block.rows) * taps;
        const float* const nothing = zeros.data();
        for (int64_t at = block.first * taps, n = at / table; at < end; n++) {
            const int64_t some = std::min(end, (n + 1) * table) - at, moved = n * c.x.strides[0];
            const float* const* from = pointers.data() + (at - n * table);
            if (c.x.data)
                for (int64_t i = 0; i < some; i++) made[i] = from[i] == nothing ? nothing : from[i] + moved;
            else
                for (int64_t i = 0; i < some; i++) made[i] = from[i] ? x + ((int64_t)from[i] - 1 + moved) : nothing;
            made += some;
            at += some;
        }
    }

    int64_t pixels_of_image() const { return c.out.shape[2] * c.out.shape[3] * c.out.shape[4]; }

    // Multiply one block by a set of panels, part by part: a part of the pixels stays in the cache for all panels.
    // `rows` null: the pixels are evenly spaced from `x`.
    void multiply_block(
        const Block& block, const float* const* rows, const float* x, int64_t row_taps, int64_t group, int64_t set,
        float* sums) const {
        const int64_t panel = set * set_panels, stop = std::min(panel + set_panels, panels), panel_size = 2 * LANES * K;
        for (const Part& part : parts)
            for (int64_t each = panel; each < stop; each++) {
                const int64_t part_K = (int64_t)part.K * (part.stop_tap - part.first_tap), done = each - panel;
                const int64_t ahead = each + 1 < stop ? panel_size : part_K * 2 * LANES - done * panel_size;
                multiply_part(part, block, rows, x, row_taps, group, each, ahead, sums + done * block.rows * 2 * LANES);
            }
    }

    // `ahead`: distance from these weights to the next ones, which are prefetched.
    void multiply_part(
        const Part& whole, const Block& block, const float* const* rows, const float* x, int64_t row_taps, int64_t group,
        int64_t panel, int64_t ahead, float* sums) const {
        const int panel_vecs = panel + 1 < panels || vecs == 1 ? std::min<int>(vecs, 2) : vecs - 2 * (panels - 1);
        const int NR = panel_vecs * LANES, mr = max_mr(panel_vecs);
        const int64_t n = panel * 2 * LANES;
        float* out = c.out.as<float>() + block.out_offset + group * N + n;
        const float* residual = epilogue.has_residual ? c.residual.as<const float>() + block.residual_offset + group * N + n : nullptr;
        Part part = whole;
        part.first_k += group * channels;
        Tile tile;
        tile.taps = row_taps;
        tile.weights = c.weights + (group * vecs * LANES + n) * K + ((int64_t)part.first_tap * (K / row_taps) + whole.first_k) * NR;
        tile.ldb = NR;
        tile.bias = c.bias + group * vecs * LANES + n;
        tile.ldc = ldc;
        tile.ld_residual = ld_residual;
        tile.N = std::min<int64_t>(NR, N - n);
        const char* prefetch_from = (const char*)(tile.weights + ahead);
        const int64_t part_size = (int64_t)whole.K * (whole.stop_tap - whole.first_tap) * NR;
        const int lines = from_afar && !PREFETCHES ? part_size * sizeof(Weight) / LINE_NBYTES : 0;
        const int groups = (block.rows + mr - 1) / mr;
        if (from_afar) tile.prefetch_step_nbytes = prefetch_step(panel_vecs, groups);
        for (int g = 0, row = 0; g < groups; g++) {
            const int some = (block.rows - row + groups - g - 1) / (groups - g);
            for (int line = lines * g / groups; line < lines * (g + 1) / groups; line++)
                __builtin_prefetch(prefetch_from + line * LINE_NBYTES, 0, 2);
            tile.prefetch_from = prefetch_from + part_size / NR * g * tile.prefetch_step_nbytes;
            const float* spaced_rows[MAX_MR];
            if (rows) {
                tile.rows = rows + row * row_taps;
            } else {
                for (int r = 0; r < some; r++) spaced_rows[r] = x + (row + r) * lda;
                tile.rows = spaced_rows;
            }
            tile.sums = sums + row * NR;
            tile.c = out + row * ldc;
            tile.residual = residual ? residual + row * ld_residual : nullptr;
            multiply_of(some, panel_vecs)(part, tile, epilogue);
            row += some;
        }
    }

    int64_t offset_of(const View& view, int64_t pixel) const {  // elements from the view's start to an output pixel
        int64_t offset = 0;
        for (int d = 4; d >= 0; d--) {
            if (d == 1) continue;
            offset += pixel % view.shape[d] * view.strides[d];
            pixel /= view.shape[d];
        }
        return offset;
    }

    void make_blocks(int64_t run) {
        const int64_t pixels = c.out.shape[0] * c.out.shape[2] * c.out.shape[3] * c.out.shape[4];
        const int64_t near = set_panels > 1 ? PART : channels;  // features of a pixel that the next panel reads again
        const int64_t fitting = BLOCK_NBYTES / (4 * std::max<int64_t>(near * std::min<int64_t>(taps, 3), 1));
        int64_t limit = std::min<int64_t>(BLOCK_ROWS, std::max<int64_t>(fitting / 12 * 12, LEAST_ROWS));
        while (limit > LEAST_ROWS && (pixels + limit - 1) / limit * c.groups * panels < ENOUGH_UNITS) limit -= 12;
        blocks.reserve((pixels + run - 1) / run * ((run + limit - 1) / limit));
        // Tiles of even sizes: a row or two left over would take as long to compute as several.
        const int64_t tiles = (run + max_mr(2) - 1) / max_mr(2), count = std::min((run + limit - 1) / limit, tiles);
        for (int64_t start = 0; start < pixels; start += run) {
            // The pixels of a run are evenly spaced.
            const int64_t out_at = offset_of(c.out, start), x_at = is_direct ? offset_of(c.x, start) : 0;
            const int64_t residual_at = epilogue.has_residual ? offset_of(c.residual, start) : 0;
            for (int64_t i = 0, row = 0; i < count; i++) {
                const int64_t done = (tiles * (i + 1) + count - 1) / count;  // tiles
                const int64_t some = run * done / tiles - row;
                most_rows = std::max(most_rows, (int)some);
                blocks.push_back(
                    {start + row, (int)some, out_at + row * ldc, residual_at + row * ld_residual, x_at + row * lda});
                row += some;
            }
        }
    }

    void make_pointers() {
        zeros.resize(c.x.shape[1]);
        pointers.reserve(pixels_of_image() * taps);
        for (int64_t z = 0; z < c.out.shape[2]; z++)
            for (int64_t y = 0; y < c.out.shape[3]; y++)
                for (int64_t w = 0; w < c.out.shape[4]; w++) {
                    const int64_t at[SPACE] = {z, y, w};
                    int64_t tap[SPACE];
                    for (tap[0] = 0; tap[0] < c.kernel[0]; tap[0]++)
                        for (tap[1] = 0; tap[1] < c.kernel[1]; tap[1]++)
                            for (tap[2] = 0; tap[2] < c.kernel[2]; tap[2]++) {
                                int64_t offset = 0;
                                bool inside = true;
                                for (int d = 0; d < SPACE; d++) {
                                    const int64_t i = at[d] * c.stride[d] - c.before[d] + tap[d] * c.dilation[d];
                                    inside &= i >= 0 && i < c.x.shape[2 + d];
                                    offset += i * c.x.strides[2 + d];
                                }
                                // A caller's tensor has no address yet: store its offset plus one (null: the row of
                                // zeros); `run` adds the address.
                                if (c.x.data)
                                    pointers.push_back(inside ? (const float*)c.x.data + offset : zeros.data());
                                else
                                    pointers.push_back(inside ? (const float*)(offset + 1) : nullptr);
                            }
                }
    }

    // Parts of a sum: part of one tap where a tap has many features, otherwise several taps.
    void make_parts(int64_t features, int64_t num_taps) {
        int64_t splits = 1, some_taps = num_taps;
        if (most_rows > max_mr(2)) {
            splits = features <= WHOLE ? 1 : (features + PART - 1) / PART;
            some_taps = splits > 1 ? 1 : std::max<int64_t>(1, PART / std::max<int64_t>(features, 1));
        }
        for (int64_t tap = 0; tap < num_taps; tap += some_taps)
            for (int64_t i = 0, first = 0; i < splits; i++) {
                const int64_t some = (features - first) / (splits - i);
                parts.push_back(
                    {(int)tap, (int)std::min(tap + some_taps, num_taps), (int)first, (int)some, false, false});
                first += some;
            }
        parts.front().is_first = parts.back().is_last = true;
    }

    // ---- bands of input rows ----

    void make_bands() {
        fused = c.dilation[2] == 1;
        band_taps = fused ? c.kernel[0] * c.kernel[1] : taps;
        band_width = (c.out.shape[4] - 1) * c.stride[2] + (c.kernel[2] - 1) * c.dilation[2] + 1;
        band_rows = std::clamp<int64_t>(2 * BLOCK_ROWS / c.out.shape[4], 1, c.out.shape[3]);
        // A block of rows must lie evenly spaced in the result.
        const bool even = c.out.strides[3] == c.out.shape[4] * c.out.strides[4] &&
                          (!epilogue.has_residual || c.residual.strides[3] == c.out.shape[4] * c.residual.strides[4]);
        if (!even) band_rows = 1;
        ldc = c.out.strides[4];
        ld_residual = c.residual.strides[4];
        bands_per_slice = (c.out.shape[3] + band_rows - 1) / band_rows;
        input_rows = (band_rows - 1) * c.stride[1] + (c.kernel[1] - 1) * c.dilation[1] + 1;
        most_rows = band_rows * c.out.shape[4];
        make_parts(K / band_taps, band_taps);
        units = c.out.shape[0] * c.out.shape[2] * bands_per_slice;
        band_nbytes = (c.kernel[0] * input_rows * band_width * channels * sizeof(float) + 63) / 64 * 64;
        pointers_nbytes = (most_rows * band_taps * sizeof(float*) + 63) / 64 * 64;
        scratch_nbytes = band_nbytes + pointers_nbytes + most_rows * MAX_VECS * LANES * sizeof(float);
    }

    void run_bands(int64_t begin, int64_t end, void* scratch) const {
        float* band = (float*)scratch;
        const float** rows = (const float**)((char*)scratch + band_nbytes);
        float* sums = (float*)((char*)scratch + band_nbytes + pointers_nbytes);
        int64_t height = 0;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t n = unit / bands_per_slice / c.out.shape[2], z = unit / bands_per_slice % c.out.shape[2];
            const int64_t y = unit % bands_per_slice * band_rows, some = std::min(band_rows, c.out.shape[3] - y);
            if (some != height) point_into(band, rows, some);
            height = some;
            copy_band(n, z, y, (some - 1) * c.stride[1] + (c.kernel[1] - 1) * c.dilation[1] + 1, band);
            Block block{0, (int)(some * c.out.shape[4]), 0, 0, 0};
            block.out_offset = n * c.out.strides[0] + z * c.out.strides[2] + y * c.out.strides[3];
            block.residual_offset = n * c.residual.strides[0] + z * c.residual.strides[2] + y * c.residual.strides[3];
            for (int64_t panel = 0; panel < panels; panel++) multiply_block(block, rows, nullptr, band_taps, 0, panel, sums);
        }
    }

    void point_into(const float* band, const float** rows, int64_t height) const {
        const int64_t row = band_width * channels;
        for (int64_t y = 0; y < height; y++)
            for (int64_t w = 0; w < c.out.shape[4]; w++)
                for (int64_t kz = 0; kz < c.kernel[0]; kz++)
                    for (int64_t ky = 0; ky < c.kernel[1]; ky++)
                        for (int64_t kx = 0; kx < (fused ? 1 : c.kernel[2]); kx++)
                            *rows++ = band + (kz * input_rows + y * c.stride[1] + ky * c.dilation[1]) * row +
                                      (w * c.stride[2] + kx * c.dilation[2]) * channels;
    }

    void copy_band(int64_t n, int64_t z, int64_t y, int64_t height, float* band) const {
        const int64_t row = band_width * channels, left = c.before[2], have = c.x.shape[4];
        const int64_t stop = std::clamp<int64_t>(have + left, 0, band_width), start = std::clamp<int64_t>(left, 0, stop);
        for (int64_t kz = 0; kz < c.kernel[0]; kz++)
            for (int64_t i = 0; i < height; i++) {
                float* to = band + (kz * input_rows + i) * row;
                const int64_t iz = z * c.stride[0] - c.before[0] + kz * c.dilation[0], iy = y * c.stride[1] - c.before[1] + i;
                if (iz < 0 || iz >= c.x.shape[2] || iy < 0 || iy >= c.x.shape[3]) {
                    std::fill(to, to + row, 0.0f);
                    continue;
                }
                const float* from = c.x.as<const float>() + n * c.x.strides[0] + iz * c.x.strides[2] + iy * c.x.strides[3];
                const int64_t pixel = c.x.strides[4], plane = c.x.strides[1];
                std::fill(to, to + start * channels, 0.0f);
                std::fill(to + stop * channels, to + row, 0.0f);
                from += (start - left) * pixel;
                to += start * channels;
                if (channels == 3)
                    for (int64_t w = 0; w < stop - start; w++)
                        for (int ch = 0; ch < 3; ch++) to[w * 3 + ch] = from[w * pixel + ch * plane];
                else
                    for (int64_t w = 0; w < stop - start; w++)
                        for (int64_t ch = 0; ch < channels; ch++) to[w * channels + ch] = from[w * pixel + ch * plane];
            }
    }

    const Convolution c;
    const BoundEpilogue epilogue;
    int64_t channels, N, vecs, panels, taps, K;  // per group; N: output channels, K: taps * channels
    int64_t ldc, ld_residual, lda = 0;
    bool is_direct = false, bands = false, fused = false, by_panels = false;
    bool from_afar = false;  // weights are prefetched a part ahead
    int64_t sets = 1, set_panels = 1;  // sets of panels per group, panels per set; a work unit is one block and one set
    std::vector<Block> blocks;
    std::vector<Part> parts;
    std::vector<const float*> pointers;  // [pixels of an image][taps]
    std::vector<float> zeros;
    int most_rows = 0;
    int64_t sums_nbytes = 0;
    int64_t band_taps = 0, band_width = 0, band_rows = 0, bands_per_slice = 0, input_rows = 0;
    int64_t band_nbytes = 0, pointers_nbytes = 0;
};

}  // namespace nimble
