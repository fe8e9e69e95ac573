// Products of rows and a weight in int8, with a scale for each group of 32 features on both sides.
//
// An element is its bias, then one fp32 sum over the groups from first to last: += (sum of code * code) * (scale * scale),
// fused. Integer sums are exact, so a row has the same bits in any batch, on every instruction set.
#pragma once

#include <mlsys/dot.h>

#include <cmath>
#include <vector>

#include "matrix.h"

namespace encoder {

constexpr int GROUP = 32, QUAD = 4;  // features that share a scale; neighbours whose bytes share a lane
constexpr int CODED_MR = LANES == 16 ? 4 : 2;  // rows whose int32 and float32 sums fit the registers beside the weights
constexpr int GROUP_WORDS = GROUP / QUAD * ByteDot::WORDS;

// Rows of one block, quantised.
struct CodedRows {
    std::vector<int32_t> codes;  // [rows][K / GROUP][GROUP_WORDS], as the product takes them
    std::vector<float> scales;   // [rows][K / GROUP]
    std::vector<int32_t> firsts; // [rows][K / GROUP]: correction for the 128 that is added to the weight's int8 values
};

// Quantise a block of rows: the largest magnitude of a group becomes 127; round to nearest, ties to even. A group with an
// infinity or a NaN gives NaN; a group whose numbers are all below 1e-30 counts as zero.
inline void quantise(const float* a, int64_t lda, int M, int64_t K, CodedRows& rows) {
    const int64_t groups = K / GROUP;
    rows.codes.resize(M * groups * GROUP_WORDS);
    rows.scales.resize(M * groups);
    rows.firsts.resize(M * groups);
    for (int row = 0; row < M; row++)
        for (int64_t g = 0; g < groups; g++) {
            const float* from = a + row * lda + g * GROUP;
            vf most{}, strange{};
            for (int i = 0; i < GROUP; i += LANES) {
                const vf values = load(from + i);
                most = larger(most, mlsys::abs(values));
                strange += values - values;
            }
            const float top = largest(most);
            const bool is_finite = sum(strange) == 0.0f, is_some = is_finite && top >= 1e-30f;
            const vf factor = splat(is_some ? 127.0f / top : 0.0f);
            vi total{};
            int32_t* to = rows.codes.data() + (row * groups + g) * GROUP_WORDS;
            for (int i = 0; i < GROUP; i += LANES) {
                vi codes{};
                if (is_some) codes = (vi)(load(from + i) * factor + splat(0x1.8p23f)) - splat_int(0x4b400000);
                total += codes;
                ByteDot::store_codes(to, i, codes);
            }
            int32_t count = 0;
            for (int i = 0; i < LANES; i++) count += total[i];
            rows.scales[row * groups + g] = is_finite ? (is_some ? top / 127.0f : 0.0f) : NAN;
            rows.firsts[row * groups + g] = -count * (128 - ByteDot::SUBTRACTED);
        }
}

// sums [MR][NR] += rows times the panel.
template <int MR>
inline void multiply_coded(const CodedRows& rows, int row, int64_t groups, const uint8_t* codes, const float* scales, float* sums) {
    vf acc[MR * VECS];
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { acc[i] = load(sums + i * LANES); });
    for (int64_t g = 0; g < groups; g++) {
        vi whole[MR * VECS];
        unroll<MR * VECS>([&](auto i) MLSYS_INLINE {
            whole[i] = ByteDot::begin(rows.firsts[(row + i / VECS) * groups + g]);
        });
        const int32_t* a = rows.codes.data() + (row * groups + g) * GROUP_WORDS;
        for (int q = 0; q < GROUP / QUAD; q++, codes += NR * QUAD) {
            ByteDot::Weights weights[VECS];
            unroll<VECS>([&](auto v) MLSYS_INLINE { weights[v] = ByteDot::weights(load_as<vi>(codes + v * LANES * QUAD)); });
            unroll<MR>([&](auto r) MLSYS_INLINE {
                vi x[ByteDot::WORDS];
                for (int w = 0; w < ByteDot::WORDS; w++)
                    x[w] = splat_int(a[r * groups * GROUP_WORDS + q * ByteDot::WORDS + w]);
                unroll<VECS>([&](auto v) MLSYS_INLINE {
                    constexpr int at = decltype(r)::value * VECS + decltype(v)::value;
                    whole[at] = ByteDot::add(whole[at], weights[v], x);
                });
            });
        }
        unroll<MR>([&](auto r) MLSYS_INLINE {
            const vf scale = splat(rows.scales[(row + r) * groups + g]);
            unroll<VECS>([&](auto v) MLSYS_INLINE {
                constexpr int at = decltype(r)::value * VECS + decltype(v)::value;
                const vf product = __builtin_convertvector(
                    ByteDot::total(whole[at], rows.firsts[(row + r) * groups + g]), vf);
                acc[at] = fma(product, load(scales + g * NR + v * LANES) * scale, acc[at]);
            });
        });
    }
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE { store(sums + i * LANES, acc[i]); });
}

// As `multiply_coded`, for `mr` rows, 1 to MR.
template <int MR = CODED_MR>
inline void multiply_coded_rows(
    int mr, const CodedRows& rows, int row, int64_t groups, const uint8_t* codes, const float* scales, float* sums) {
    if constexpr (MR > 0) {
        if (mr == MR) return multiply_coded<MR>(rows, row, groups, codes, scales, sums);
        multiply_coded_rows<MR - 1>(mr, rows, row, groups, codes, scales, sums);
    }
}

}  // namespace encoder
