// Depthwise convolution of uint8 values. Four rows of a window are interleaved, so that four taps of a channel are adjacent
// and multiplied by one instruction; a tile of pixels of one row shares the interleaved columns.
#pragma once

#include <algorithm>
#include <vector>

#include <mlsys/gemm.h>

#include "integers.h"

namespace nimble {

// Of the IntegerConvolution's fields `groups` is the number of channels. Weights: [blocks][rows / 4][columns][4][DOT_WORDS]
// [LANES]; scales, bias and sums: [blocks][4][LANES]. A block has 4 * LANES channels, in the order of `Quads`.
constexpr int BLOCK_CHANNELS = 4 * LANES;
constexpr int DEPTHWISE_PIXELS = 4;

// Bytes of four rows, four of each channel together. Vector i, lane 4 L + j is channel 16 L + 4 i + j.
struct Quads {
    vi parts[4];

    Quads(const uint8_t* const (&rows)[4], int64_t count) {
#if MLSYS_LANES == 16 && defined(__AVX512BW__)
        const __mmask64 mask = count >= 64 ? ~0ull : (1ull << count) - 1;
        __m512i r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm512_maskz_loadu_epi8(mask, rows[i]);
        const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
        const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
        parts[0] = (vi)_mm512_unpacklo_epi16(a, c), parts[1] = (vi)_mm512_unpackhi_epi16(a, c);
        parts[2] = (vi)_mm512_unpacklo_epi16(b, d), parts[3] = (vi)_mm512_unpackhi_epi16(b, d);
#elif MLSYS_LANES == 8 && defined(__AVX2__)
        __m256i r[4];
        for (int i = 0; i < 4; i++) {
            alignas(32) uint8_t kept[32] = {};
            if (count < 32) std::memcpy(kept, rows[i], count);
            r[i] = _mm256_loadu_si256((const __m256i*)(count < 32 ? kept : rows[i]));
        }
        const __m256i a = _mm256_unpacklo_epi8(r[0], r[1]), b = _mm256_unpackhi_epi8(r[0], r[1]);
        const __m256i c = _mm256_unpacklo_epi8(r[2], r[3]), d = _mm256_unpackhi_epi8(r[2], r[3]);
        parts[0] = (vi)_mm256_unpacklo_epi16(a, c), parts[1] = (vi)_mm256_unpackhi_epi16(a, c);
        parts[2] = (vi)_mm256_unpacklo_epi16(b, d), parts[3] = (vi)_mm256_unpackhi_epi16(b, d);
#else
        uint8_t bytes[4][LANES][4] = {};
        for (int64_t ch = 0; ch < std::min<int64_t>(count, BLOCK_CHANNELS); ch++)
            for (int row = 0; row < 4; row++) bytes[ch / 4 % 4][ch / 16 * 4 + ch % 4][row] = rows[row][ch];
        std::memcpy(parts, bytes, sizeof bytes);
#endif
    }
};

// Store the uint8 results of a block's channels, whose vectors are in the order of `Quads`.
inline void store_quads(uint8_t* to, vq bytes, int64_t count) {
#if MLSYS_LANES == 16 && defined(__AVX512BW__)
    _mm512_mask_storeu_epi8(to, count >= 64 ? ~0ull : (1ull << count) - 1, (__m512i)bytes);
#else
    if (count >= BLOCK_CHANNELS) std::memcpy(to, &bytes, BLOCK_CHANNELS);
    else std::memcpy(to, &bytes, count);
#endif
}

class IntegerDepthwiseKernel : public Kernel {
  public:
    explicit IntegerDepthwiseKernel(const IntegerConvolution& d) : d(d), finish(d.codes, d.epilogue) {
        channels = d.x.shape[1];
        blocks = (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
        quads = (d.kernel[1] + 3) / 4;
        reach = (DEPTHWISE_PIXELS - 1) * d.stride[2] + (d.kernel[2] - 1) * d.dilation[2] + 1;
        units = d.out.shape[0] * d.out.shape[3];
        const int s = d.stride[2];
        const bool is_quad = quads == 1 && d.dilation[2] == 1 && s <= 2;
        inner = nullptr;
        switch (d.dilation[2] == 1 && s <= 2 ? d.kernel[2] : 0) {
            case 3:
                tile = s == 1 ? &run_tile<3, 1, false> : &run_tile<3, 2, false>;
                if (is_quad) inner = s == 1 ? &run_tile<3, 1, true> : &run_tile<3, 2, true>;
                break;
            case 5: tile = s == 1 ? &run_tile<5, 1, false> : &run_tile<5, 2, false>; break;
            default: tile = &run_tile<0, 0, false>;
        }
        pointers_nbytes = (4 * quads * reach * sizeof(uint8_t*) + 63) / 64 * 64;
        scratch_nbytes = pointers_nbytes + channels;
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        const uint8_t** pointers = (const uint8_t**)scratch;
        uint8_t* border = (uint8_t*)scratch + pointers_nbytes;  // a pixel of zero points
        const float* parameters = d.parameters.rank ? d.parameters.as<const float>() : nullptr;
        const int32_t zero_point = parameters ? (int32_t)parameters[1] : d.zero_point;
        std::memset(border, zero_point, channels);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t n = unit / d.out.shape[3], y = unit % d.out.shape[3];
            const uint8_t* image = d.x.as<const uint8_t>() + n * d.x.strides[0];
            const int64_t top = y * d.stride[1] - d.before[1];
            const auto line = [&](int64_t ky) -> const uint8_t* {  // null: zero points alone
                const int64_t row = top + ky * d.dilation[1];
                return ky < d.kernel[1] && row >= 0 && row < d.x.shape[3] ? image + row * d.x.strides[3] : nullptr;
            };
            for (int64_t pixel = 0; pixel < d.out.shape[4]; pixel += DEPTHWISE_PIXELS) {
                const int64_t left = pixel * d.stride[2] - d.before[2];
                const bool is_inner = inner && left >= 0 && left + reach <= d.x.shape[4];
                int64_t steps[4] = {};
                if (is_inner) {
                    for (int ky = 0; ky < 4; ky++) {
                        const uint8_t* from = line(ky);
                        pointers[ky] = from ? from + left * d.x.strides[4] : border;
                        steps[ky] = from ? d.x.strides[4] : 0;
                    }
                } else {
                    for (int64_t ky = 0; ky < 4 * quads; ky++)
                        for (int64_t j = 0; j < reach; j++) {
                            const uint8_t* from = left + j >= 0 && left + j < d.x.shape[4] ? line(ky) : nullptr;
                            pointers[(ky / 4 * reach + j) * 4 + ky % 4] = from ? from + (left + j) * d.x.strides[4] : border;
                        }
                }
                const int64_t out = n * d.out.strides[0] + y * d.out.strides[3] + pixel * d.out.strides[4];
                const int64_t residual = n * d.residual.strides[0] + y * d.residual.strides[3] + pixel * d.residual.strides[4];
                const Target target{
                    d.out.as<char>() + out * finish.out_size(),
                    finish.has_residual() ? d.residual.as<const char>() + residual * finish.residual_size() : nullptr,
                    (int)std::min<int64_t>(DEPTHWISE_PIXELS, d.out.shape[4] - pixel), zero_point, parameters ? parameters[0] : 1.0f,
                    {steps[0], steps[1], steps[2], steps[3]}};
                (is_inner ? inner : tile)(*this, pointers, target);
            }
        }
    }

