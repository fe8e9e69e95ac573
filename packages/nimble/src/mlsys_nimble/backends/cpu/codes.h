// Whole numbers that stand for floats, (code - zero point) * scale, uint8; and what follows a sum of their products: bias,
// residual and activation in floats, then codes again.
#pragma once

#include <mlsys/dot.h>

#include "epilogue.h"

namespace nimble {

// Codes of a residual and of a result.
struct Codes {
    float residual_scale;  // 0: the residual is floats
    int32_t residual_zero_point;
    int32_t makes_codes;   // 0: the result is floats
    float inverse;         // 1 over the result's scale, if the sums' scales and biases are not multiplied by it already
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

// 0 to 255 in each lane.
inline void store_bytes(uint8_t* to, vi codes) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)codes));
#else
    typedef uint8_t vq __attribute__((vector_size(LANES), may_alias));
    const vq bytes = __builtin_convertvector(codes, vq);
    std::memcpy(to, &bytes, sizeof bytes);
#endif
}

// Floats to codes.
struct Rounding {
    float inverse, low, high;  // codes less the zero point
    int32_t zero_point;

    explicit Rounding(const Codes& c)
        : inverse(c.inverse), low((float)(c.least - c.zero_point)), high((float)(c.most - c.zero_point)), zero_point(c.zero_point) {}

    vi operator()(vf x) const {
        return nearest(smaller(splat(high), larger(splat(low), x * splat(inverse)))) + splat_int(zero_point);
    }
};

// What is done to sums in floats before they are stored.
class Finish {
  public:
    Finish(const Codes& codes, const Epilogue& e)
        : codes(codes), epilogue(e), rounding(codes), makes_codes(codes.makes_codes), adds_codes(codes.residual_scale != 0) {}

    bool has_residual() const { return epilogue.has_residual; }
    int64_t residual_size() const { return adds_codes ? 1 : 4; }
    int64_t out_size() const { return makes_codes ? 1 : 4; }
    // Whether it is a clamp alone, which `store_plain` does.
    bool is_plain() const { return epilogue.is_plain; }

    template <bool MAKES_CODES>
    void store_plain(char* out, vf y) const {
        if constexpr (MAKES_CODES) store_bytes((uint8_t*)out, rounding(y));
        else store((float*)out, epilogue.clamp(y));
    }

    vf residual(const char* from) const {
        if (!adds_codes) return load((const float*)from);
        return (load_codes((const uint8_t*)from) - splat((float)codes.residual_zero_point)) * splat(codes.residual_scale);
    }

    // A row of N sums, stored in whatever form; `y` has whole vectors and is lost.
    void store_row(float* y, int64_t N, const char* residual, char* out) const {
        const int64_t vecs = (N + LANES - 1) / LANES;
        if (residual && !epilogue.activates_first) add(y, N, residual);
        if (epilogue.activation) activate_all(y, vecs, epilogue.activation, epilogue.slope);
        if (residual && epilogue.activates_first) add(y, N, residual);
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
