// Attention and its gradients for short sequences: one head at a time, all its scores in the second-level cache. The
// gradients are those of FlashAttention (Dao et al. 2022, appendix B.2), which come from the scores' logsumexp.
#pragma once

#include <algorithm>
#include <cmath>

#include <mlsys/vec.h>

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
    View dout, dq, dk, dv;  // of gradients; rank 0 forward
    float scale;
    int32_t is_causal;
};
MLSYS_STRUCT(TrainingAttention, q, k, v, out, logsumexp, dout, dq, dk, dv, scale, is_causal);

// out [rows][columns] = or += the sum over t < depth of a(row, t) b(t, column); whole vectors of columns. a(row, t) is
// a[row * a_row + t * a_depth], so that either operand may be read transposed.
struct Matrices {
    const float* a;
    int64_t a_row, a_depth;
    const float* b;
    int64_t b_row;
    float* out;
    int64_t out_row;
};

template <int ROWS, int VECS>
inline void multiply_small_tile(const Matrices& m, int64_t row, int64_t column, int64_t depth, float scale) {
    vf sums[ROWS][VECS] = {};
    const float *a = m.a + row * m.a_row, *b = m.b + column;
    for (int64_t t = 0; t < depth; t++, a += m.a_depth, b += m.b_row) {
        vf values[VECS];
        for (int v = 0; v < VECS; v++) values[v] = load(b + v * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++) sums[r][v] = fma(splat(a[r * m.a_row]), values[v], sums[r][v]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(m.out + (row + r) * m.out_row + column + v * LANES, sums[r][v] * splat(scale));
}

inline void multiply_small(const Matrices& m, int64_t rows, int64_t columns, int64_t depth, float scale) {
    int64_t column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES) {
        int64_t row = 0;
        for (; row + 6 <= rows; row += 6) multiply_small_tile<6, 2>(m, row, column, depth, scale);
        for (; row + 2 <= rows; row += 2) multiply_small_tile<2, 2>(m, row, column, depth, scale);
        for (; row < rows; row++) multiply_small_tile<1, 2>(m, row, column, depth, scale);
    }
    for (; column < columns; column += LANES) {
        int64_t row = 0;
        for (; row + 8 <= rows; row += 8) multiply_small_tile<8, 1>(m, row, column, depth, scale);
        for (; row < rows; row++) multiply_small_tile<1, 1>(m, row, column, depth, scale);
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
    // Rows side by side: a model's lie far apart, at distances that fall on the same places of a cache.
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