  private:
    struct Target {
        char* out;
        const char* residual;
        int pixels;
        int32_t zero_point;
        float scale;
        int64_t steps[4];  // from column to column of each line, of an inner tile
    };

    using Tile = void (*)(const IntegerDepthwiseKernel&, const uint8_t* const*, const Target&);

    // KW and SW: width of the window and stride; 0: whatever they are. IS_INNER: there is one quad of lines, and pointers of its
    // first column alone; no column is outside x.
    template <int KW, int SW, bool IS_INNER>
    static void run_tile(const IntegerDepthwiseKernel& k, const uint8_t* const* pointers, const Target& target) {
        constexpr int REACH = KW ? (DEPTHWISE_PIXELS - 1) * SW + KW : 1;
        const IntegerConvolution& d = k.d;
        const int width = d.kernel[2];
        for (int64_t block = 0; block < k.blocks; block++) {
            const int64_t first = block * BLOCK_CHANNELS, count = std::min<int64_t>(k.channels - first, BLOCK_CHANNELS);
            vi sums[DEPTHWISE_PIXELS][4];
            for (int i = 0; i < 4; i++) {
                const vi begun = load_as<vi>(d.sums + first + i * LANES) * splat_int(ByteDot::SUBTRACTED - target.zero_point);
                for (auto& sum : sums) sum[i] = begun;
            }
            const int32_t* weights = d.weights + first * k.quads * width * DOT_WORDS;
            const auto add = [&](int p, const Quads& x, int64_t kx) MLSYS_INLINE {
                for (int i = 0; i < 4; i++) {
                    vi w[DOT_WORDS];
                    for (int word = 0; word < DOT_WORDS; word++)
                        w[word] = load_as<vi>(weights + ((kx * 4 + i) * DOT_WORDS + word) * LANES);
                    sums[p][i] = ByteDot::add(sums[p][i], ByteDot::weights(x.parts[i]), w);
                }
            };
            for (int64_t quad = 0; quad < k.quads; quad++, weights += width * BLOCK_CHANNELS * DOT_WORDS) {
                const auto column = [&](int64_t j) MLSYS_INLINE {
                    if constexpr (IS_INNER) {
                        const auto at = [&](int i) MLSYS_INLINE { return pointers[i] + first + j * target.steps[i]; };
                        const uint8_t* const rows[4] = {at(0), at(1), at(2), at(3)};
                        return Quads(rows, count);
                    }
                    const uint8_t* const* from = pointers + (quad * k.reach + j) * 4;
                    const uint8_t* const rows[4] = {from[0] + first, from[1] + first, from[2] + first, from[3] + first};
                    return Quads(rows, count);
                };
                if constexpr (KW != 0) {
                    unroll<REACH>([&](auto j) MLSYS_INLINE {
                        const Quads x = column(j);
                        unroll<DEPTHWISE_PIXELS>([&](auto p) MLSYS_INLINE {
                            constexpr int kx = decltype(j)::value - decltype(p)::value * SW;
                            if constexpr (kx >= 0 && kx < KW) add(p, x, kx);
                        });
                    });
                } else {
                    for (int p = 0; p < DEPTHWISE_PIXELS; p++)
                        for (int kx = 0; kx < width; kx++) add(p, column(p * d.stride[2] + kx * d.dilation[2]), kx);
                }
            }
            k.store_block(sums, first, count, target);
        }
    }

