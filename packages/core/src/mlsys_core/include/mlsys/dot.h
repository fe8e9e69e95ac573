// Sums of products of bytes in int32, four neighbours a lane: exact, so every machine and every order gives the same.
//
// One operand is unsigned (codes of weights), the other signed, -127 to 127 (rows). Two forms: `NibbleDot` for unsigned
// bytes up to 15, `ByteDot` for all. A row's four neighbours take WORDS words of memory, as `store_codes` writes them.
#pragma once

#include <mlsys/vec.h>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if (MLSYS_LANES == 16 && defined(__AVX512VNNI__)) || (MLSYS_LANES == 8 && defined(__AVXVNNI__))
#define MLSYS_DOT_VNNI 1
#elif (MLSYS_LANES == 16 && defined(__AVX512BW__)) || (MLSYS_LANES == 8 && defined(__AVX2__))
#define MLSYS_DOT_PAIRS 1
#endif

namespace mlsys {

#if MLSYS_DOT_VNNI
inline vi add_dot(vi sum, vi u, vi x) {
#if MLSYS_LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)x);
#endif
}
#elif MLSYS_DOT_PAIRS
#if MLSYS_LANES == 16
#define MLSYS_INT(name) _mm512_##name
typedef __m512i VectorOfInts;
#else
#define MLSYS_INT(name) _mm256_##name
typedef __m256i VectorOfInts;
#endif
inline vi add_int16(vi a, vi b) { return (vi)MLSYS_INT(add_epi16)((VectorOfInts)a, (VectorOfInts)b); }
// Products of unsigned by signed bytes, neighbours added in int16.
inline vi multiply_bytes(vi u, vi x) { return (vi)MLSYS_INT(maddubs_epi16)((VectorOfInts)u, (VectorOfInts)x); }
// Products of int16, neighbours added in int32.
inline vi multiply_int16(vi a, vi b) { return (vi)MLSYS_INT(madd_epi16)((VectorOfInts)a, (VectorOfInts)b); }
inline vi odd_unsigned_bytes(vi x) { return (vi)MLSYS_INT(srli_epi16)((VectorOfInts)x, 8); }
// Order within four neighbours: first, third, second, fourth.
#if MLSYS_LANES == 16
inline vi evens_first(vi x) { return (vi)_mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)0xd8); }
#else
inline vi evens_first(vi x) { return (vi)_mm256_shuffle_epi32((__m256i)x, 0xd8); }
#endif
#undef MLSYS_INT
#elif defined(__ARM_FEATURE_DOTPROD) && MLSYS_LANES == 8
inline vi add_signed_dot(vi sum, vi a, vi x) {
    int32x4_t sums[2];
    int8x16_t left[2], right[2];
    std::memcpy(sums, &sum, sizeof sum);
    std::memcpy(left, &a, sizeof a);
    std::memcpy(right, &x, sizeof x);
    for (int i = 0; i < 2; i++) sums[i] = vdotq_s32(sums[i], left[i], right[i]);
    std::memcpy(&sum, sums, sizeof sum);
    return sum;
}
#define MLSYS_DOT_SIGNED 1
#else
inline vi add_dot(vi sum, vi u, vi x) {
    for (int byte = 0; byte < 4; byte++)
        sum += (vi)(((vu)u >> (8 * byte)) & 255) * ((vi)((vu)x << (24 - 8 * byte)) >> 24);
    return sum;
}
#endif

// Write LANES codes of a row, as bytes, from code `at` on.
inline void store_codes_as_bytes(int32_t* row, int64_t at, vi codes) {
    const vb bytes = __builtin_convertvector(codes, vb);
    std::memcpy((int8_t*)row + at, &bytes, sizeof bytes);
}

// Unsigned bytes up to 15. At most 8 steps go into one sum, where that is kept in int16.
struct NibbleDot {
    using Weights = vi;
    static constexpr int WORDS = 1;
    static constexpr int SUBTRACTED = 0;  // from each unsigned byte
    static void store_codes(int32_t* row, int64_t at, vi codes) { store_codes_as_bytes(row, at, codes); }
    static Weights weights(vi u) { return u; }
    static vi add(vi sum, vi u, const vi (&x)[WORDS]) {
#if MLSYS_DOT_PAIRS
        return add_int16(sum, multiply_bytes(u, x[0]));
#elif MLSYS_DOT_SIGNED
        return add_signed_dot(sum, u, x[0]);
#else
        return add_dot(sum, u, x[0]);
#endif
    }
    // Sums begin with `first` and end as int32.
#if MLSYS_DOT_PAIRS
    static vi begin(int32_t) { return vi{}; }
    static vi total(vi sum, int32_t first) { return multiply_int16(sum, splat_int(0x10001)) + splat_int(first); }
#else
    static vi begin(int32_t first) { return splat_int(first); }
    static vi total(vi sum, int32_t) { return sum; }
#endif
};

// Unsigned bytes, 0 to 255.
struct ByteDot {
    static vi begin(int32_t first) { return splat_int(first); }
    static vi total(vi sum, int32_t) { return sum; }
#if MLSYS_DOT_PAIRS
    struct Weights {  // as int16: the sum of two products may exceed int16
        vi even, odd;
    };
    static constexpr int SUBTRACTED = 0, WORDS = 2;  // a row is kept as int16 too, so that no product widens it again
    static void store_codes(int32_t* row, int64_t at, vi codes) {
        const vh pairs = __builtin_convertvector((vu)evens_first(codes), vh);
        std::memcpy((int16_t*)row + at, &pairs, sizeof pairs);
    }
    static Weights weights(vi u) { return {u & 0x00ff00ff, odd_unsigned_bytes(u)}; }
    static vi add(vi sum, const Weights& u, const vi (&x)[WORDS]) {
        return sum + multiply_int16(u.even, x[0]) + multiply_int16(u.odd, x[1]);
    }
#else
    using Weights = vi;
    static constexpr int WORDS = 1;
    static void store_codes(int32_t* row, int64_t at, vi codes) { store_codes_as_bytes(row, at, codes); }
#if MLSYS_DOT_SIGNED
    static constexpr int SUBTRACTED = 128;
    static Weights weights(vi u) { return (vi)((vu)u ^ 0x80808080u); }
    static vi add(vi sum, vi u, const vi (&x)[WORDS]) { return add_signed_dot(sum, u, x[0]); }
#else
    static constexpr int SUBTRACTED = 0;
    static Weights weights(vi u) { return u; }
    static vi add(vi sum, vi u, const vi (&x)[WORDS]) { return add_dot(sum, u, x[0]); }
#endif
#endif
};

}  // namespace mlsys
