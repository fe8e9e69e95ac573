// SIMD vectors of this machine's width: one float type, and its loads and stores in the formats of weights and caches.
// GCC's and Clang's vector extensions, with intrinsics for the fused product and some conversions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#ifndef MLSYS_LANES  // tests may set another width than the machine's
#if defined(__AVX512F__)
#define MLSYS_LANES 16
#else
#define MLSYS_LANES 8
#endif
#endif

namespace mlsys {

constexpr int LANES = MLSYS_LANES;

typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), may_alias));

inline vf splat(float x) { return x - vf{}; }
inline vi splat_int(int32_t x) { return x - vi{}; }

// a * b + c, rounded once: the order and rounding of every sum is written down, whatever the compiler would prefer.
inline vf fma(vf a, vf b, vf c) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif MLSYS_LANES == 8 && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#endif
}

template <class V, class T>
inline V load_as(const T* from) {
    V out;
    std::memcpy(&out, from, sizeof(V));
    return out;
}

inline vf load(const float* from) { return load_as<vf>(from); }
inline void store(float* to, vf x) { std::memcpy(to, &x, sizeof(vf)); }

// Keep `x` in a register: compilers would rather read it from memory again for each use. Only where a register of the
// target holds a whole vector; elsewhere (16 lanes without AVX-512, any without AVX) the constraint has no solution.
inline vf in_register(vf x) {
#if defined(__AVX512F__) || (defined(__AVX__) && MLSYS_LANES == 8)
    asm("" : "+v"(x));
#endif
    return x;
}

// bf16 is the upper half of a float.
typedef uint16_t vh __attribute__((vector_size(2 * LANES), may_alias));
inline vf load(const uint16_t* from) {
#if MLSYS_LANES == 8 && defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
    return (vf)(__builtin_convertvector(load_as<vh>(from), vu) << 16);
#endif
}

inline uint16_t to_bf16(float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store(uint16_t* to, vf x) {
#if MLSYS_LANES == 16 && defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu bits = (vu)x;
    vh out = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vh);
    std::memcpy(to, &out, sizeof(vh));
#endif
}
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(uint16_t* to, float x) { *to = to_bf16(x); }

// sum + the product of two bf16 pairs in each lane.
inline vf add_pairs(vf sum, vu a, vu b) {
#if MLSYS_LANES == 16 && defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else  // for tests: rounds twice where the instruction may round once
    sum = fma((vf)(a << 16), (vf)(b << 16), sum);
    return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
}

typedef int8_t vb __attribute__((vector_size(LANES), may_alias));
inline vf load(const int8_t* from) {
#if MLSYS_LANES == 8 && defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    return __builtin_convertvector(load_as<vb>(from), vf);
#endif
}

inline vu load_bytes(const uint8_t* from) {
#if MLSYS_LANES == 8 && defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    typedef uint8_t vq __attribute__((vector_size(LANES), may_alias));
    return __builtin_convertvector(load_as<vq>(from), vu);
#endif
}

inline vf load_halves(const uint16_t* from) {  // fp16
#if MLSYS_LANES == 8 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    vu half = __builtin_convertvector(load_as<vh>(from), vu);
    vu sign = (half & 0x8000) << 16;
    vf size = (vf)((half & 0x7fff) << 13) * splat(0x1p112f);  // the exponents' biases differ by 112; subnormals too
    return (vf)((vu)size | sign);
#endif
}

// a > b ? a : b and a < b ? a : b, in one instruction (compilers see constants and make two of it).
inline vf larger(vf a, vf b) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
inline vf smaller(vf a, vf b) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

inline float sum(vf x) {  // add halves pairwise: the same order for every caller
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

inline float largest(vf x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

// Whether any lane is `bound` or above.
inline bool any_from(vf x, float bound) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, splat(bound), _CMP_GE_OQ);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps(x, splat(bound), _CMP_GE_OQ));
#else
    for (int i = 0; i < LANES; i++)
        if (x[i] >= bound) return true;
    return false;
#endif
}

// Lanes first to stop - 1 of `x`, `other` elsewhere.
inline vf only(vf x, int first, int stop, float other) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vi inside = (lane >= splat_int(first)) & (lane < splat_int(stop));
    return inside ? x : splat(other);
}

}  // namespace mlsys
