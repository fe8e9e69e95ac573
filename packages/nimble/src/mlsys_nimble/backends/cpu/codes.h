// Quantised uint8 values, which stand for (value - zero point) * scale; and the epilogue of a sum of their products: bias,
// residual and activation in float32, then quantisation to uint8.
#pragma once

#include <mlsys/dot.h>
#include <mlsys/gemm.h>

#include "epilogue.h"

namespace nimble {

// Quantisation parameters of a residual and of a result.
struct Codes {
    float residual_scale;  // 0: the residual is float32
    int32_t residual_zero_point;
    int32_t makes_codes;   // 1: the result is uint8; 0: float32
    float inverse;         // 1 / the result's scale; 1 where the sums' scales and biases include it
    int32_t zero_point, least, most;
};
MLSYS_STRUCT(Codes, residual_scale, residual_zero_point, makes_codes, inverse, zero_point, least, most);

inline vf load_codes(const uint8_t* from) { return __builtin_convertvector((vi)load_bytes(from), vf); }

inline vi nearest(vf x) {  // halves to even; |x| < 2^31
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32(x);
#elif MLSYS_LANES == 8 && defined(__AVX__)
    return (vi)_mm256_cvtps_epi32(x);
#else
    return __builtin_convertvector(round(x), vi);
#endif
}

// Store each lane as uint8; the values are 0 to 255.
inline void store_bytes(uint8_t* to, vi codes) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
#else
    typedef uint8_t vq __attribute__((vector_size(LANES), may_alias));
    const vq bytes = __builtin_convertvector(codes, vq);
    std::memcpy(to, &bytes, sizeof bytes);
#endif
}

typedef uint8_t vq __attribute__((vector_size(4 * LANES), may_alias));

#if MLSYS_LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool HAS_MASKS = true;
#else
constexpr bool HAS_MASKS = false;
#endif

// Load `count` uint8 values, at most one vector, as floats; the other lanes are zero. Without masked loads all lanes are read.
inline vf load_codes(const uint8_t* from, int count) {
#if MLSYS_LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), from)));
#else
    return load_codes(from);
#endif
}

// Split `bytes` into PARTS equal parts and store the first `count` bytes of part PART.
template <int PART, int PARTS>
inline void store_part(uint8_t* to, vq bytes, int count) {
    constexpr int NBYTES = 4 * LANES / PARTS;
#if MLSYS_LANES == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (PARTS == 2) {
        const __m256i part = _mm512_extracti64x4_epi64((__m512i)bytes, PART);
        if (count == NBYTES) _mm256_storeu_si256((__m256i*)to, part);
        else _mm256_mask_storeu_epi8(to, (__mmask32)((1u << count) - 1), part);
    } else {
        const __m128i part = _mm512_extracti32x4_epi32((__m512i)bytes, PART);
        if (count == NBYTES) _mm_storeu_si128((__m128i*)to, part);
        else _mm_mask_storeu_epi8(to, (__mmask16)((1u << count) - 1), part);
    }
#else
    alignas(64) uint8_t kept[4 * LANES];
    std::memcpy(kept, &bytes, sizeof kept);
    if (count == NBYTES) std::memcpy(to, kept + PART * NBYTES, NBYTES);
    else std::memcpy(to, kept + PART * NBYTES, count);
#endif
}

// Quantisation of floats to uint8.
struct Rounding {
    float inverse, low, high;  // low, high: range of uint8 values minus the zero point
    int32_t zero_point, least;

    explicit Rounding(const Codes& c)
        : inverse(c.inverse), low((float)(c.least - c.zero_point)), high((float)(c.most - c.zero_point)),
          zero_point(c.zero_point), least(c.least) {}

    vi operator()(vf x) const {
        return nearest(smaller(splat(high), larger(splat(low), x * splat(inverse)))) + splat_int(zero_point);
    }

#if (MLSYS_LANES == 16 && defined(__AVX512BW__)) || (MLSYS_LANES == 8 && defined(__AVX2__))
    // Input of `merge` and `pack`: rounded, clamped from above, without the zero point. They add it and clamp from
    // below.
    vi in_steps(vf x) const { return nearest(smaller(splat(high), x)); }
#if MLSYS_LANES == 16
#define MLSYS_WIDE(name) _mm512_##name
    typedef __m512i Wide;
#else
#define MLSYS_WIDE(name) _mm256_##name
    typedef __m256i Wide;
#endif
    // uint8 values in the order of the pack instructions: each 16 bytes hold four values of every vector.
    vq merge(const vi (&steps)[4]) const {
        const Wide zero = MLSYS_WIDE(set1_epi16)((short)zero_point);
        const Wide a = MLSYS_WIDE(adds_epi16)(MLSYS_WIDE(packs_epi32)((Wide)steps[0], (Wide)steps[1]), zero);
        const Wide b = MLSYS_WIDE(adds_epi16)(MLSYS_WIDE(packs_epi32)((Wide)steps[2], (Wide)steps[3]), zero);
        return (vq)MLSYS_WIDE(max_epu8)(MLSYS_WIDE(packus_epi16)(a, b), MLSYS_WIDE(set1_epi8)((char)least));
    }
    // uint8 values in order: all of the first vector, then of the next.
    vq pack(const vi (&steps)[4]) const {
        const Wide bytes = (Wide)merge(steps);
#if MLSYS_LANES == 16
        const Wide order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return (vq)_mm512_permutexvar_epi32(order, bytes);
#else
        return (vq)_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
    }
#undef MLSYS_WIDE
#else
    vi in_steps(vf x) const { return nearest(smaller(splat(high), larger(splat(low), x))); }
    vq merge(const vi (&steps)[4]) const {
        vq bytes;
        for (int i = 0; i < 4 * LANES; i++) bytes[i] = (uint8_t)(steps[i / 4 % 4][i / 16 * 4 + i % 4] + zero_point);
        return bytes;
    }
    vq pack(const vi (&steps)[4]) const {
        vq bytes;
        for (int i = 0; i < 4 * LANES; i++) bytes[i] = (uint8_t)(steps[i / LANES][i % LANES] + zero_point);
        return bytes;
    }
#endif
};

