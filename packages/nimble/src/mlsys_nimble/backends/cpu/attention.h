// Matmul of two computed matrices, and attention, by the GEMM of gemm.h.
#pragma once

#include <algorithm>

#include "copy.h"
#include "gemm.h"
#include "own_weights.h"

namespace nimble {

constexpr int NR = 2 * LANES;  // columns of a panel here

struct MatMul {
    View a, b, out;  // [B0, B1, M, K], [B0, B1, K, N], [B0, B1, M, N]; the result's columns side by side
    float scale;
};
MLSYS_STRUCT(MatMul, a, b, out, scale);

constexpr int64_t MATMUL_ROWS = 192;  // output rows of a work unit, at most

class MatMulKernel : public Kernel {
  public:
    explicit MatMulKernel(const MatMul& m) : m(m) {
        M = m.out.shape[2], N = m.out.shape[3], K = m.a.shape[3];
        panels = (N + NR - 1) / NR;
        blocks = (M + MATMUL_ROWS - 1) / MATMUL_ROWS;
        block_rows = std::min(M, MATMUL_ROWS);
        units = m.out.shape[0] * m.out.shape[1] * blocks * panels;
        gathers = m.a.strides[3] != 1 && K > 1;
        scratch_nbytes = (K * NR + (gathers ? block_rows * K : 0)) * sizeof(float) + block_rows * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* panel = (float*)scratch;
        const float** pointers = (const float**)(panel + K * NR);
        float* gathered = (float*)(pointers + block_rows);
        alignas(64) const float zeros[NR] = {};
        const BoundEpilogue epilogue;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t batch = unit / panels / blocks, outer = batch / m.out.shape[1], inner = batch % m.out.shape[1];
            const int64_t first = unit / panels % blocks * MATMUL_ROWS, some = std::min(MATMUL_ROWS, M - first);
            const int64_t n = unit % panels * NR, width = std::min<int64_t>(NR, N - n);
            const float* a = m.a.as<const float>() + outer * m.a.strides[0] + inner * m.a.strides[1] + first * m.a.strides[2];
            pack(m.b.as<const float>() + outer * m.b.strides[0] + inner * m.b.strides[1] + n * m.b.strides[3], width, panel);
            for (int64_t r = 0; r < some; r++) {
                const float* row = a + r * m.a.strides[2];
                pointers[r] = gathers ? gathered + r * K : row;
                for (int64_t k = 0; gathers && k < K; k++) gathered[r * K + k] = row[k * m.a.strides[3]];
            }
            Tile tile{};
            tile.taps = 1;
            tile.weights = panel;
            tile.ldb = NR;
            tile.bias = zeros;
            tile.ldc = m.out.strides[2];
            tile.c = m.out.as<float>() + outer * m.out.strides[0] + inner * m.out.strides[1] + first * tile.ldc + n;
            tile.N = width;
            multiply_rows(pointers, some, K, tile, epilogue, 2);
        }
    }

  private:
    void pack(const float* b, int64_t N, float* panel) const {
        const int64_t down = m.b.strides[2], along = m.b.strides[3];
        if (N < NR) std::fill(panel, panel + K * NR, 0.0f);
        if (along == 1)
            for (int64_t k = 0; k < K; k++)
                for (int64_t i = 0; i < N; i++) panel[k * NR + i] = b[k * down + i] * m.scale;
        else
            for (int64_t i = 0; i < N; i++)
                for (int64_t k = 0; k < K; k++) panel[k * NR + i] = b[k * down + i * along] * m.scale;
    }

    const MatMul m;
    int64_t M, N, K, panels, blocks, block_rows;
    bool gathers;
};

struct Attention {
    View q, k, v;  // [B, H, L, D], [B, H, S, D], [B, H, S, E]; heads' features side by side
    View mask;     // [B, H, L, S], any strides, added to the scores; rank 0: none
    View out;      // [B, H, L, E]
    float scale;
    int32_t is_causal;
    int32_t has_zero_rows;  // a query whose scores are all -infinity gives 0, not NaN
};
MLSYS_STRUCT(Attention, q, k, v, mask, out, scale, is_causal, has_zero_rows);

