// From the structure of a cell graph to its plan, as reference.py and subgraphs.py have it: in one call, since trees
// are new with nearly every request.
#include <mlsys/layout.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

using Numbers = std::vector<int64_t>;

enum Column { SUB, NEXT, SLOT, COLUMNS };
enum SubColumn {
    REQUEST, PINNED, UNSUBMITTED, UNFINISHED, WAITING, FOLLOWING, START, END, RANK, STOP, CELL, READY, SUB_COLUMNS
};
constexpr int64_t NEVER = INT64_MAX / 2;
MLSYS_CONSTANTS(
    SUB, NEXT, SLOT, COLUMNS, REQUEST, PINNED, UNSUBMITTED, UNFINISHED, WAITING, FOLLOWING, START, END, RANK, STOP, CELL,
    READY, SUB_COLUMNS, NEVER);

struct Layout {
    int64_t num_cells, num_inputs, num_outputs, num_banks;
    const int64_t* input_banks;   // [cells, inputs]; num_banks where a cell has no such port
    const int64_t* output_banks;  // [cells, outputs]
};
MLSYS_STRUCT(Layout, num_cells, num_inputs, num_outputs, num_banks, input_banks, output_banks);

int64_t find(Numbers& root, int64_t node) {
    while (root[node] != node) node = root[node] = root[root[node]];
    return node;
}

// A list of at most `stride` numbers for each node.
struct Lists {
    int64_t stride;
    Numbers numbers, sizes;

    Lists(int64_t count, int64_t stride) : stride(stride), numbers(count * stride), sizes(count, 0) {}
    int64_t* begin(int64_t node) { return &numbers[node * stride]; }
    int64_t* end(int64_t node) { return begin(node) + sizes[node]; }
    void add(int64_t node, int64_t number) { begin(node)[sizes[node]++] = number; }
};

struct List {
    int64_t *first, *last;
    int64_t* begin() const { return first; }
    int64_t* end() const { return last; }
    int64_t size() const { return last - first; }
};

// A structure as structure.py packs it, node by node.
struct Structure {
    const int64_t *at, *ranges;
    int64_t count, num_results, must_connect, num_parts, num_ranges;
    Numbers cells, codes, results;

    explicit Structure(const int64_t* from) : at(from) {
        count = *at++, num_results = *at++, must_connect = *at++, num_parts = *at++, num_ranges = *at++;
        ranges = at, at += 2 * num_ranges;
    }

    // False: a wire comes from a node that there is not.
    bool expand(const Layout& layout) {
        const int64_t inputs = layout.num_inputs, outputs = layout.num_outputs;
        for (int64_t i = 0; i < num_ranges; i++)
            for (int64_t node = ranges[2 * i]; node < ranges[2 * i + 1]; node++) results.push_back(node);
        cells.resize(count), codes.assign(count * inputs, 0);
        int64_t start = 0;
        while (num_parts--) {
            const int64_t cell = at[0], size = at[1], each = at[2], carried = at[3], first = at[4], wired = at[5];
            at += 6;
            std::fill_n(&cells[start], size, cell);
            int64_t* own = &codes[start * inputs];
            for (int64_t i = 0; i < each; i++, at += 2)
                for (int64_t n = 0; n < size; n++) own[n * inputs + at[0]] = -1 - (at[1] + n);
            for (int64_t i = 0; i < carried; i++, at += 2)
                for (int64_t n = 1; n < size; n++) own[n * inputs + at[0]] = 1 + (start + n - 1) * outputs + at[1];
            for (int64_t i = 0; i < first; i++, at += 2) own[at[0]] = at[1];
            for (int64_t i = 0; i < wired; i++, at += 2 + size) {
                const int64_t input = at[0], output = at[1], *nodes = at + 2;
                for (int64_t n = 0; n < size; n++) {
                    if (output >= 0 && (nodes[n] < 0 || nodes[n] >= count)) return false;
                    own[n * inputs + input] = output < 0 ? nodes[n] : 1 + nodes[n] * outputs + output;
                }
            }
            start += size;
        }
        return true;
    }
};

