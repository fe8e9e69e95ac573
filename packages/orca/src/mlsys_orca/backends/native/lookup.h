// Rows of a quantised embedding, dequantised.
#pragma once

#include <mlsys/layout.h>

#include <cstdint>
#include <cstring>

namespace orca {

// As QuantizedMatrix has it, row by row.
struct Codes {
    const void* codes;    // 8 bits: int8 [K] a row; 4 bits: [K / 2], byte j has 2j in its low half, 2j + 1 above
    const void* scales;   // [K / group_size] a row, fp16 or fp32; with factors int8
    const void* offsets;  // as scales; null: 0
    const void* factors;  // fp16 [K / block_size] a row, of scales; null: these are floating
    const void* offset_factors;  // likewise, of offsets
    int64_t rows;
    int32_t K, group_size, block_size;
    int32_t bits;
    int32_t has_halves;  // scales and offsets are fp16
};
MLSYS_STRUCT(
    Codes, codes, scales, offsets, factors, offset_factors, rows, K, group_size, block_size, bits, has_halves);

inline float from_half(uint16_t half) {  // of a finite number
    uint32_t size = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    std::memcpy(&value, &size, sizeof value);
    value *= 0x1p112f;  // the exponents' biases differ by 112; subnormals too
    return sign ? -value : value;
}

inline void look_up(const Codes& m, int64_t row, float* out) {
    const int64_t groups = m.K / m.group_size;
    const auto shared = [&](const void* from, const void* factors, int64_t g) {
        if (factors) {
            const int64_t block = (row * m.K + g * m.group_size) / m.block_size;
            return from_half(((const uint16_t*)factors)[block]) * (float)((const int8_t*)from)[row * groups + g];
        }
        return m.has_halves ? from_half(((const uint16_t*)from)[row * groups + g]) : ((const float*)from)[row * groups + g];
    };
    for (int64_t g = 0; g < groups; g++) {
        const float scale = shared(m.scales, m.factors, g);
        const float offset = m.offsets ? shared(m.offsets, m.offset_factors, g) : 0.0f;
        const int64_t first = row * m.K + g * m.group_size;
        float* to = out + g * m.group_size;
        if (m.bits == 8) {
            const int8_t* codes = (const int8_t*)m.codes + first;
            for (int i = 0; i < m.group_size; i++) to[i] = scale * codes[i] + offset;
        } else {
            const uint8_t* codes = (const uint8_t*)m.codes + first / 2;
            for (int i = 0; i < m.group_size / 2; i++) {
                to[2 * i] = scale * (codes[i] & 15) + offset;
                to[2 * i + 1] = scale * (codes[i] >> 4) + offset;
            }
        }
    }
}

}  // namespace orca
