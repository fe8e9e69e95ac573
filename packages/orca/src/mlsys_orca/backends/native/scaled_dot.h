// Sums of products of bytes that are scaled by small whole numbers, all in int32: exact, as those of <mlsys/dot.h>.
#pragma once

#include <mlsys/dot.h>

#include "vec.h"

namespace orca {

inline vi load_ints(const int8_t* from) {
#if MLSYS_LANES == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return __builtin_convertvector(load_as<vb>(from), vi);
#endif
}

// sum + both products of int16 in each lane.
inline vi add_int16_dot(vi sum, vi a, vi b) {
#if MLSYS_DOT_VNNI && MLSYS_LANES == 16
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif MLSYS_DOT_VNNI
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif MLSYS_DOT_PAIRS
    return sum + mlsys::multiply_int16(a, b);
#else
    return sum + ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Pack two int16 into each lane.
inline vi as_pairs(vi low, vi high) { return (low & splat_int(0xffff)) | (vi)((vu)high << 16); }

// Unsigned bytes of BITS bits, whose sums over a few steps are added to a total times a small whole number, -128 to 127.
template <int BITS>
struct ScaledDot {
#if MLSYS_DOT_PAIRS
    static constexpr int STEPS = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;  // most steps whose sum fits int16
    static vi factors(vi small) { return as_pairs(small, small); }
    static vi add_scaled(vi total, vi sum, vi factor) { return total + mlsys::multiply_int16(sum, factor); }
#else
    static constexpr int STEPS = 8;
    static vi factors(vi small) { return small; }
    static vi add_scaled(vi total, vi sum, vi factor) { return total + sum * factor; }
#endif
    static vi add(vi sum, vi u, vi x) { return mlsys::NibbleDot::add(sum, u, {x}); }
};

}  // namespace orca
