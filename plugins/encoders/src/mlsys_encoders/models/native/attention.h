// Attention of one text's tokens to each other, one head, in floats.
#pragma once

#include "gemm.h"

#include <limits>
#include <vector>

namespace encoder {

constexpr int QUERIES = LANES == 16 ? 8 : 4;  // whose scores or sums are kept in registers, with WIDE vectors of each
constexpr int WIDE = 2;

// Queries, keys and values of a text, a row each token: [tokens][stride].
struct Head {
    const float *query, *key, *value;
    float* out;         // [tokens][out_stride]
    int64_t stride, out_stride;
    int length, size;   // tokens; features, a number of whole vectors
    const float* bias;  // what is added to the scores, [length][bias_stride]; null: nothing
    int64_t bias_stride;
    int64_t reach;      // most tokens between two that see each other; -1: any
};

struct Scratch {
    std::vector<float> keys;    // [size][padded length]
    std::vector<float> scores;  // [QUERIES][padded length]
};

// sums[r][v] of MR rows and V vectors over K: a(r, k) * b(k, v).
template <int MR, int V, class A, class B, class Use>
inline void product(int64_t K, const A& a, const B& b, const Use& use) {
    vf sums[MR * V];
    unroll<MR * V>([&](auto i) MLSYS_INLINE { sums[i] = vf{}; });
    micro_kernel<MR, V>(sums, K, a, b, []() MLSYS_INLINE {});
    unroll<MR * V>([&](auto i) MLSYS_INLINE { use((int)(i / V), (int)(i % V), sums[i]); });
}

// Softmax of one query's scores in place; those it does not see, and the padding, get 0.
inline void weigh(float* scores, int padded, int first, int stop) {
    vf most = splat(-std::numeric_limits<float>::infinity());
    const auto seen = [&](int k) {
        return only(load(scores + k), first - k, stop - k, -std::numeric_limits<float>::infinity());
    };
    for (int k = 0; k < padded; k += LANES) {
        const vf x = k >= first && k + LANES <= stop ? load(scores + k) : seen(k);
        store(scores + k, x);
        most = larger(x, most);
    }
    const vf top = splat(largest(most));
    vf total = {};
    for (int k = 0; k < padded; k += LANES) {
        vf x = exp_or_zero(load(scores + k) - top);
        if (!(k >= first && k + LANES <= stop)) x = only(x, first - k, stop - k, 0.0f);
        store(scores + k, x);
        total += x;
    }
    const vf scale = splat(1.0f / sum(total));
    for (int k = 0; k < padded; k += LANES) store(scores + k, load(scores + k) * scale);
}

template <int MR>
inline void attend_queries(const Head& head, int row, int padded, float scale, Scratch& scratch) {
    float* scores = scratch.scores.data();
    const float *query = head.query + row * head.stride, *keys = scratch.keys.data();
    for (int at = 0; at < padded; at += WIDE * LANES)
        product<MR, WIDE>(
            head.size, [&](auto r, int64_t k) MLSYS_INLINE { return query[r * head.stride + k]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(keys + k * padded + at + v * LANES); },
            [&](int r, int v, vf x) MLSYS_INLINE { store(scores + r * padded + at + v * LANES, x * splat(scale)); });
    for (int r = 0; r < MR; r++) {
        const int64_t query_at = row + r;
        if (head.bias)
            for (int k = 0; k < head.length; k++) scores[r * padded + k] += head.bias[query_at * head.bias_stride + k];
        const int64_t reach = head.reach < 0 ? head.length : head.reach;
        weigh(scores + r * padded, padded, (int)std::max<int64_t>(0, query_at - reach),
            (int)std::min<int64_t>(head.length, query_at + reach + 1));
    }
    const auto mix = [&](int at, auto wide) MLSYS_INLINE {
        constexpr int V = decltype(wide)::value;
        product<MR, V>(
            head.length, [&](auto r, int64_t k) MLSYS_INLINE { return scores[r * padded + k]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(head.value + k * head.stride + at + v * LANES); },
            [&](int r, int v, vf x) MLSYS_INLINE { store(head.out + (row + r) * head.out_stride + at + v * LANES, x); });
    };
    int at = 0;
    for (; at + WIDE * LANES <= head.size; at += WIDE * LANES) mix(at, std::integral_constant<int, WIDE>());
    for (; at < head.size; at += LANES) mix(at, std::integral_constant<int, 1>());
}

template <int MR = QUERIES>
inline void attend_some(int mr, const Head& head, int row, int padded, float scale, Scratch& scratch) {
    if constexpr (MR > 0) {
        if (mr == MR) return attend_queries<MR>(head, row, padded, scale, scratch);
        attend_some<MR - 1>(mr, head, row, padded, scale, scratch);
    }
}

inline void attend(const Head& head, Scratch& scratch) {
    const int padded = (head.length + WIDE * LANES - 1) / (WIDE * LANES) * WIDE * LANES;
    scratch.keys.assign((size_t)head.size * padded, 0.0f);
    scratch.scores.resize((size_t)QUERIES * padded);
    for (int token = 0; token < head.length; token++)
        for (int i = 0; i < head.size; i++) scratch.keys[(size_t)i * padded + token] = head.key[token * head.stride + i];
    const float scale = 1.0f / std::sqrt((float)head.size);
    for_row_groups(head.length, QUERIES, [&](int row, int mr) { attend_some(mr, head, row, padded, scale, scratch); });
}

}  // namespace encoder
