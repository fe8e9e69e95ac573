// fp16 as an element of the K/V cache.
#pragma once

#include "vec.h"

namespace orca {

using mlsys::load;
using mlsys::store;
using mlsys::store_one;

struct half {
    uint16_t bits;
};

inline vf load(const half* from) { return mlsys::load_halves((const uint16_t*)from); }

// To the nearest, ties to even; what is too large becomes the largest number that fp16 has. NaN stays one.
inline void store(half* to, vf x) {
    x = mlsys::clamped(x, -65504.0f, 65504.0f);
#if MLSYS_LANES == 8 && defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    const vu sign = (vu)x >> 16 & 0x8000, size = (vu)x & 0x7fffffffu;
    const vu normal = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112u << 10);  // the exponents' biases differ by 112
    const vu small = (vu)((vf)size + splat(0.5f)) - 0x3f000000u;  // in units of 2^-24, the last place of 0.5
    const vu finite = (vf)size < splat(0x1p-14f) ? small : normal;
    const mlsys::vh out = __builtin_convertvector(sign | (x != x ? vu{} + 0x7e00u : finite), mlsys::vh);
    std::memcpy(to, &out, sizeof out);
#endif
}
inline void store_one(half* to, float x) {
    half lanes[LANES];
    store(lanes, splat(x));
    *to = lanes[0];
}

}  // namespace orca
