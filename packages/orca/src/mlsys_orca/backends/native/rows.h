// Operators on one row: norms and rotary positions.
#pragma once

#include <cmath>

#include "vec.h"

namespace orca {

MLSYS_ENUM(NormKind, NO_NORM, RMS_NORM, LAYER_NORM);

struct Norm {
    NormKind kind;
    int32_t size;  // features of a row
    float eps;
    const float* weight;  // [size]; null: 1
    const float* bias;    // [size]; null: 0
};
MLSYS_STRUCT(Norm, kind, size, eps, weight, bias);

// Convert to float32 or bf16.
template <class T>
inline void convert_row(const float* x, T* out, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(out + i, load(x + i));
    for (; i < size; i++) store_one(out + i, x[i]);
}

// A matrix [rows, width] between two operators: floats, or bf16 where only products of pairs read it.
struct Register {
    float* floats = nullptr;
    int width = 0;
    bool is_bf16 = false;
    int64_t stride = 0;  // from one row to the next
    uint16_t* halves() const { return (uint16_t*)floats; }
    void move(int64_t elements) { floats = is_bf16 ? (float*)(halves() + elements) : floats + elements; }
};

// out[column + i] = factor * x[i] in one row.
inline void put_row(const Register& out, int row, int column, const float* x, float factor, int size) {
    const int64_t at = (int64_t)row * out.width + column;
    const auto put = [&](auto* to) {
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(to + i, load(x + i) * splat(factor));
        for (; i < size; i++) store_one(to + i, x[i] * factor);
    };
    out.is_bf16 ? put(out.halves() + at) : put(out.floats + at);
}

inline void copy_row(const float* x, float* out, int size) { std::memcpy(out, x, sizeof(float) * size); }

// `out`: floats, which may be the row `x`, or bf16.
template <class T>
inline void normalise(const Norm& norm, const float* x, T* out) {
    const int whole = norm.size / LANES * LANES;
    float mean = 0.0f;
    if (norm.kind == LAYER_NORM) {
        vf sums{};
        for (int i = 0; i < whole; i += LANES) sums += load(x + i);
        mean = sum(sums);
        for (int i = whole; i < norm.size; i++) mean += x[i];
        mean /= norm.size;
    }
    vf squares{};
    for (int i = 0; i < whole; i += LANES) {
        vf centred = load(x + i) - splat(mean);
        squares = fma(centred, centred, squares);
    }
    float square = sum(squares);
    for (int i = whole; i < norm.size; i++) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(square / norm.size + norm.eps);
    for (int i = 0; i < whole; i += LANES) {
        vf scaled = (load(x + i) - splat(mean)) * splat(factor);
        if (norm.weight) scaled *= load(norm.weight + i);
        if (norm.bias) scaled += load(norm.bias + i);
        store(out + i, scaled);
    }
    for (int i = whole; i < norm.size; i++) {
        float scaled = (x[i] - mean) * factor;
        store_one(out + i, scaled * (norm.weight ? norm.weight[i] : 1.0f) + (norm.bias ? norm.bias[i] : 0.0f));
    }
}

// Apply rotary positions to the first `size` features of a head: feature i pairs with feature i + size / 2. `cos` and
// `sin` are [size] of this row's position, the first half of the sines negative.
inline void rotate(float* head, const float* cos, const float* sin, int size) {
    const int half = size / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf low = load(head + i), high = load(head + half + i);
        store(head + i, fma(high, load(sin + i), low * load(cos + i)));
        store(head + half + i, fma(low, load(sin + half + i), high * load(cos + half + i)));
    }
    for (; i < half; i++) {
        float low = head[i], high = head[half + i];
        head[i] = std::fma(high, sin[i], low * cos[i]);
        head[half + i] = std::fma(low, sin[half + i], high * cos[half + i]);
    }
}

}  // namespace orca
