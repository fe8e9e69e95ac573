// Elementwise functions, the only ones under all kernels. Unless the comment says otherwise they are within about 2 units in
// the last place, keep NaN and go to their limits at the infinities. A lane's result does not depend on the other lanes.
// Polynomials are minimax fits of our own over the reduced ranges that the comments give.
#pragma once

#include <cmath>

#include <mlsys/layout.h>
#include <mlsys/vec.h>

namespace mlsys {

// Per lane, for what GCC turns into one instruction itself.
template <class F>
inline vf each(vf x, F&& f) {
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = f(x[i]);
    return out;
}
inline vf sqrt(vf x) {
    return each(x, [](float v) { return __builtin_sqrtf(v); });
}
inline vf floor(vf x) {
    return each(x, [](float v) { return __builtin_floorf(v); });
}
inline vf ceil(vf x) {
    return each(x, [](float v) { return __builtin_ceilf(v); });
}
inline vf trunc(vf x) {
    return each(x, [](float v) { return __builtin_truncf(v); });
}
inline vf round(vf x) {  // halves to even
    return each(x, [](float v) { return __builtin_rintf(v); });
}
inline vf abs(vf x) { return (vf)((vu)x & 0x7fffffffu); }
inline vf with_sign(vf size, vf of) { return (vf)((vu)size | ((vu)of & 0x80000000u)); }
inline vf chosen(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

// The bounds come first: `larger` and `smaller` give their second argument where one is NaN.
inline vf clamped(vf x, float low, float high) { return smaller(splat(high), larger(splat(low), x)); }
inline vf maximum(vf a, vf b) { return chosen(a != a, a, larger(a, b)); }  // NaN wins, as torch has it
inline vf minimum(vf a, vf b) { return chosen(a != a, a, smaller(a, b)); }

inline vf horner(vf, vf p) { return p; }
template <class... Rest>
inline vf horner(vf x, vf p, float next, Rest... rest) {
    return horner(x, fma(p, x, splat(next)), rest...);
}

inline vf power_of_two(vi n) { return (vf)((n + 127) << 23); }

// e^x = 2^power * (1 + rest), for x within [-104, 89].
struct Exponential {
    vf rest;
    vi power;
    explicit Exponential(vf x) {
        const vf shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds to a whole number
        const vf n = shifted - splat(12582912.0f);
        const vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));  // within ln 2 / 2 of 0
        const vf p = horner(r, splat(1.97892616e-4f), 1.39457523e-3f, 8.3335042e-3f, 4.16662805e-2f, 0.166666657f, 0.5f);
        rest = fma(p, r * r, r);
        power = (vi)shifted - splat_int(0x4b400000);
    }
};

// The power in two factors, so that the ends of the range round and overflow as they should.
inline vf exp(vf x) {
    const Exponential e(clamped(x, -104.0f, 89.0f));
    const vi half = e.power >> 1;
    return (e.rest + splat(1.0f)) * power_of_two(half) * power_of_two(e.power - half);
}

// e^x for softmax: results below the smallest normal number, which are slow to compute with, are 0. x is at most 88.
inline vf exp_or_zero(vf x) {
    const Exponential e(clamped(x, -87.0f, 88.0f));
    return chosen(x < splat(-87.0f), vf{}, (e.rest + splat(1.0f)) * power_of_two(e.power));
}

// 1 / x, for x neither 0 nor beyond 2^126.
inline vf reciprocal(vf x) {
#if MLSYS_LANES == 16 && defined(__AVX512F__)
    const vf guess = _mm512_rcp14_ps(x);
    return fma(guess, fma(-x, guess, splat(1.0f)), guess);
#else
    return splat(1.0f) / x;
#endif
}

// 0 below -88.
inline vf sigmoid(vf x) {
    const Exponential e(clamped(-x, -87.0f, 88.0f));
    const vf y = reciprocal(fma(e.rest + splat(1.0f), power_of_two(e.power), splat(1.0f)));
    return chosen(x < splat(-88.0f), vf{}, y);
}