struct Planner {
    const Layout& layout;
    int64_t count;           // nodes
    const int64_t* cells;    // [count]
    const int64_t* codes;    // [count, inputs]
    const int64_t* results;  // [num_results] nodes
    int64_t num_results;
    Lists preds, internal;  // what feeds a node, rising, each once; of these, those in its own subgraph
    Numbers topological, sub_of, place, order, waiting, next, owner;
    Numbers sub_start, sub_ready, sub_waiting, sub_next, more, sub_more;

    Planner(const Layout& layout, int64_t count, const int64_t* cells, const int64_t* codes, const int64_t* results,
            int64_t num_results)
        : layout(layout), count(count), cells(cells), codes(codes), results(results), num_results(num_results),
          preds(count, layout.num_inputs), internal(count, layout.num_inputs) {}

    List before(int64_t node) { return {preds.begin(node), preds.end(node)}; }
    List inside(int64_t node) { return {internal.begin(node), internal.end(node)}; }
    int64_t code(int64_t node, int64_t input) const { return codes[node * layout.num_inputs + input]; }
    int64_t source(int64_t code) const { return (code - 1) / layout.num_outputs; }
    int64_t output(int64_t code) const { return (code - 1) % layout.num_outputs; }
    int64_t in_bank(int64_t node, int64_t input) const {
        return layout.input_banks[cells[node] * layout.num_inputs + input];
    }
    int64_t out_bank(int64_t node, int64_t output) const {
        return layout.output_banks[cells[node] * layout.num_outputs + output];
    }

    // Whether each wire leads from an output that exists to an input of its bank; finds the nodes before each.
    bool connect() {
        for (int64_t node = 0; node < count; node++) {
            for (int64_t i = 0; i < layout.num_inputs; i++) {
                int64_t wire = code(node, i);
                if (wire <= 0) continue;
                if (source(wire) >= count || out_bank(source(wire), output(wire)) != in_bank(node, i)) return false;
                preds.add(node, source(wire));
            }
            std::sort(preds.begin(node), preds.end(node));
            preds.sizes[node] = std::unique(preds.begin(node), preds.end(node)) - preds.begin(node);
        }
        return true;
    }

    bool sort_topologically() {
        bool is_sorted = true;
        for (int64_t node = 0; node < count; node++)
            is_sorted = is_sorted && (!before(node).size() || preds.end(node)[-1] < node);
        topological.resize(count);
        std::iota(topological.begin(), topological.end(), 0);
        if (is_sorted) return true;
        Numbers missing(preds.sizes);
        std::vector<Numbers> succs(count);
        topological.clear();
        for (int64_t node = 0; node < count; node++) {
            for (int64_t pred : before(node)) succs[pred].push_back(node);
            if (!missing[node]) topological.push_back(node);
        }
        for (size_t at = 0; at < topological.size(); at++)
            for (int64_t succ : succs[topological[at]])
                if (--missing[succ] == 0) topological.push_back(succ);
        return (int64_t)topological.size() == count;
    }

    // Whether all nodes hang together, if they must, and each leads to a result.
    bool is_connected(bool must_connect) {
        std::vector<uint8_t> leads(count, 0);
        for (int64_t i = 0; i < num_results; i++) leads[results[i]] = 1;
        if (must_connect && std::count(leads.begin(), leads.end(), 1) > 1) {
            Numbers root(count);
            std::iota(root.begin(), root.end(), 0);
            for (int64_t node = 0; node < count; node++)
                for (int64_t pred : before(node)) root[find(root, pred)] = find(root, node);
            for (int64_t node = 0; node < count; node++)
                if (find(root, node) != find(root, 0)) return false;
        }
        for (int64_t at = count - 1; at >= 0; at--)
            if (leads[topological[at]])
                for (int64_t pred : before(topological[at])) leads[pred] = 1;
        return std::count(leads.begin(), leads.end(), 1) == count;
    }