// Epilogue of float32 sums, their quantisation and the store.
class Finish {
  public:
    Finish(const Codes& codes, const Epilogue& e)
        : codes(codes), epilogue(e), rounding(codes), makes_codes(codes.makes_codes), adds_codes(codes.residual_scale != 0) {}

    bool has_residual() const { return epilogue.has_residual; }
    int64_t residual_size() const { return adds_codes ? 1 : 4; }
    int64_t out_size() const { return makes_codes ? 1 : 4; }
    // Return whether the epilogue is at most a residual and a clamp.
    bool is_plain() const { return epilogue.is_plain; }
    // Return whether the sums are in units of the result's scale and are only clamped.
    bool is_in_steps() const { return epilogue.is_plain && makes_codes && rounding.inverse == 1; }

    template <bool MAKES_CODES>
    void store_plain(char* out, vf y) const {
        if constexpr (MAKES_CODES) store_bytes((uint8_t*)out, rounding(y));
        else store((float*)out, epilogue.clamp(y));
    }

    vf residual(const char* from) const {
        if (!adds_codes) return load((const float*)from);
        return (load_codes((const uint8_t*)from) - splat((float)codes.residual_zero_point)) * splat(codes.residual_scale);
    }

    // Call f(load) with the load of the residual's dtype. load(from, i, count) gives elements i to i + count - 1;
    // without masked loads, a whole vector.
    template <class F>
    inline __attribute__((always_inline)) void with_residual(F&& f) const {
        const vf zero = splat((float)codes.residual_zero_point), scale = splat(codes.residual_scale);
        if (adds_codes) f([=](const char* from, int i, int count) MLSYS_INLINE {
            return (load_codes((const uint8_t*)from + i, count) - zero) * scale;
        });
        else f([](const char* from, int i, int count) MLSYS_INLINE {
            const float* at = (const float*)from + i;
            return HAS_MASKS ? load_first(at, count) : load(at);
        });
    }

    // Apply residual and activation in place to rows of N sums, `width` floats apart. The store applies the last clamp.
    void apply(float* y, int rows, int width, int N, const char* from, int64_t step) const {
        const auto add_all = [&] {
            for (int row = 0; row < rows; row++) add(y + row * width, N, from + row * step);
        };
        if (from && !epilogue.activates_first) add_all();
        if (epilogue.activation) activate_all(y, rows * width / LANES, epilogue.activation, epilogue.slope);
        if (from && epilogue.activates_first) add_all();
    }

    // Apply the epilogue to a row of N sums and store it as uint8 or float32. `y` is padded to whole vectors and is
    // overwritten.
    void store_row(float* y, int64_t N, const char* residual, char* out) const {
        apply(y, 1, (N + LANES - 1) / LANES * LANES, N, residual, 0);
        for (int64_t i = 0; i < N; i += LANES) {
            const int64_t some = std::min<int64_t>(N - i, LANES);
            alignas(64) char kept[4 * LANES];
            char* to = some == LANES ? out + i * out_size() : kept;
            if (makes_codes) store_plain<true>(to, load(y + i));
            else store_plain<false>(to, load(y + i));
            if (some < LANES) std::memcpy(out + i * out_size(), kept, some * out_size());
        }
    }

    const Codes codes;
    const BoundEpilogue epilogue;
    const Rounding rounding;
    const bool makes_codes, adds_codes;

  private:
    void add(float* y, int64_t N, const char* from) const {
        for (int64_t i = 0; i < N; i += LANES) {
            const int64_t some = std::min<int64_t>(N - i, LANES);
            alignas(64) char kept[4 * LANES] = {};
            if (some < LANES) std::memcpy(kept, from + i * residual_size(), some * residual_size());
            store(y + i, load(y + i) + residual(some < LANES ? kept : from + i * residual_size()));
        }
    }
};

}  // namespace nimble