inline vf log(vf x) {
    const vi tiny = x < splat(1.17549435e-38f);
    const vf scaled = chosen(tiny, x * splat(8388608.0f), x);  // subnormals
    vi exponent = ((vi)scaled >> 23) - 127;
    vf m = (vf)(((vi)scaled & 0x7fffff) | 0x3f800000);  // 1 to 2
    const vi upper = m > splat(1.41421356f);
    m = chosen(upper, m * splat(0.5f), m);
    exponent -= upper;  // a mask is -1
    const vf n = __builtin_convertvector(exponent + (tiny & -23), vf), f = m - splat(1.0f);
    const vf p = horner(
        f, splat(0.0676855296f), -0.117131136f, 0.11898876f, -0.124005415f, 0.142175451f, -0.166681871f, 0.200022161f,
        -0.250000089f, 0.333333105f);
    const vf square = f * f;
    vf tail = fma(p * square, f, n * splat(-2.12194440e-4f));
    tail = fma(square, splat(-0.5f), tail);
    vf y = fma(n, splat(0.693359375f), f + tail);
    y = chosen(x == splat(INFINITY), x, y);
    y = chosen(x == vf{}, splat(-INFINITY), y);
    return chosen((x < vf{}) | (x != x), splat(NAN), y);
}

inline vf tanh(vf x) {
    const vf size = abs(x), square = x * x;
    const vf p = horner(
        square, splat(-0.00551516423f), 0.0204694197f, -0.0536880232f, 0.133308306f, -0.333332598f);
    const vf near = fma(p * square, x, x);  // |x| < 0.625
    const vf e = exp(size + size);
    const vf far = with_sign(splat(1.0f) - splat(2.0f) / (e + splat(1.0f)), x);
    return chosen(size < splat(0.625f), near, far);
}

// Within 1e-7 of tanh, absolutely: small arguments lose digits. In two thirds of `tanh`'s time.
inline vf fast_tanh(vf x) {
    const Exponential e(clamped(x + x, -20.0f, 20.0f));
    return splat(1.0f) - splat(2.0f) / fma(e.rest + splat(1.0f), power_of_two(e.power), splat(1.0f));
}

inline vf erf(vf x) {
    const vf size = abs(x), square = x * x;
    const vf p = horner(
        square, splat(7.85389639e-5f), -8.01020535e-4f, 5.18832915e-3f, -2.68538129e-2f, 0.112835854f, -0.37612626f,
        0.128379166f);
    const vf near = fma(p, x, x);  // |x| < 1
    const vf t = splat(1.0f) / fma(size, splat(0.33f), splat(1.0f));
    const vf q = horner(t, splat(0.913989544f), -1.0679878f, 1.03248906f, -0.103898868f, 0.224967107f);
    const vf far = with_sign(fma(-q * t, exp(-square), splat(1.0f)), x);  // to 4, and 1 beyond
    return chosen(size < splat(1.0f), near, far);
}

// sine for an even shift, cosine for an odd one: x = quarter * pi / 2 + r, |r| <= pi / 4.
inline vf sin_shifted(vf x, int32_t shift) {
    const vf size = abs(x);
    const vf shifted = fma(size, splat(0.636619772f), splat(12582912.0f));
    const vf n = shifted - splat(12582912.0f);
    vf r = fma(n, splat(-1.5703125f), size);
    r = fma(n, splat(-4.837512969970703125e-4f), r);
    r = fma(n, splat(-7.54978995489188216e-8f), r);
    const vf square = r * r;
    const vf sine = fma(horner(square, splat(2.71736667e-6f), -1.98392328e-4f, 8.33332911e-3f, -0.166666672f) * square, r, r);
    const vf cosine = fma(
        square * square, horner(square, splat(2.44256807e-5f), -1.38872513e-3f, 4.16666456e-2f),
        fma(square, splat(-0.5f), splat(1.0f)));
    const vi quarter = (vi)shifted + shift;
    vf y = chosen((quarter & 1) != 0, cosine, sine);
    y = (vf)((vi)y ^ ((quarter & 2) << 30));
    if (!(shift & 1)) y = (vf)((vi)y ^ ((vi)x & (int32_t)0x80000000));
    if (largest(size) < 8192.0f) return y;  // NaN: the library's below
    for (int i = 0; i < LANES; i++)
        if (!(size[i] < 8192.0f)) y[i] = shift & 1 ? std::cos(x[i]) : std::sin(x[i]);
    return y;
}
inline vf sin(vf x) { return sin_shifted(x, 0); }
inline vf cos(vf x) { return sin_shifted(x, 1); }

