// Attention and its gradients for short sequences: one head at a time, all its scores in the second-level cache. The
// gradients are those of FlashAttention (Dao et al. 2022, appendix B.2), which come from the scores' logsumexp.
#pragma once

#include <algorithm>
#include <cmath>

#include <mlsys/gemm.h>

#include "../../backends/cpu/kernel.h"

namespace nimble {

using mlsys::fma;
using mlsys::LANES;
using mlsys::load;
using mlsys::splat;
using mlsys::store;
using mlsys::vf;

struct TrainingAttention {
    View q, k, v;    // [N, H, L, D], [N, H, S, D], [N, H, S, D]: features side by side, D a whole number of vectors
    View out;        // as q
    View logsumexp;  // [N, H, L]
    View dout, dq, dk, dv;  // gradients; rank 0 in the forward pass
    float scale;
    int32_t is_causal;
};
MLSYS_STRUCT(TrainingAttention, q, k, v, out, logsumexp, dout, dq, dk, dv, scale, is_causal);

// C [M][N] = scale * A [M][K] B [K][N], N whole vectors. a(m, k) is a[m * rs_a + k * cs_a], so that A may be transposed.
struct Matrices {
    const float* a;
    int64_t rs_a, cs_a;
    const float* b;
    int64_t ldb;
    float* c;
    int64_t ldc;
};

template <int MR, int VECS>
inline void multiply_small_tile(const Matrices& g, int64_t m, int64_t n, int64_t K, float scale) {
    vf sums[MR * VECS] = {};
    const float *a = g.a + m * g.rs_a, *b = g.b + n;
    const int64_t rs_a = g.rs_a, cs_a = g.cs_a, ldb = g.ldb;
    micro_kernel<MR, VECS>(
        sums, K, [&](auto r, int64_t k) MLSYS_INLINE { return a[r * rs_a + k * cs_a]; },
        [&](int64_t k, auto v) MLSYS_INLINE { return load(b + k * ldb + v * LANES); }, []() MLSYS_INLINE {});
    unroll<MR * VECS>([&](auto i) MLSYS_INLINE {
        store(g.c + (m + i / VECS) * g.ldc + n + i % VECS * LANES, sums[i] * splat(scale));
    });
}

inline void multiply_small(const Matrices& g, int64_t M, int64_t N, int64_t K, float scale) {
    int64_t n = 0;
    for (; n + 2 * LANES <= N; n += 2 * LANES) {
        int64_t m = 0;
        for (; m + 6 <= M; m += 6) multiply_small_tile<6, 2>(g, m, n, K, scale);
        for (; m + 2 <= M; m += 2) multiply_small_tile<2, 2>(g, m, n, K, scale);
        for (; m < M; m++) multiply_small_tile<1, 2>(g, m, n, K, scale);
    }
    for (; n < N; n += LANES) {
        int64_t m = 0;
        for (; m + 8 <= M; m += 8) multiply_small_tile<8, 1>(g, m, n, K, scale);
        for (; m < M; m++) multiply_small_tile<1, 1>(g, m, n, K, scale);
    }
}

class AttentionHeads : public Kernel {
  public:
    explicit AttentionHeads(const TrainingAttention& a) : a(a) {
        length = a.q.shape[2], sources = a.k.shape[2], width = a.q.shape[3];
        wide = (sources + LANES - 1) / LANES * LANES;
        units = a.q.shape[0] * a.q.shape[1];
    }

  protected:
    template <class T>
    T* head(const View& view, int64_t unit) const {
        return view.as<T>() + unit / view.shape[1] * view.strides[0] + unit % view.shape[1] * view.strides[1];
    }
    // Copy rows next to each other: a model's rows are strides apart that map to the same cache sets.
    const float* gather(const View& view, int64_t unit, float* to) const {
        const float* from = head<const float>(view, unit);
        for (int64_t row = 0; row < view.shape[2]; row++) std::copy_n(from + row * view.strides[2], width, to + row * width);
        return to;
    }
    // [S][D] as [D][S], with zeros up to whole vectors.
    void transpose(const float* from, float* to) const {
        for (int64_t s = 0; s < sources; s++)
            for (int64_t d = 0; d < width; d++) to[d * wide + s] = from[s * width + d];
        for (int64_t d = 0; d < width; d++) std::fill(to + d * wide + sources, to + (d + 1) * wide, 0.0f);
    }
    // The sources that a row attends to.
    int64_t seen(int64_t row) const { return a.is_causal ? std::min(sources, row + 1) : sources; }

