// Operators that treat each row by itself: norms, gates, sums over ranks and experts, and the rows that go on.
#pragma once

#include <cstring>

#include "recurrence.h"
#include "rows.h"
#include "run.h"

namespace orca {

inline void run_normalise(Run& run, const Normalise& op, int thread, int rows) {
    const int size = op.norm.size;
    float* out = run.own_memory[thread].rows.grow(size);
    run.for_each_row(thread, rows, size, [&](int row) {
        const auto at = [&](int which, int column) {
            return run.registers[which].floats + (int64_t)row * run.registers[which].stride + column;
        };
        normalise(op.norm, at(op.source, op.column), out);
        float* target = at(op.target, op.target_column);
        for (int c = 0; c < size; c++) target[c] = op.accumulates ? target[c] + out[c] : out[c];
    });
}

inline void run_gate(Run& run, const Gate& op, int thread, int rows) {
    run.for_each_row(thread, rows, op.size, [&](int row) {
        const auto at = [&](int which) { return run.registers[which].floats + row * run.registers[which].stride; };
        let_through(op, at(op.source), at(op.gate) + op.gate_column, at(op.target));
    });
}

inline void run_combine(Run& run, const Combine& op, int thread, int rows) {
    const Routing& routing = run.routings[op.routing];
    const Register& target = run.registers[op.target];
    const float* entries = run.registers[op.source].floats;
    const int size = target.width, chosen = routing.num_chosen;
    run.for_each_row(thread, rows, size * chosen, [&](int row) {
        const int at = row * chosen;
        const float* shared = op.shared < 0 ? nullptr : run.registers[op.shared].floats + row * run.registers[op.shared].stride;
        vf gate = splat(1.0f);
        if (op.gate >= 0) gate = sigmoid(splat(run.registers[op.gate].floats[row * run.registers[op.gate].stride]));
        float* to = target.floats + row * target.stride;
        for (int c = 0; c < size; c += LANES) {
            const int lanes = std::min(LANES, size - c);
            vf total{};
            for (int i = at; i < at + chosen; i++) {
                vf x = load_some(entries + (int64_t)routing.entries[i] * size + c, lanes);
                if (op.biases) x += load_some(op.biases + (int64_t)routing.experts[i] * op.stride + c, lanes);
                total = fma(splat(routing.weights[i]), x, total);
            }
            if (shared) total = fma(gate, load_some(shared + c, lanes), total);
            store_some(to + c, op.accumulates ? total + load_some(to + c, lanes) : total, lanes);
        }
    });
}

// All threads wait for the other ranks and add their sums. Sums of an aborted meeting are wrong and unused.
inline void run_reduce(Run& run, const Reduce& op, int thread, int rows, uint32_t number) {
    const Register& target = run.registers[op.target];
    const int size = target.width;
    run.meeting->arrive(number, (int64_t)rows * size);
    run.meeting->wait(number);
    run.for_each_row(thread, rows, size, [&](int row) {
        float* to = target.floats + row * target.stride;
        for (int c = 0; c < size; c += LANES) {
            const int lanes = std::min(LANES, size - c);
            vf x = add_ranks(run.meeting->num_ranks, [&](int rank) {
                return load_some(run.meeting->slot(number, rank) + (int64_t)row * size + c, lanes);
            });
            if (op.bias) x += load(op.bias + c);
            store_some(to + c, op.accumulates ? x + load_some(to + c, lanes) : x, lanes);
        }
    });
}

// Gather the sampled rows in place, in one thread: each moves to a lower index or stays.
inline void run_gather_rows(Run& run, const GatherRows& op, int thread) {
    if (run.batch->num_sampled == run.batch->num_rows) return;
    const Register& all = run.registers[op.taken];
    const int64_t nbytes = all.width * (all.is_bf16 ? sizeof(uint16_t) : sizeof(float));
    char* rows = (char*)all.floats;
    run.pool.for_each(thread, 1, [&](int) {
        for (int i = 0; i < run.batch->num_sampled; i++) std::memmove(rows + i * nbytes, rows + run.batch->sampled[i] * nbytes, nbytes);
    });
}

}  // namespace orca