    void store_block(const vi (&sums)[DEPTHWISE_PIXELS][4], int64_t first, int64_t count, const Target& target) const {
        const bool is_packed = finish.is_in_steps() && !target.residual;
        vf scales[4], bias[4];
        for (int i = 0; i < 4; i++) {
            scales[i] = load(d.scales + first + i * LANES) * splat(target.scale);
            bias[i] = load(d.bias + first + i * LANES);
        }
        for (int p = 0; p < target.pixels; p++) {
            vf y[4];
            for (int i = 0; i < 4; i++) y[i] = fma(__builtin_convertvector(sums[p][i], vf), scales[i], bias[i]);
            char* out = target.out + (p * d.out.strides[4] + first) * finish.out_size();
            if (is_packed) {
                vi steps[4];
                for (int i = 0; i < 4; i++) steps[i] = finish.rounding.in_steps(y[i]);
                store_quads((uint8_t*)out, finish.rounding.merge(steps), count);
                continue;
            }
            alignas(64) float row[BLOCK_CHANNELS];
            for (int ch = 0; ch < BLOCK_CHANNELS; ch++) row[ch] = y[ch / 4 % 4][ch / 16 * 4 + ch % 4];
            const char* residual = target.residual;
            if (residual) residual += (p * d.residual.strides[4] + first) * finish.residual_size();
            finish.store_row(row, count, residual, out);
        }
    }

    const IntegerConvolution d;
    const Finish finish;
    int64_t channels, blocks, quads, reach, pointers_nbytes;
    Tile tile, inner;  // inner: null if there is none
};

}  // namespace nimble