    const TrainingAttention a;
    int64_t length, sources, width, wide;
};

class AttentionForward : public AttentionHeads {
  public:
    explicit AttentionForward(const TrainingAttention& a) : AttentionHeads(a) {
        scratch_nbytes = ((length + width) * wide + (length + sources) * width) * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float *scores = (float*)scratch, *keys = scores + length * wide;
        float *near_q = keys + width * wide, *near_k = near_q + length * width;  // then v's
        for (int64_t unit = begin; unit < end; unit++) {
            transpose(gather(a.k, unit, near_k), keys);
            multiply_small({gather(a.q, unit, near_q), width, 1, keys, wide, scores, wide}, length, wide, width, a.scale);
            for (int64_t row = 0; row < length; row++) {
                float* to = scores + row * wide;
                std::fill(to + seen(row), to + wide, -INFINITY);
                vf most = load(to), totals = {};
                for (int64_t s = LANES; s < wide; s += LANES) most = mlsys::larger(most, load(to + s));
                const float largest = mlsys::largest(most);
                for (int64_t s = 0; s < wide; s += LANES) {
                    const vf weight = exp_or_zero(load(to + s) - splat(largest));
                    store(to + s, weight);
                    totals += weight;
                }
                const float total = mlsys::sum(totals);
                for (int64_t s = 0; s < wide; s += LANES) store(to + s, load(to + s) * splat(1 / total));
                head<float>(a.logsumexp, unit)[row * a.logsumexp.strides[2]] = largest + std::log(total);
            }
            multiply_small(
                {scores, wide, 1, gather(a.v, unit, near_k), width, head<float>(a.out, unit), a.out.strides[2]}, length, width, sources, 1);
        }
    }
};

class AttentionBackward : public AttentionHeads {
  public:
    explicit AttentionBackward(const TrainingAttention& a) : AttentionHeads(a) {
        scratch_nbytes = ((2 * length + 2 * width) * wide + (2 * length + 2 * sources) * width) * sizeof(float);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float *weights = (float*)scratch, *changes = weights + length * wide;  // [L][S] each
        float *keys = changes + length * wide, *values = keys + width * wide;
        float *near_q = values + width * wide, *near_dout = near_q + length * width;
        float *near_k = near_dout + length * width, *near_v = near_k + sources * width;
        for (int64_t unit = begin; unit < end; unit++) {
            const float *q = gather(a.q, unit, near_q), *k = gather(a.k, unit, near_k);
            const float *dout = gather(a.dout, unit, near_dout), *out = head<const float>(a.out, unit);
            const float* logsumexp = head<const float>(a.logsumexp, unit);
            transpose(k, keys);
            transpose(gather(a.v, unit, near_v), values);
            multiply_small({q, width, 1, keys, wide, weights, wide}, length, wide, width, a.scale);
            multiply_small({dout, width, 1, values, wide, changes, wide}, length, wide, width, 1);
            for (int64_t row = 0; row < length; row++) {
                vf sums = {};
                for (int64_t d = 0; d < width; d += LANES)
                    sums = fma(load(dout + row * width + d), load(out + row * a.out.strides[2] + d), sums);
                const float mean = mlsys::sum(sums);
                const vf shift = splat(logsumexp[row * a.logsumexp.strides[2]]);
                float *weight = weights + row * wide, *change = changes + row * wide;
                std::fill(weight + seen(row), weight + wide, -INFINITY);
                for (int64_t s = 0; s < wide; s += LANES) {
                    const vf p = exp_or_zero(load(weight + s) - shift);
                    store(weight + s, p);
                    store(change + s, p * (load(change + s) - splat(mean)));
                }
            }
            multiply_small({changes, wide, 1, k, width, head<float>(a.dq, unit), a.dq.strides[2]}, length, width, sources, a.scale);
            multiply_small({changes, 1, wide, q, width, head<float>(a.dk, unit), a.dk.strides[2]}, sources, width, length, a.scale);
            multiply_small({weights, 1, wide, dout, width, head<float>(a.dv, unit), a.dv.strides[2]}, sources, width, length, 1);
        }
    }
};

}  // namespace nimble
