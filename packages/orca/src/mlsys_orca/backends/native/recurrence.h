// Recurrent layers (Mamba-2, gated delta nets): a short convolution, a scan over each request's tokens, and gates.
//
// A request's state is a row of the batch's `states`: of each layer what its convolution keeps, [taps - 1, channels], and a
// matrix [head_dim, state_size] for each head. Tokens follow one another, and each row of a matrix is changed by itself: a
// request's numbers do not depend on its company, on the threads, or on where its prompt was cut.
#pragma once

#include <cmath>

#include <mlsys/gemm.h>

#include "epilogue.h"
#include "operators.h"

namespace orca {

struct Convolve {  // target = silu(sum of taps' inputs * factors + bias), channel by channel
    int32_t source, target;  // registers, whose first columns are the channels
    int32_t num_channels, num_taps;
    const float* factors;  // [num_taps, num_channels], the newest input's last
    const float* bias;     // [num_channels]; null: 0
    int64_t state;         // floats of a request's states before those that this layer keeps
};
MLSYS_STRUCT(Convolve, source, target, num_channels, num_taps, factors, bias, state);

MLSYS_ENUM(Rule, DECAY, DELTA);

struct Scan {  // state = decay * state + new key^T; target = state * query
    int32_t source, target;  // registers; the source's columns: values, keys, queries
    Rule rule;
    int32_t num_heads, num_groups;  // heads share keys and queries in groups
    bool is_tiled;                  // a group has every num_groups-th head, not neighbouring heads
    int32_t head_dim, state_size;
    int32_t steps;             // a register with each head's step and rate
    int32_t step_column, rate_column;
    const float* decay;        // [num_heads] below 0
    const float* step_bias;    // [num_heads]
    const float* skip;         // [num_heads] factors of values that are added to the result; null: 0
    float key_eps;             // of rule DELTA: added to the squared lengths that keys and queries are divided by
    int64_t state;             // floats of a request's states before this layer's matrices
};
MLSYS_STRUCT(
    Scan, source, target, rule, num_heads, num_groups, is_tiled, head_dim, state_size, steps, step_column, rate_column, decay, step_bias,
    skip, key_eps, state);

MLSYS_ENUM(GateKind, SILU_THEN_NORM, NORM_THEN_SILU, SIGMOID_ALONE);

struct Gate {  // target = norm(silu(gate) * source), or silu(gate) * norm(source), or sigmoid(gate) * source
    int32_t source, gate, target;  // registers
    int32_t gate_column;
    GateKind kind;
    int32_t size;         // features
    int32_t group;        // neighbouring features that are normalised together
    const float* weight;  // [size]; null where there is no norm
    float eps;
};
MLSYS_STRUCT(Gate, source, gate, target, gate_column, kind, size, group, weight, eps);

constexpr int CHANNELS = 64;     // of one piece of a convolution
constexpr int SCAN_ROWS = 16;    // of one piece of a head's matrix: it stays in the first-level cache
constexpr int ROWS_AT_ONCE = 4;  // rows that share one load of key and query
constexpr int TOKENS_TO_TURN = 16;  // tokens of a request from which on a state matrix is transposed for the scan

inline bool is_first(const Span& span) { return span.context == span.stop - span.start; }

// One request's rows of the channels from `first` on; `kept`: this layer's inputs before them, which follow.
inline void convolve(const Convolve& op, const Span& span, int first, const Register& source, const Register& target, float* kept) {
    static const float zeros[CHANNELS] = {};
    const int count = std::min(CHANNELS, op.num_channels - first), before = op.num_taps - 1, rows = span.stop - span.start;
    const auto input = [&](int row) -> const float* {  // rows below 0 are earlier iterations'
        if (row >= 0) return source.floats + (span.start + row) * source.stride + first;
        return is_first(span) ? zeros : kept + (int64_t)(row + before) * op.num_channels + first;
    };
    for (int row = 0; row < rows; row++) {
        float* out = target.floats + (span.start + row) * target.stride + first;
        for (int c = 0; c < count; c += LANES) {
            const int lanes = std::min(LANES, count - c);
            vf sum{};
            for (int tap = 0; tap <= before; tap++)
                sum = fma(load_some(input(row - before + tap) + c, lanes), load_some(op.factors + (int64_t)tap * op.num_channels + first + c, lanes), sum);
            if (op.bias) sum += load_some(op.bias + first + c, lanes);
            store_some(out + c, sum * sigmoid(sum), lanes);
        }
    }
    for (int i = 0; i < before; i++)  // oldest first: what is read was not written yet
        std::memcpy(kept + (int64_t)i * op.num_channels + first, input(rows - before + i), count * sizeof(float));
}

// Update ROWS rows of a state matrix by one token; `values`: the rows' values; `results`: the rows' outputs.
template <int ROWS>
inline void scan_rows(
    const Scan& op, float* state, float left, float step, const float* values, const float* key, const float* query, float* results) {
    const int size = op.state_size;
    float news[ROWS];
    if (op.rule == DELTA) {
        vf found[ROWS] = {};
        for (int c = 0; c < size; c += LANES) {
            const int lanes = std::min(LANES, size - c);
            const vf k = load_some(key + c, lanes);
            for (int r = 0; r < ROWS; r++) found[r] = fma(load_some(state + (int64_t)r * size + c, lanes) * splat(left), k, found[r]);
        }
        for (int r = 0; r < ROWS; r++) news[r] = (values[r] - sum(found[r])) * step;
    } else {
        for (int r = 0; r < ROWS; r++) news[r] = values[r] * step;
    }
    vf totals[ROWS] = {};
    for (int c = 0; c < size; c += LANES) {
        const int lanes = std::min(LANES, size - c);
        const vf k = load_some(key + c, lanes), q = load_some(query + c, lanes);
        for (int r = 0; r < ROWS; r++) {
            float* at = state + (int64_t)r * size + c;
            const vf s = fma(splat(news[r]), k, load_some(at, lanes) * splat(left));
            store_some(at, s, lanes);
            totals[r] = fma(s, q, totals[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) results[r] = sum(totals[r]);
}

// The same as `sum` of each lane's vector of parts, for all lanes at once.
MLSYS_INLINE inline vf sum_of(vf (&parts)[LANES]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// LANES rows of a matrix by one token, the block on its side, [state_size][LANES]: no sum goes across a vector. Each number
// is made as in `scan_rows`, to the bit.
inline void scan_turned(
    const Scan& op, float* block, float left, float step, const float* values, const float* key, const float* query, float* results) {
    const vf by = splat(left);
    vf news = load(values);
    if (op.rule == DELTA) {
        vf found[LANES] = {};
        for (int c = 0; c < op.state_size; c += LANES)
            unroll<LANES>([&](auto i) MLSYS_INLINE { found[i] = fma(load(block + (c + i) * LANES) * by, splat(key[c + i]), found[i]); });
        news -= sum_of(found);
    }
    news *= splat(step);
    vf totals[LANES] = {};
    for (int c = 0; c < op.state_size; c += LANES)
        unroll<LANES>([&](auto i) MLSYS_INLINE {
            float* at = block + (c + i) * LANES;
            const vf s = fma(news, splat(key[c + i]), load(at) * by);
            store(at, s);
            totals[i] = fma(s, splat(query[c + i]), totals[i]);
        });
    store(results, sum_of(totals));
}

// to[j][i] = from[i][j]
inline void turn(const float* from, int rows, int columns, float* to) {
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++) to[(int64_t)j * rows + i] = from[(int64_t)i * columns + j];
}

// out[i] = x[i] * factor / length of x
inline void unit(const float* x, int size, float eps, float factor, float* out) {
    vf squares{};
    for (int c = 0; c < size; c += LANES) {
        const vf v = load_some(x + c, std::min(LANES, size - c));
        squares = fma(v, v, squares);
    }
    const vf by = splat(factor / std::sqrt(sum(squares) + eps));
    for (int c = 0; c < size; c += LANES) {
        const int lanes = std::min(LANES, size - c);
        store_some(out + c, load_some(x + c, lanes) * by, lanes);
    }
}

// log(1 + e^x); a factor corrects the rounding of 1 + e^x (Kahan's log1p).
inline vf softplus(vf x) {
    const vf e = exp(smaller(x, splat(20.0f))), u = e + 1.0f;
    return chosen(x > splat(20.0f), x, chosen(u == splat(1.0f), e, log(u) * (e / (u - 1.0f))));
}

// All tokens of one request through rows `first` on of one head's matrix; `spare`: [(2 + SCAN_ROWS) * state_size].
inline void scan(
    const Scan& op, const Span& span, int head, int first, const Register& source, const Register& steps, const Register& target,
    float* matrices, float* spare) {
    const int rows = std::min(SCAN_ROWS, op.head_dim - first), size = op.state_size;
    float* state = matrices + ((int64_t)head * op.head_dim + first) * size;
    if (is_first(span)) std::fill(state, state + (int64_t)rows * size, 0.0f);
    const int values_at = head * op.head_dim + first, group = op.is_tiled ? head % op.num_groups : head / (op.num_heads / op.num_groups);
    const int keys_at = op.num_heads * op.head_dim + group * size, queries_at = keys_at + op.num_groups * size;
    const bool turns = span.stop - span.start >= TOKENS_TO_TURN && size % LANES == 0;
    const int num_turned = turns ? rows / LANES * LANES : 0;
    float* blocks = spare + 2 * size;
    for (int r = 0; r < num_turned; r += LANES) turn(state + r * size, LANES, size, blocks + r * size);
    float of_tokens[2][LANES];  // the next tokens' step sizes and decays
    for (int row = span.start; row < span.stop; row++) {
        const int token = (row - span.start) % LANES;
        if (token == 0) {
            vf raw{};
            for (int i = 0; i < std::min(LANES, span.stop - row); i++) raw[i] = steps.floats[(row + i) * steps.stride + op.step_column + head];
            const vf step = softplus(raw + op.step_bias[head]);
            store(of_tokens[0], step);
            store(of_tokens[1], exp(step * op.decay[head]));
        }
        const float* in = source.floats + row * source.stride;
        const float* own = steps.floats + row * steps.stride;
        float* out = target.floats + row * target.stride + values_at;
        const float *key = in + keys_at, *query = in + queries_at;
        float step = of_tokens[0][token];
        const float left = of_tokens[1][token];
        if (op.rule == DELTA) {
            unit(key, size, op.key_eps, 1.0f, spare);
            unit(query, size, op.key_eps, 1.0f / std::sqrt((float)size), spare + size);
            key = spare, query = spare + size;
            step = 1.0f / (1.0f + std::exp(-own[op.rate_column + head]));
        }
        int r = 0;
        for (; r < num_turned; r += LANES) scan_turned(op, blocks + r * size, left, step, in + values_at + r, key, query, out + r);
        for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
            scan_rows<ROWS_AT_ONCE>(op, state + (int64_t)r * size, left, step, in + values_at + r, key, query, out + r);
        for (; r < rows; r++) scan_rows<1>(op, state + (int64_t)r * size, left, step, in + values_at + r, key, query, out + r);
        if (op.skip)
            for (int i = 0; i < rows; i++) out[i] += op.skip[head] * in[values_at + i];
    }
    for (int r = 0; r < num_turned; r += LANES) turn(blocks + r * size, size, LANES, state + r * size);
}

// One row; `x` may be `out`.
inline void let_through(const Gate& op, const float* x, const float* gate, float* out) {
    for (int begin = 0; begin < op.size; begin += op.group) {
        const int end = begin + op.group;
        const auto each = [&](auto&& f) {
            for (int c = begin; c < end; c += LANES) {
                const int lanes = std::min(LANES, end - c);
                const vf g = load_some(gate + c, lanes);
                f(c, lanes, op.kind == SIGMOID_ALONE ? sigmoid(g) : g * sigmoid(g));
            }
        };
        vf squares{};
        each([&](int c, int lanes, vf g) {
            vf v = load_some(x + c, lanes);
            if (op.kind != NORM_THEN_SILU) v *= g;
            squares = fma(v, v, squares);
            store_some(out + c, v, lanes);
        });
        if (op.kind == SIGMOID_ALONE) continue;
        const vf by = splat(1.0f / std::sqrt(sum(squares) / op.group + op.eps));
        each([&](int c, int lanes, vf g) {
            vf v = load_some(out + c, lanes) * by * load_some(op.weight + c, lanes);
            if (op.kind == NORM_THEN_SILU) v *= g;
            store_some(out + c, v, lanes);
        });
    }
}

// The operators' loops; every thread calls them alike. `Pool`: mlsys::ThreadPool.
template <class Pool>
inline void run_convolve(const Convolve& op, Pool& pool, int thread, const Batch& batch, const std::vector<Register>& registers) {
    const int pieces = (op.num_channels + CHANNELS - 1) / CHANNELS;
    pool.for_each(thread, batch.num_spans * pieces, [&](int i) {
        const Span& span = batch.spans[i / pieces];
        float* kept = batch.states_of_requests + span.state_slot * batch.state_stride + op.state;
        convolve(op, span, i % pieces * CHANNELS, registers[op.source], registers[op.target], kept);
    });
}

template <class Pool>
inline void run_scan(const Scan& op, Pool& pool, int thread, const Batch& batch, const std::vector<Register>& registers, Scratch& own) {
    const int pieces = (op.head_dim + SCAN_ROWS - 1) / SCAN_ROWS;
    float* spare = own.grow((2 + SCAN_ROWS) * op.state_size);
    pool.for_each(thread, batch.num_spans * op.num_heads * pieces, [&](int i) {
        const Span& span = batch.spans[i / pieces / op.num_heads];
        float* matrices = batch.states_of_requests + span.state_slot * batch.state_stride + op.state;
        scan(
            op, span, i / pieces % op.num_heads, i % pieces * SCAN_ROWS, registers[op.source], registers[op.steps],
            registers[op.target], matrices, spare);
    });
}

}  // namespace orca