// Attention of one panel of queries at a time. Scores are laid out as [S][queries]: the first GEMM's rows are keys and its
// packed columns are queries, so keys and values are never packed. The softmax runs over S, one query per vector lane. The
// second GEMM reads a query's softmax weights down a column of the scores.
class AttentionKernel : public Kernel {
  public:
    explicit AttentionKernel(const Attention& a) : a(a) {
        queries = a.q.shape[2], head_dim = a.q.shape[3], keys = a.k.shape[2], value_dim = a.v.shape[3];
        blocks = (queries + NR - 1) / NR;
        units = a.q.shape[0] * a.q.shape[1] * blocks;
        copies_values = value_dim % LANES != 0;
        padded = (value_dim + LANES - 1) / LANES * LANES;
        scratch_nbytes = ((head_dim + keys) * NR + (copies_values ? keys * padded : 0)) * sizeof(float) + keys * sizeof(float*);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        float* panel = (float*)scratch;            // [D][queries]
        float* scores = panel + head_dim * NR;      // [S][queries]
        float* values = scores + keys * NR;
        const float** pointers = (const float**)(values + (copies_values ? keys * padded : 0));
        alignas(64) const float zeros[MAX_VECS * LANES] = {};
        const BoundEpilogue epilogue;
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t batch = unit / blocks / a.q.shape[1], head = unit / blocks % a.q.shape[1];
            const int64_t first = unit % blocks * NR, some = std::min<int64_t>(NR, queries - first);
            const float* q = of(a.q, batch, head) + first * a.q.strides[2];
            const float* k = of(a.k, batch, head);
            const float* v = of(a.v, batch, head);
            pack(q, some, panel);
            // Beyond the last key that a causal block sees there is nothing to do.
            const int64_t seen = a.is_causal ? std::min(keys, first + some) : keys;
            for (int64_t s = 0; s < seen; s++) pointers[s] = k + s * a.k.strides[2];
            Tile tile{};
            tile.taps = 1;
            tile.weights = panel;
            tile.ldb = NR;
            tile.bias = zeros;
            tile.c = scores;
            tile.ldc = NR;
            tile.N = NR;
            multiply_rows(pointers, seen, head_dim, tile, epilogue, 2);
            if (a.mask.rank || a.is_causal) add_mask(batch, head, first, some, seen, scores);
            softmax(scores, seen);

            int64_t step = a.v.strides[2];
            if (copies_values) {
                for (int64_t s = 0; s < seen; s++) {
                    std::memcpy(values + s * padded, v + s * step, value_dim * sizeof(float));
                    std::fill(values + s * padded + value_dim, values + (s + 1) * padded, 0.0f);
                }
                v = values;
                step = padded;
            }
            const int64_t ld_out = a.out.strides[2];
            float* out = (float*)of(a.out, batch, head) + first * ld_out;
            for_row_groups(some, max_mr(2), [&](int row, int rows) {
                for (int64_t column = 0; column < value_dim; column += NR) {
                    const int vecs = value_dim - column > LANES ? 2 : 1;
                    const int last = (int)std::min<int64_t>(LANES, value_dim - column - (vecs - 1) * LANES);
                    weigh_of(rows, vecs)(scores + row, seen, v + column, step, out + row * ld_out + column, ld_out, last);
                }
            });
        }
    }

  private:
    static const float* of(const View& view, int64_t batch, int64_t head) {
        return view.as<const float>() + batch * view.strides[0] + head * view.strides[1];
    }

    // Queries, scaled, as columns [D][queries]. Those beyond the last one repeat it.
    void pack(const float* q, int64_t some, float* panel) const {
        const vf scale = splat(a.scale);
        const int64_t whole = a.q.strides[3] == 1 ? head_dim / 4 * 4 : 0;
        const auto query = [&](int64_t i) MLSYS_INLINE { return q + std::min(i, some - 1) * a.q.strides[2]; };
        for (int64_t first = 0; first < NR; first += LANES)
            for (int64_t d = 0; d < whole; d += 4) {
                vf columns[4];
                four_features([&](auto n) MLSYS_INLINE { return query(first + n) + d; }, columns);
                for (int i = 0; i < 4; i++) store(panel + (d + i) * NR + first, columns[i] * scale);
            }
        for (int64_t d = whole; d < head_dim; d++)
            for (int64_t i = 0; i < NR; i++) panel[d * NR + i] = query(i)[d * a.q.strides[3]] * a.scale;
    }

    // MR queries' results: their shares [S][NR] times VECS vectors of columns of the values; `last` columns of the last vector.
    template <int MR, int VECS>
    static __attribute__((noinline)) void weigh(
        const float* shares, int64_t keys, const float* values, int64_t step, float* out, int64_t ld_out, int last) {
        constexpr int COPIES = copies_of(MR * VECS);
        vf sums[COPIES * MR * VECS] = {};
        micro_kernel<MR, VECS, COPIES>(
            sums, keys, [&](auto r, int64_t k) MLSYS_INLINE { return shares[k * NR + r]; },
            [&](int64_t k, auto v) MLSYS_INLINE { return load(values + k * step + v * LANES); }, []() {});
        add_copies<COPIES>(sums);
        unroll<MR>([&](auto r) MLSYS_INLINE {
            unroll<VECS>([&](auto v) MLSYS_INLINE {
                float* to = out + r * ld_out + v * LANES;
                if (v + 1 < VECS || last == LANES) store(to, sums[r * VECS + v]);
                else store_first(to, sums[r * VECS + v], last);
            });
        });
    }

    using Weigh = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, int);
    template <int VECS, int... MR>
    static constexpr Weigh weigh_of(int mr, std::integer_sequence<int, MR...>) {
        constexpr Weigh table[] = {weigh<MR + 1, VECS>...};
        return table[mr - 1];
    }
    static Weigh weigh_of(int mr, int vecs) {
        constexpr auto every = std::make_integer_sequence<int, max_mr(2)>();
        return vecs == 1 ? weigh_of<1>(mr, every) : weigh_of<2>(mr, every);
    }

    void add_mask(int64_t batch, int64_t head, int64_t first, int64_t some, int64_t seen, float* scores) const {
        if (a.mask.rank) {
            const float* mask = of(a.mask, batch, head) + first * a.mask.strides[2];
            for (int64_t s = 0; s < seen; s++)
                for (int64_t i = 0; i < some; i++) scores[s * NR + i] += mask[i * a.mask.strides[2] + s * a.mask.strides[3]];
        }
        if (a.is_causal)
            for (int64_t s = first + 1; s < seen; s++)
                for (int64_t i = 0; i < std::min(s - first, some); i++) scores[s * NR + i] = -INFINITY;
    }

    // Scores to shares that sum to one.
    void softmax(float* scores, int64_t seen) const {
        constexpr int VECS = NR / LANES;
        vf most[VECS], total[VECS] = {}, scale[VECS];
        for (vf& each : most) each = splat(-INFINITY);
        for (int64_t s = 0; s < seen; s++)
            for (int v = 0; v < VECS; v++) most[v] = larger(load(scores + s * NR + v * LANES), most[v]);
        vi blind[VECS];
        for (int v = 0; v < VECS; v++) {
            blind[v] = a.has_zero_rows ? most[v] == splat(-INFINITY) : vi{};
            most[v] = chosen(blind[v], vf{}, most[v]);
        }
        for (int64_t s = 0; s < seen; s++)
            for (int v = 0; v < VECS; v++) {
                const vf e = exp(load(scores + s * NR + v * LANES) - most[v]);
                total[v] += e;
                store(scores + s * NR + v * LANES, e);
            }
        for (int v = 0; v < VECS; v++) scale[v] = chosen(blind[v] & (total[v] == vf{}), vf{}, splat(1.0f) / total[v]);
        for (int64_t s = 0; s < seen; s++)
            for (int v = 0; v < VECS; v++) store(scores + s * NR + v * LANES, load(scores + s * NR + v * LANES) * scale[v]);
    }

    const Attention a;
    int64_t queries, head_dim, keys, value_dim, blocks, padded;
    bool copies_values;
};

}  // namespace nimble