    // Nodes of equal stage and root are a subgraph; numbers both anew.
    void group() {
        Numbers stage(count, 0), root(count);
        std::iota(root.begin(), root.end(), 0);
        for (int64_t node : topological) {
            for (int64_t pred : before(node))
                stage[node] = std::max(stage[node], stage[pred] + (cells[pred] != cells[node]));
            for (int64_t pred : before(node))
                if (stage[pred] == stage[node] && cells[pred] == cells[node]) root[find(root, pred)] = find(root, node);
        }
        Numbers number(count, -1), roots;  // roots in order of their first node, then of their stage
        for (int64_t node : topological) {
            int64_t own = find(root, node);
            if (number[own] < 0) number[own] = 0, roots.push_back(own);
        }
        std::stable_sort(roots.begin(), roots.end(), [&](int64_t a, int64_t b) { return stage[a] < stage[b]; });
        int64_t subs = roots.size();
        for (int64_t sub = 0; sub < subs; sub++) number[roots[sub]] = sub;
        Numbers size(subs, 0);
        sub_of.resize(count), sub_start.resize(subs), sub_ready.assign(subs, 0);
        for (int64_t node : topological) {
            int64_t sub = sub_of[node] = number[find(root, node)];
            for (int64_t pred : before(node))
                if (sub_of[pred] == sub) internal.add(node, pred);
            size[sub]++;
            sub_ready[sub] += !inside(node).size();
        }
        for (int64_t sub = 0, at = 0; sub < subs; at += size[sub++]) sub_start[sub] = at;
        Numbers at_ready(sub_start), at_other(subs);
        for (int64_t sub = 0; sub < subs; sub++) at_other[sub] = sub_start[sub] + sub_ready[sub];
        order.resize(count), place.resize(count);
        for (int64_t node : topological) {
            int64_t sub = sub_of[node];
            order[place[node] = inside(node).size() ? at_other[sub]++ : at_ready[sub]++] = node;
        }
    }

    void link_nodes() {
        Numbers readers(count, 0);
        for (int64_t node = 0; node < count; node++)
            for (int64_t pred : before(node)) readers[pred]++;
        next.assign(count, -1), waiting.resize(count), owner.resize(count);
        for (int64_t here = 0; here < count; here++) {
            int64_t node = order[here];
            waiting[here] = inside(node).size();
            owner[here] = here;
            for (int64_t pred : inside(node)) {
                int64_t there = place[pred];
                if (next[there] < 0) next[there] = here;
                else more.insert(more.end(), {there, here});
                if (owner[here] == here && readers[pred] == 1) owner[here] = owner[there];
            }
        }
    }

    void link_subgraphs() {
        int64_t subs = sub_start.size();
        std::vector<std::pair<int64_t, int64_t>> pairs;  // (a subgraph, one before it)
        for (int64_t node = 0; node < count; node++)
            for (int64_t pred : before(node))
                if (sub_of[pred] != sub_of[node]) pairs.push_back({sub_of[node], sub_of[pred]});
        std::sort(pairs.begin(), pairs.end());
        pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
        sub_next.assign(subs, -1), sub_waiting.assign(subs, 0);
        for (auto [sub, other] : pairs) {
            sub_waiting[sub]++;
            if (sub_next[other] < 0) sub_next[other] = sub;
            else sub_more.insert(sub_more.end(), {other, sub});
        }
    }

    int64_t end_of(int64_t sub) const {
        return sub + 1 < (int64_t)sub_start.size() ? sub_start[sub + 1] : count;
    }

