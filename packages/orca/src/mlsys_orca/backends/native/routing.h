// Experts: which ones a token passes, and the order in which their products take the tokens.
//
// An *entry* is one token at one of its experts. Entries stand expert by expert, and token by token within each, so that
// an expert's products are of neighbouring rows. A token's results are added in the order of its choices, whatever other
// tokens chose: its numbers do not depend on its company.
#pragma once

#include <cmath>
#include <vector>

#include "operators.h"

namespace orca {

struct Routing {
    int num_chosen = 0;
    std::vector<int32_t> experts;   // [rows, chosen], the highest score first
    std::vector<float> weights;     // [rows, chosen]
    std::vector<int32_t> entries;   // [rows, chosen]: index of the token's entry
    std::vector<int32_t> tokens;    // [entries]
    std::vector<int32_t> begins;    // [num_experts + 1] entries
    std::vector<int32_t> next;      // [num_experts]
    std::vector<float> scratch;     // [rows, 2 * num_experts + num_groups]

    void grow(const Route& op, int rows) {
        num_chosen = op.num_chosen;
        const size_t size = (size_t)rows * num_chosen;
        if (experts.size() < size) experts.resize(size), weights.resize(size), entries.resize(size), tokens.resize(size);
        const size_t width = 2 * op.num_experts + op.num_groups;
        if (scratch.size() < rows * width) scratch.resize(rows * width);
        begins.resize(op.num_experts + 1), next.resize(op.num_experts);
    }
};

// Remove and return the first of the largest of `count` numbers.
inline int take_largest(float* from, int count) {
    int at = 0;
    for (int i = 1; i < count; i++)
        if (from[i] > from[at] || from[at] != from[at]) at = i;
    from[at] = -INFINITY;
    return at;
}

inline void softmax_of(float* x, int count) {
    float top = -INFINITY, total = 0.0f;
    for (int i = 0; i < count; i++) top = std::max(top, x[i]);
    for (int i = 0; i < count; i++) total += x[i] = std::exp(x[i] - top);
    for (int i = 0; i < count; i++) x[i] /= total;
}

// Mask the scores in `compared` of groups that are not chosen.
inline void choose_groups(const Route& op, float* compared, float* groups) {
    const int size = op.num_experts / op.num_groups;
    for (int g = 0; g < op.num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++) {
            second = std::max(second, std::min(first, compared[i]));
            first = std::max(first, compared[i]);
        }
        groups[g] = op.group_score == LARGEST || size == 1 ? first : first + second;
    }
    std::vector<bool> is_chosen(op.num_groups);
    for (int i = 0; i < op.num_chosen_groups; i++) is_chosen[take_largest(groups, op.num_groups)] = true;
    for (int i = 0; i < op.num_experts; i++)
        if (!is_chosen[i / size]) compared[i] = -INFINITY;
}

// Choose the experts of one row by its scores.
inline void choose_experts(const Route& op, const float* scores, int row, Routing& out) {
    const int count = op.num_experts, chosen = op.num_chosen;
    float* own = out.scratch.data() + (size_t)row * (2 * count + op.num_groups);
    float* compared = own + count;
    for (int i = 0; i < count; i++) own[i] = op.scoring == SIGMOID ? 1.0f / (1.0f + std::exp(-scores[i])) : scores[i];
    if (op.scoring == SOFTMAX) softmax_of(own, count);
    for (int i = 0; i < count; i++) compared[i] = op.preference ? own[i] + op.preference[i] : own[i];
    if (op.num_chosen_groups < op.num_groups) choose_groups(op, compared, compared + count);
    int32_t* experts = out.experts.data() + (size_t)row * chosen;
    float* weights = out.weights.data() + (size_t)row * chosen;
    float total = 0.0f;
    for (int i = 0; i < chosen; i++) {
        experts[i] = take_largest(compared, count);
        total += weights[i] = own[experts[i]];
    }
    if (op.scoring == SOFTMAX_OF_CHOSEN) softmax_of(weights, chosen);
    for (int i = 0; i < chosen; i++) {
        if (op.sums_to_one) weights[i] /= total + 1e-20f;
        weights[i] *= op.scale;
    }
}

// Bring the entries of all rows into their order.
inline void order_entries(const Route& op, int rows, Routing& out) {
    const int size = rows * op.num_chosen;
    std::fill(out.begins.begin(), out.begins.end(), 0);
    for (int i = 0; i < size; i++) out.begins[out.experts[i] + 1]++;
    for (int e = 0; e < op.num_experts; e++) out.begins[e + 1] += out.begins[e], out.next[e] = out.begins[e];
    for (int i = 0; i < size; i++) {
        out.entries[i] = out.next[out.experts[i]]++;
        out.tokens[out.entries[i]] = i / op.num_chosen;
    }
}

}  // namespace orca
