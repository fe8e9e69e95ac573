// The order of nodes and their grouping into subgraphs, as subgraphs.py has it, for structures that are always new.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace {

using Nodes = std::vector<int64_t>;

int64_t find(Nodes& root, int64_t node) {
    while (root[node] != node) node = root[node] = root[root[node]];
    return node;
}

}  // namespace

extern "C" {

enum Problem : int64_t { CYCLE = -1, DISCONNECTED = -2, NO_RESULT = -3 };

// Nodes [count], which must hang together or need not, their cells, and what feeds each input: sources [count, inputs], -1: nothing. The other arrays are
// written: by new number the old one, next, waiting and whose output rows it has; by subgraph start, ready, waiting and next; the pairs
// of further successors, at most count * inputs of each, and how many there are of both.
// Returns the number of subgraphs or a problem; then `order` has the nodes that are concerned, `num_more[0]` of them.
int64_t batchmaker_group(int64_t count, int64_t inputs, int64_t must_connect, const int64_t* cells, const int64_t* sources,
                         const uint8_t* gives, int64_t* order, int64_t* next, int64_t* waiting, int64_t* owner,
                         int64_t* sub_start, int64_t* sub_ready, int64_t* sub_waiting, int64_t* sub_next,
                         int64_t* more, int64_t* sub_more, int64_t* num_more) {
    std::vector<Nodes> preds(count);
    bool is_sorted = true;
    for (int64_t node = 0; node < count; node++) {
        Nodes& before = preds[node];
        for (int64_t i = 0; i < inputs; i++)
            if (sources[node * inputs + i] >= 0) before.push_back(sources[node * inputs + i]);
        std::sort(before.begin(), before.end());
        before.erase(std::unique(before.begin(), before.end()), before.end());
        is_sorted = is_sorted && (before.empty() || before.back() < node);
    }
    Nodes topological(count);
    if (is_sorted) {
        std::iota(topological.begin(), topological.end(), 0);
    } else {
        Nodes missing(count);
        std::vector<Nodes> succs(count);
        topological.clear();
        for (int64_t node = 0; node < count; node++) {
            missing[node] = preds[node].size();
            for (int64_t pred : preds[node]) succs[pred].push_back(node);
            if (preds[node].empty()) topological.push_back(node);
        }
        for (size_t at = 0; at < topological.size(); at++)
            for (int64_t succ : succs[topological[at]])
                if (--missing[succ] == 0) topological.push_back(succ);
        if ((int64_t)topological.size() < count) {
            num_more[0] = 0;
            for (int64_t node = 0; node < count; node++)
                if (missing[node]) order[num_more[0]++] = node;
            return CYCLE;
        }
    }
    Nodes root(count);
    std::iota(root.begin(), root.end(), 0);
    for (int64_t node = 0; node < count; node++)
        for (int64_t pred : preds[node]) root[find(root, pred)] = find(root, node);
    // With a single result, all that lead to it hang together.
    bool is_open = must_connect && std::count(gives, gives + count, 1) > 1;
    for (int64_t node = 0; is_open && node < count; node++)
        if (find(root, node) != find(root, 0)) return DISCONNECTED;
    std::vector<uint8_t> leads(gives, gives + count);
    for (int64_t at = count - 1; at >= 0; at--)
        if (leads[topological[at]])
            for (int64_t pred : preds[topological[at]]) leads[pred] = 1;
    num_more[0] = 0;
    for (int64_t node = 0; node < count; node++)
        if (!leads[node]) order[num_more[0]++] = node;
    if (num_more[0]) return NO_RESULT;

    // Equal stage and root: one subgraph.
    Nodes stage(count, 0);
    std::iota(root.begin(), root.end(), 0);
    for (int64_t node : topological) {
        for (int64_t pred : preds[node]) stage[node] = std::max(stage[node], stage[pred] + (cells[pred] != cells[node]));
        for (int64_t pred : preds[node])
            if (stage[pred] == stage[node] && cells[pred] == cells[node]) root[find(root, pred)] = find(root, node);
    }
    Nodes first(count, -1), roots;  // by root: its place in `roots`, which is in order of the first node
    for (int64_t node : topological) {
        int64_t own = find(root, node);
        if (first[own] < 0) first[own] = roots.size(), roots.push_back(own);
    }
    std::stable_sort(roots.begin(), roots.end(), [&](int64_t a, int64_t b) { return stage[a] < stage[b]; });
    int64_t subs = roots.size();
    for (int64_t sub = 0; sub < subs; sub++) first[roots[sub]] = sub;
    Nodes sub_of(count), place(count), size(subs, 0);
    std::vector<Nodes> internal(count);
    std::fill(sub_ready, sub_ready + subs, 0);
    for (int64_t node : topological) {
        int64_t sub = sub_of[node] = first[find(root, node)];
        for (int64_t pred : preds[node])
            if (sub_of[pred] == sub) internal[node].push_back(pred);
        size[sub]++;
        sub_ready[sub] += internal[node].empty();
    }
    for (int64_t sub = 0, at = 0; sub < subs; at += size[sub++]) sub_start[sub] = at;
    Nodes at_ready(sub_start, sub_start + subs), at_other(subs);
    for (int64_t sub = 0; sub < subs; sub++) at_other[sub] = sub_start[sub] + sub_ready[sub];
    for (int64_t node : topological) {
        int64_t sub = sub_of[node];
        order[place[node] = internal[node].empty() ? at_ready[sub]++ : at_other[sub]++] = node;
    }
    Nodes readers(count, 0);
    for (const Nodes& before : preds)
        for (int64_t pred : before) readers[pred]++;
    std::fill(next, next + count, -1);
    num_more[0] = num_more[1] = 0;
    for (int64_t here = 0; here < count; here++) {
        int64_t node = order[here];
        waiting[here] = internal[node].size();
        owner[here] = here;
        for (int64_t pred : internal[node]) {
            int64_t there = place[pred];
            if (next[there] < 0) next[there] = here;
            else more[2 * num_more[0]] = there, more[2 * num_more[0]++ + 1] = here;
            if (owner[here] == here && readers[pred] == 1) owner[here] = owner[there];
        }
    }
    std::vector<Nodes> before(subs);
    for (int64_t node = 0; node < count; node++)
        for (int64_t pred : preds[node])
            if (sub_of[pred] != sub_of[node]) before[sub_of[node]].push_back(sub_of[pred]);
    std::fill(sub_next, sub_next + subs, -1);
    for (int64_t sub = 0; sub < subs; sub++) {
        Nodes& others = before[sub];
        std::sort(others.begin(), others.end());
        others.erase(std::unique(others.begin(), others.end()), others.end());
        sub_waiting[sub] = others.size();
        for (int64_t other : others) {
            if (sub_next[other] < 0) sub_next[other] = sub;
            else sub_more[2 * num_more[1]] = other, sub_more[2 * num_more[1]++ + 1] = sub;
        }
    }
    return subs;
}
}