    // Plan.nodes and Plan.node_bases; rows needed by bank.
    void place_rows(int64_t* nodes, int64_t* bases, int64_t* num_rows) {
        int64_t none = layout.num_banks, first_output = COLUMNS + layout.num_inputs;
        int64_t width = first_output + layout.num_outputs, of_nodes = none + 1, of_subs = none + 2, of_slots = none + 3;
        std::fill(num_rows, num_rows + none, 0);
        for (int64_t node = 0; node < count; node++)
            for (int64_t i = 0; i < layout.num_inputs; i++)
                if (code(node, i) < 0) {
                    int64_t& rows = num_rows[in_bank(node, i)];
                    rows = std::max(rows, -code(node, i));
                }
        for (int64_t here = 0; here < count; here++) {
            int64_t *row = nodes + here * width, *base = bases + here * width, node = order[here];
            row[SUB] = sub_of[node], base[SUB] = of_subs;
            row[NEXT] = next[here], base[NEXT] = next[here] < 0 ? none : of_nodes;
            row[SLOT] = -1, base[SLOT] = none;
            for (int64_t o = 0; o < layout.num_outputs; o++) {
                int64_t bank = base[first_output + o] = out_bank(node, o);
                int64_t& own = row[first_output + o] = 0;
                if (owner[here] != here) own = nodes[owner[here] * width + first_output + o];
                else if (bank < none) own = num_rows[bank]++;
            }
        }
        for (int64_t i = 0; i < num_results; i++) {
            int64_t here = place[results[i]];
            nodes[here * width + SLOT] = i, bases[here * width + SLOT] = of_slots;
        }
        for (int64_t here = 0; here < count; here++)
            for (int64_t i = 0; i < layout.num_inputs; i++) {
                int64_t from = code(order[here], i), &row = nodes[here * width + COLUMNS + i];
                row = from > 0 ? nodes[place[source(from)] * width + first_output + output(from)] : from ? -1 - from : 0;
                bases[here * width + COLUMNS + i] = from ? in_bank(order[here], i) : none;
            }
    }

    void write_subgraphs(int64_t* subs, int64_t* bases) {
        enum Base { NONE, OF_NODES, OF_SUBS, INDEX };
        for (size_t sub = 0; sub < sub_start.size(); sub++, subs += SUB_COLUMNS, bases += SUB_COLUMNS) {
            int64_t size = end_of(sub) - sub_start[sub];
            const int64_t columns[SUB_COLUMNS] = {0, -1, size, size, sub_waiting[sub], sub_next[sub], sub_start[sub],
                                                  end_of(sub), 0, NEVER, cells[order[sub_start[sub]]], sub_ready[sub]};
            std::memcpy(subs, columns, sizeof columns);
            std::fill(bases, bases + SUB_COLUMNS, (int64_t)NONE);
            bases[REQUEST] = INDEX, bases[START] = bases[END] = OF_NODES;
            bases[FOLLOWING] = sub_next[sub] < 0 ? NONE : OF_SUBS;
        }
    }

    // What a chain carries along: [1, by input the output of the node before, or -1]; [2] if it is no chain.
    void carry(int64_t sub, const int64_t* nodes, int64_t* found) {
        int64_t inputs = layout.num_inputs, first_output = COLUMNS + inputs, width = first_output + layout.num_outputs;
        std::fill(found, found + 1 + inputs, -1);
        found[0] = 0;
        int64_t start = sub_start[sub], end = end_of(sub);
        if (end - start == 1) return;
        found[0] = 2;
        bool carries = false;
        for (int64_t i = 0; i < inputs; i++) {
            int64_t wire = code(order[start + 1], i);
            carries = carries || wire > 0;
            for (int64_t here = start + 1; here < end; here++) {
                int64_t other = code(order[here], i);
                if ((other > 0) != (wire > 0)) return;
                if (wire > 0 && (place[source(other)] != here - 1 || output(other) != output(wire))) return;
            }
        }
        const int64_t* rows = nodes + start * width + first_output;
        for (int64_t here = 1; here < end - start; here++)
            if (!std::equal(rows, rows + layout.num_outputs, rows + here * width)) return;
        if (!carries) return;
        found[0] = 1;
        for (int64_t i = 0; i < inputs; i++) {
            int64_t wire = code(order[start + 1], i);
            if (wire > 0) found[1 + i] = output(wire);
        }
    }

