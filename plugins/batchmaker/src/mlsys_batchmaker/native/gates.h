// Cell functions: new states from the gates' sums, UNITS units of one row at a time.
#pragma once

#include "gemm.h"

namespace batchmaker {

MLSYS_ENUM(Kind, LSTM, GRU, TREE_LEAF, TREE_INNER);

constexpr int MAX_GATES = 5;
// LSTM: input, forget, candidate, output. GRU: reset, update, candidate. TreeLSTM: input, output, candidate, and a
// forget gate for each child.
constexpr int GATES[] = {4, 3, 3, 5};

// Units of a row that may not fill a vector.
inline vf load_some(const float* from, int64_t left) {
    if (left >= LANES) return load(from);
    float lanes[LANES] = {};
    for (int64_t i = 0; i < left; i++) lanes[i] = from[i];
    return load(lanes);
}
inline void store_some(float* to, vf x, int64_t left) {
    if (left >= LANES) return store(to, x);
    float lanes[LANES];
    store(lanes, x);
    for (int64_t i = 0; i < left; i++) to[i] = lanes[i];
}

// One row's states around a cell, at the first of the units.
struct Row {
    const float* hidden;  // before: of a GRU
    const float* state;   // cell state before; of a tree's left child
    const float* other;   // cell state of a tree's right child
    const float* given;   // GRU: the inputs' part of the candidate
    float* new_hidden;    // whole vectors
    float* new_state;
};

// `sums` [gates][stride] with UNITS of this row in each; `left` units of the row from here on.
inline void finish(Kind kind, const float* sums, int64_t stride, const Row& row, int64_t left) {
    for (int v = 0; v < VECS; v++, left -= LANES) {
        if (left <= 0) return;
        int at = v * LANES;
        vf g[MAX_GATES];
        for (int gate = 0; gate < GATES[kind]; gate++) g[gate] = load(sums + gate * stride + at);
        vf hidden;
        if (kind == GRU) {
            vf candidate = fast_tanh(fma(sigmoid(g[0]), g[2], load(row.given + at)));
            vf update = sigmoid(g[1]);
            hidden = fma(update, load_some(row.hidden + at, left) - candidate, candidate);
        } else {
            vf state = sigmoid(g[0]) * fast_tanh(g[2]);
            vf out = g[1];
            if (kind == LSTM) {
                state = fma(sigmoid(g[1]), load_some(row.state + at, left), state);
                out = g[3];
            } else if (kind == TREE_INNER) {
                state = fma(sigmoid(g[3]), load_some(row.state + at, left), state);
                state = fma(sigmoid(g[4]), load_some(row.other + at, left), state);
            }
            store_some(row.new_state + at, state, left);
            hidden = sigmoid(out) * fast_tanh(state);
        }
        store(row.new_hidden + at, hidden);
    }
}

}  // namespace batchmaker