// The error function within 2.9e-7, exactly 1 beyond 3.81: a quotient of polynomials, fitted by least squares for the least
// largest error (weights raised where it is large). In a third of `erf`'s time; as part of 1 + erf it is as good as need be.
inline vf erf_of_gelu(vf x) {
    const vf y = clamped(x, -3.81f, 3.81f), square = y * y;
    const vf p = horner(
        square, splat(2.28265594e-6f), 2.90094293e-4f, 3.46950675e-3f, 5.19113764e-2f, 0.182003096f, 1.12837911f);
    const vf q = horner(
        square, splat(4.07389271e-5f), 1.11183082e-3f, 1.43800778e-2f, 0.110882707f, 0.494629174f, 1.0f);
    return clamped(y * p / q, -1.0f, 1.0f);
}
inline vf gelu(vf x) {
    const vf half = splat(0.5f) * x;
    return fma(half, erf_of_gelu(x * splat(0.70710678f)), half);
}
inline vf gelu_tanh(vf x) {  // (1 + tanh(y)) / 2 is the sigmoid of 2y
    return x * sigmoid(splat(1.59576912f) * fma(splat(0.044715f) * x, x * x, x));
}
inline vf elu(vf x, float slope) {  // e^x - 1 by tanh(x / 2) near zero, where the difference would cancel
    const vf half = tanh(x * splat(0.5f)), near = splat(2.0f) * half / (splat(1.0f) - half);
    const vf below = chosen(x > splat(-0.5f), near, exp(x) - splat(1.0f));
    return chosen(x > vf{}, x, below * splat(slope));
}

MLSYS_ENUM(
    Activation, IDENTITY, RELU, RELU6, SILU, SIGMOID, TANH, GELU, GELU_TANH, HARDSWISH, HARDSIGMOID, LEAKY_RELU, ELU);

// Call `use` with the function: chosen once, so that the work on one vector overlaps with the work on the next.
template <class Use>
inline void with_activation(int32_t which, float slope, Use&& use) {
    switch (which) {
        case RELU: return use([](vf x) { return larger(vf{}, x); });
        case RELU6: return use([](vf x) { return clamped(x, 0.0f, 6.0f); });
        case SILU: return use([](vf x) { return x * sigmoid(x); });
        case SIGMOID: return use([](vf x) { return sigmoid(x); });
        case TANH: return use([](vf x) { return tanh(x); });
        case GELU: return use([](vf x) { return gelu(x); });
        case GELU_TANH: return use([](vf x) { return gelu_tanh(x); });
        case HARDSWISH: return use([](vf x) { return x * clamped(x + splat(3.0f), 0.0f, 6.0f) * splat(1.0f / 6.0f); });
        case HARDSIGMOID: return use([](vf x) { return clamped(x + splat(3.0f), 0.0f, 6.0f) * splat(1.0f / 6.0f); });
        case LEAKY_RELU: return use([slope](vf x) { return chosen(x > vf{}, x, x * splat(slope)); });
        case ELU: return use([slope](vf x) { return elu(x, slope); });
        default: return use([](vf x) { return x; });
    }
}

inline vf activate(vf x, int32_t which, float slope) {
    with_activation(which, slope, [&x](auto&& f) { x = f(x); });
    return x;
}

}  // namespace mlsys