    // Each different carry of each cell type: [cell, whether nodes join, whether others wait, carry]; returns the end.
    int64_t* write_kinds(const int64_t* nodes, int64_t* out) {
        int64_t width = 4 + layout.num_inputs, *begin = out;
        for (size_t sub = 0; sub < sub_start.size(); sub++) {
            int64_t joins = 0, cell = cells[order[sub_start[sub]]], *other = begin;
            for (int64_t here = sub_start[sub]; here < end_of(sub); here++) joins = joins || waiting[here] > 1;
            out[0] = cell, out[1] = joins, out[2] = sub_next[sub] >= 0;
            carry(sub, nodes, out + 3);
            while (!std::equal(other, other + width, out)) other += width;
            if (other == out) out += width;
        }
        return out;
    }
};

}  // namespace

extern "C" {

// Plans a structure as structure.py packs it. Writes to `out`, one after another: nodes and node_bases
// [count, columns], waiting [count], subs and sub_bases [subs, SUB_COLUMNS], origin [count], and of what is asked for
// [4, num_results] nodes, slots, subgraphs and cells; then kinds, pairs of further successors and of subgraphs. To
// `sizes`: how many numbers are before the kinds, subgraphs, numbers of the last three, the cell that all results are
// of or -1, and the rows needed by bank. Returns whether the structure is acceptable.
int32_t batchmaker_plan(const Layout* layout, const int64_t* packed, int64_t* out, int64_t* sizes) {
    Structure structure(packed);
    if (!structure.expand(*layout)) return 0;
    const int64_t count = structure.count, num_results = structure.num_results;
    const Numbers &cells = structure.cells, &results = structure.results;
    Planner planner(*layout, count, cells.data(), structure.codes.data(), results.data(), num_results);
    if (!planner.connect() || !planner.sort_topologically() || !planner.is_connected(structure.must_connect)) return 0;
    planner.group();
    planner.link_nodes();
    planner.link_subgraphs();
    int64_t width = COLUMNS + layout->num_inputs + layout->num_outputs, subs = planner.sub_start.size();
    int64_t* nodes = out;
    planner.place_rows(nodes, nodes + count * width, sizes + 6);
    out += 2 * count * width;
    out = std::copy(planner.waiting.begin(), planner.waiting.end(), out);
    planner.write_subgraphs(out, out + subs * SUB_COLUMNS);
    out += 2 * subs * SUB_COLUMNS;
    out = std::copy(planner.order.begin(), planner.order.end(), out);
    int64_t result_cell = cells[results[0]];
    for (int64_t i = 0; i < num_results; i++) {
        int64_t here = planner.place[results[i]], cell = cells[results[i]];
        const int64_t asked[] = {here, nodes[here * width + SLOT], nodes[here * width + SUB], cell};
        for (int64_t j = 0; j < 4; j++) out[j * num_results + i] = asked[j];
        if (cell != result_cell) result_cell = -1;
    }
    out += 4 * num_results;
    int64_t* kinds = out;
    out = planner.write_kinds(nodes, kinds);
    sizes[0] = kinds - nodes, sizes[1] = subs, sizes[2] = out - kinds;
    sizes[3] = planner.more.size(), sizes[4] = planner.sub_more.size(), sizes[5] = result_cell;
    out = std::copy(planner.more.begin(), planner.more.end(), out);
    std::copy(planner.sub_more.begin(), planner.sub_more.end(), out);
    return 1;
}
}
MLSYS_FUNCTIONS(batchmaker_plan);
