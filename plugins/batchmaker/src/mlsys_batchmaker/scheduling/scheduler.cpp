// Admission, forming and completion of batches, as admission.py, reference.py and settling.py have them: on the same
// memory, in one call each. For workers of one device.
#include <mlsys/layout.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

enum Column { SUB, NEXT, SLOT, COLUMNS };
enum SubColumn {
    REQUEST, PINNED, UNSUBMITTED, UNFINISHED, WAITING, FOLLOWING, START, END, RANK, STOP, CELL, READY, SUB_COLUMNS
};
enum RequestColumn { LEFT, LEAVING, NODES, SUBS, SLOTS, NUM_SUBS, NUM_SLOTS, ASKED, REQUEST_COLUMNS };
constexpr int64_t UNPINNED = -1, NEVER = INT64_MAX / 2;
MLSYS_CONSTANTS(
    SUB, NEXT, SLOT, COLUMNS, REQUEST, PINNED, UNSUBMITTED, UNFINISHED, WAITING, FOLLOWING, START, END, RANK, STOP, CELL,
    READY, SUB_COLUMNS, NEVER, UNPINNED, LEFT, LEAVING, REQUEST_COLUMNS);

struct Queue;
using MakeRoom = void (*)(int64_t cell, int64_t count);  // at least `count` free places at both ends of its queue

struct Columns {
    int64_t width, num_inputs;
    int64_t* nodes;     // [width] each
    int64_t* waiting;
    int64_t* subs;      // [SUB_COLUMNS] each
    int64_t* requests;  // [REQUEST_COLUMNS] each; ASKED is the address of Plan.asked
    int64_t num_released;

    int64_t* node(int64_t number) const { return nodes + number * width; }
    int64_t* sub(int64_t number) const { return subs + number * SUB_COLUMNS; }
    int64_t* request(int64_t number) const { return requests + number * REQUEST_COLUMNS; }
    bool is_open(int64_t node_number, int64_t worker) const {
        int64_t pinned = sub(node(node_number)[SUB])[PINNED];
        return pinned == UNPINNED || pinned == worker;
    }
};
MLSYS_STRUCT(Columns, width, num_inputs, nodes, waiting, subs, requests, num_released);

// Ready nodes by rank of their subgraph: taken from the front and put back there.
struct Queue {
    int64_t *nodes, *ranks;
    int64_t head, tail, room;
};
MLSYS_STRUCT(Queue, nodes, ranks, head, tail, room);

struct Cell {
    Queue ready;
    int64_t number, num_inputs, num_outputs, max_batch;
    int64_t is_chain, has_joins;
    int64_t last_rank;  // the latest subgraph of which a node was submitted
};
MLSYS_STRUCT(Cell, ready, number, num_inputs, num_outputs, max_batch, is_chain, has_joins, last_rank);

struct Nodes {
    std::vector<int64_t> nodes, ranks;

    void clear() { nodes.clear(), ranks.clear(); }
    void add(int64_t node, int64_t rank) { nodes.push_back(node), ranks.push_back(rank); }
    int64_t size() const { return nodes.size(); }
};

void ensure_room(Cell& cell, int64_t in_front, int64_t behind, MakeRoom make_room) {
    Queue& queue = cell.ready;
    auto lacks = [&] { return queue.head < in_front || queue.room - queue.tail < behind; };
    if (!lacks()) return;
    int64_t count = queue.tail - queue.head, head = (queue.room - count) / 2;
    if (head >= in_front + behind) {  // enough, but at the other end: queues that run empty walk through their memory
        std::memmove(queue.nodes + head, queue.nodes + queue.head, count * sizeof(int64_t));
        std::memmove(queue.ranks + head, queue.ranks + queue.head, count * sizeof(int64_t));
        queue.head = head, queue.tail = head + count;
        return;
    }
    make_room(cell.number, in_front + behind);
    if (lacks()) std::abort();  // out of memory: better than to write beyond it
}

void put_back(Cell& cell, const Nodes& back, MakeRoom make_room) {
    int64_t count = back.size();
    if (!count) return;
    ensure_room(cell, count, 0, make_room);
    Queue& queue = cell.ready;
    int64_t to = queue.head - count, other = queue.head, own = 0;
    queue.head = to;
    while (own < count) {
        bool takes_other = other < queue.tail && queue.ranks[other] < back.ranks[own];
        queue.nodes[to] = takes_other ? queue.nodes[other] : back.nodes[own];
        queue.ranks[to++] = takes_other ? queue.ranks[other++] : back.ranks[own++];
    }
}

void append(Cell& cell, int64_t first, int64_t count, int64_t rank, MakeRoom make_room) {
    ensure_room(cell, 0, count, make_room);
    Queue& queue = cell.ready;
    for (int64_t i = 0; i < count; i++) {
        queue.nodes[queue.tail] = first + i;
        queue.ranks[queue.tail++] = rank;
    }
}

// Forgets the nodes of those ranks, which are sorted.
void remove(Queue& queue, const std::vector<int64_t>& ranks) {
    int64_t to = std::lower_bound(queue.ranks + queue.head, queue.ranks + queue.tail, ranks.front()) - queue.ranks;
    for (int64_t from = to; from < queue.tail; from++) {
        if (std::binary_search(ranks.begin(), ranks.end(), queue.ranks[from])) continue;
        queue.nodes[to] = queue.nodes[from];
        queue.ranks[to++] = queue.ranks[from];
    }
    queue.tail = to;
}

void release(Columns& columns, Cell* cells, int64_t number, MakeRoom make_room) {
    int64_t* sub = columns.sub(number);
    sub[RANK] = columns.num_released++;
    append(cells[sub[CELL]], sub[START], sub[READY], sub[RANK], make_room);
}

// The first nodes that `worker` may take, off the queue.
void take(const Columns& columns, Cell& cell, int64_t worker, bool pins, Nodes& taken) {
    Queue& queue = cell.ready;
    taken.clear();
    int64_t at = queue.head, skipped = 0;
    for (; at < queue.tail && taken.size() < cell.max_batch; at++) {
        if (pins && !columns.is_open(queue.nodes[at], worker)) skipped++;
        else taken.add(queue.nodes[at], queue.ranks[at]);
    }
    while (skipped && !columns.is_open(queue.nodes[at - 1], worker)) at--, skipped--;  // those behind the last taken
    int64_t to = at;
    for (int64_t from = at - 1; skipped; from--) {
        if (columns.is_open(queue.nodes[from], worker)) continue;
        queue.nodes[--to] = queue.nodes[from];
        queue.ranks[to] = queue.ranks[from];
        skipped--;
    }
    queue.head = to;
}

using Further = std::unordered_map<int64_t, std::vector<int64_t>>;  // successors beyond the first

// A task's arrays in one: this, then `Former::write`.
struct Task {
    int64_t rows, steps, num_results, num_fresh, has_lengths, is_continued, size;  // size: of all, in numbers
};
constexpr int64_t HEADER = sizeof(Task) / sizeof(int64_t);

struct View {  // arrays of a task in memory
    const Task& task;
    const int64_t *nodes, *subs, *fresh, *lengths, *result_steps, *result_rows;

    explicit View(const int64_t* memory) : task(*(const Task*)memory) {
        nodes = memory + HEADER, subs = nodes + task.rows, fresh = subs + task.rows;
        lengths = fresh + task.num_fresh;
        result_steps = lengths + (task.has_lengths ? task.rows : 0), result_rows = result_steps + task.num_results;
    }
    int64_t steps(int64_t row) const { return task.has_lengths ? lengths[row] : task.steps; }
};

struct Former {
    struct Last {
        int64_t cell = -1;
        Nodes nodes;
    };
    std::vector<Last> last;  // by worker: its task before
    Further more, sub_more;  // further successors by node, further waiting subgraphs by subgraph
    Nodes taken, following, ready;
    std::vector<int64_t> lengths, order, fresh, result_steps, result_rows, slots, ends;
    Task task;
    // Scratch space of settle().
    std::vector<int64_t> ended, cut, ranks, released, finished, there;
    std::vector<uint8_t> was_over;

    // FormBatchedTask, pinning and UpdateNodesDependency; returns whether there is a task.
    bool form(Columns& columns, Cell& cell, int64_t worker, bool pins, int64_t max_steps, bool is_blind,
              MakeRoom make_room) {
        take(columns, cell, worker, pins, taken);
        task = {};
        task.rows = taken.size(), task.steps = 1;
        if (!task.rows) return false;
        lengths.assign(task.rows, 1);
        int64_t least = max_steps;
        for (int64_t row = 0; row < task.rows; row++) {
            int64_t* sub = columns.sub(columns.node(taken.nodes[row])[SUB]);
            if (pins) sub[PINNED] = worker;
            if (max_steps > 1) lengths[row] = std::min(sub[END] - taken.nodes[row], max_steps);
            sub[UNSUBMITTED] -= lengths[row];
            task.steps = std::max(task.steps, lengths[row]);
            least = std::min(least, lengths[row]);
        }
        if (!is_blind) {
            following.clear();
            for (int64_t row = 0; row < task.rows; row++)
                following.add(taken.nodes[row] + lengths[row] - 1, taken.ranks[row]);
            release_successors(columns, cell, make_room);
        }
        task.has_lengths = least < task.steps;
        if (task.has_lengths) sort_by_length();
        find_results(columns);
        int64_t newest = cell.last_rank;
        fresh.clear();
        for (int64_t row = 0; row < task.rows; row++) {
            if (taken.ranks[row] > cell.last_rank) fresh.push_back(row);
            newest = std::max(newest, taken.ranks[row]);
        }
        cell.last_rank = newest, task.num_fresh = fresh.size();
        note(cell, worker);
        int64_t each = 2 + cell.num_outputs + task.has_lengths + task.steps * cell.num_inputs;
        task.size = HEADER + task.rows * each + task.num_fresh + 3 * task.num_results;
        return true;
    }

    // Nodes of the same subgraphs that wait for the nodes in `following` alone become ready; `following` is in order of
    // rank.
    void release_successors(Columns& columns, Cell& cell, MakeRoom make_room) {
        ready.clear();
        for (int64_t i = 0, j = 0; i < following.size(); i = j) {  // the nodes of a subgraph: further successors last
            int64_t rank = following.ranks[i];
            for (j = i; j < following.size() && following.ranks[j] == rank; j++) {
                int64_t next = columns.node(following.nodes[j])[NEXT];
                if (next >= 0) note_ready(columns, cell, next, rank);
            }
            for (int64_t at = i; at < j && !more.empty(); at++)
                if (auto found = more.find(following.nodes[at]); found != more.end())
                    for (int64_t next : found->second) note_ready(columns, cell, next, rank);
        }
        put_back(cell, ready, make_room);
    }

    void note_ready(Columns& columns, const Cell& cell, int64_t node, int64_t rank) {
        if (!(cell.has_joins && --columns.waiting[node])) ready.add(node, rank);
    }

    void sort_by_length() {
        order.resize(task.rows);
        for (int64_t row = 0; row < task.rows; row++) order[row] = row;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
        for (std::vector<int64_t>* each : {&taken.nodes, &taken.ranks, &lengths}) {
            ends.resize(task.rows);
            for (int64_t row = 0; row < task.rows; row++) ends[row] = (*each)[order[row]];
            each->swap(ends);
        }
    }

    void find_results(const Columns& columns) {
        result_steps.clear(), result_rows.clear(), slots.clear();
        for (int64_t step = 0; step < task.steps; step++)
            for (int64_t row = 0; row < task.rows && lengths[row] > step; row++) {
                int64_t slot = columns.node(taken.nodes[row] + step)[SLOT];
                if (slot >= 0) result_steps.push_back(step), result_rows.push_back(row), slots.push_back(slot);
            }
        task.num_results = slots.size();
    }

    // Sets is_continued: the task continues the worker's previous task row by row, whose states are still at hand.
    void note(const Cell& cell, int64_t worker) {
        if ((int64_t)last.size() <= worker) last.resize(worker + 1);
        Last& before = last[worker];
        bool goes_on = before.cell == cell.number && before.nodes.ranks == taken.ranks;
        for (int64_t row = 0; row < task.rows && goes_on; row++)
            goes_on = before.nodes.nodes[row] + 1 == taken.nodes[row];
        task.is_continued = goes_on;
        before.cell = cell.is_chain ? cell.number : -1;
        before.nodes.ranks = taken.ranks;
        before.nodes.nodes.resize(task.rows);
        for (int64_t row = 0; row < task.rows; row++) before.nodes.nodes[row] = taken.nodes[row] + lengths[row] - 1;
    }

    // The task, nodes, subgraphs, fresh rows, lengths, result steps and rows, slots, rows to read and rows to write.
    void write(const Columns& columns, const Cell& cell, int64_t* out) const {
        std::memcpy(out, &task, sizeof task);
        out = std::copy(taken.nodes.begin(), taken.nodes.end(), out + HEADER);
        for (int64_t node : taken.nodes) *out++ = columns.node(node)[SUB];
        out = std::copy(fresh.begin(), fresh.end(), out);
        if (task.has_lengths) out = std::copy(lengths.begin(), lengths.end(), out);
        for (const std::vector<int64_t>* each : {&result_steps, &result_rows, &slots})
            out = std::copy(each->begin(), each->end(), out);
        for (int64_t step = 0; step < task.steps; step++)
            for (int64_t row = 0; row < task.rows; row++) {
                const int64_t* node = columns.node(taken.nodes[row] + std::min(step, lengths[row] - 1));
                out = std::copy(node + COLUMNS, node + COLUMNS + cell.num_inputs, out);
            }
        for (int64_t row = 0; row < task.rows; row++) {
            const int64_t* node = columns.node(taken.nodes[row] + lengths[row] - 1) + COLUMNS + columns.num_inputs;
            out = std::copy(node, node + cell.num_outputs, out);
        }
    }

    // A task is completed. Writes the requests of its fresh rows, of chains that stopped and that have no unfinished
    // subgraph (`write_finished`) to `out`, one after another; how many there are of each, the cells computed in vain,
    // how many results the finished have and the address of their slots to `sizes`.
    void settle(Columns& columns, Cell* cells, Cell& cell, const int64_t* memory, bool pins, bool releases,
                const int64_t* values, int64_t stop, int64_t* out, int64_t* sizes, MakeRoom make_room) {
        View view(memory);
        const Task& done = view.task;
        for (int64_t row = 0; row < done.rows; row++) {
            int64_t* sub = columns.sub(view.subs[row]);
            sub[UNFINISHED] -= view.steps(row);
            if (pins && sub[UNFINISHED] == sub[UNSUBMITTED]) sub[PINNED] = UNPINNED;
        }
        int64_t* starts = out;
        for (int64_t i = 0; i < done.num_fresh; i++) {  // leaves of one tree are neighbours: it is told once
            int64_t request = columns.sub(view.subs[view.fresh[i]])[REQUEST];
            if (out == starts || out[-1] != request) *out++ = request;
        }
        sizes[0] = out - starts, sizes[3] = 0;
        cut.clear(), ended.clear();
        if (values) {
            find_stops(columns, cell, view, values, stop, sizes);
            if (releases) go_on(columns, cell, view, make_room);
        } else {
            for (int64_t row = 0; row < done.rows; row++)  // rows of one subgraph are neighbours
                if (!columns.sub(view.subs[row])[UNFINISHED] && (ended.empty() || ended.back() != view.subs[row]))
                    ended.push_back(view.subs[row]);
        }
        out = std::copy(cut.begin(), cut.end(), out);
        sizes[1] = cut.size();
        sizes[2] = end_subgraphs(columns, cells, out, make_room);
        sizes[4] = there.size(), sizes[5] = (int64_t)there.data();
    }

    void find_stops(Columns& columns, Cell& cell, const View& view, const int64_t* values, int64_t stop,
                    int64_t* sizes) {
        const Task& done = view.task;
        was_over.resize(done.rows);
        for (int64_t row = 0; row < done.rows; row++) {
            was_over[row] = columns.sub(view.subs[row])[STOP] != NEVER;
            if (was_over[row]) sizes[3] += view.steps(row);
        }
        for (int64_t i = 0; i < done.num_results; i++) {
            int64_t row = view.result_rows[i], &known = columns.sub(view.subs[row])[STOP];
            if (values[i] == stop && !was_over[row]) known = std::min(known, view.nodes[row] + view.result_steps[i]);
        }
        ranks.clear();
        for (int64_t row = 0; row < done.rows; row++) {
            const int64_t* sub = columns.sub(view.subs[row]);
            if (was_over[row]) continue;
            bool stops = sub[STOP] != NEVER;
            if (stops) {
                sizes[3] += view.nodes[row] + view.steps(row) - 1 - sub[STOP];
                cut.push_back(sub[REQUEST]), ranks.push_back(sub[RANK]);
            }
            if (stops || !sub[UNFINISHED]) ended.push_back(view.subs[row]);
        }
        std::sort(ranks.begin(), ranks.end());
        if (!ranks.empty()) remove(cell.ready, ranks);
    }

    // The successors of nodes whose outcome had to be known first.
    void go_on(Columns& columns, Cell& cell, const View& view, MakeRoom make_room) {
        following.clear();
        for (int64_t row = 0; row < view.task.rows; row++) {
            const int64_t* sub = columns.sub(view.subs[row]);
            if (sub[STOP] != NEVER || !sub[UNFINISHED] || columns.request(sub[REQUEST])[LEAVING]) continue;
            following.add(view.nodes[row], sub[RANK]);
        }
        release_successors(columns, cell, make_room);
    }

    // Releases what waited for the ended subgraphs; writes the requests that have no others, and returns how many.
    int64_t end_subgraphs(Columns& columns, Cell* cells, int64_t* out, MakeRoom make_room) {
        released.clear(), finished.clear();
        for (int64_t number : ended) {
            const int64_t* sub = columns.sub(number);
            int64_t* request = columns.request(sub[REQUEST]);
            if (request[LEAVING]) continue;
            if (sub[FOLLOWING] >= 0) note_finished(columns, sub[FOLLOWING]);
            if (!sub_more.empty())
                if (auto found = sub_more.find(number); found != sub_more.end())
                    for (int64_t other : found->second) note_finished(columns, other);
            if (!--request[LEFT]) finished.push_back(sub[REQUEST]);
        }
        std::sort(released.begin(), released.end());
        for (int64_t number : released) release(columns, cells, number, make_room);
        std::sort(finished.begin(), finished.end());
        there.clear();
        for (int64_t number : finished) out = write_finished(columns, number, out);
        return finished.size();
    }

    // A finished request: which it is, how many of its results there are (their slots go to `there`), cells computed
    // for it, whether something of it is in flight. A chain that stopped counts up to its stop.
    int64_t* write_finished(const Columns& columns, int64_t number, int64_t* out) {
        const int64_t *request = columns.request(number), *asked = (const int64_t*)request[ASKED];
        int64_t count = request[NUM_SLOTS], before = there.size(), num_cells = 0, is_in_flight = 0;
        for (int64_t i = 0; i < count; i++)
            if (request[NODES] + asked[i] <= columns.sub(request[SUBS] + asked[2 * count + i])[STOP])
                there.push_back(request[SLOTS] + asked[count + i]);
        for (int64_t at = request[SUBS]; at < request[SUBS] + request[NUM_SUBS]; at++) {
            const int64_t* sub = columns.sub(at);
            num_cells += std::min(sub[END], sub[STOP] + 1) - sub[START];
            is_in_flight |= sub[UNSUBMITTED] != sub[UNFINISHED];
        }
        *out++ = number, *out++ = there.size() - before, *out++ = num_cells, *out++ = is_in_flight;
        return out;
    }

    void note_finished(Columns& columns, int64_t waits) {
        if (!--columns.sub(waits)[WAITING]) released.push_back(waits);
    }
};

}  // namespace

extern "C" {

Former* batchmaker_former() { return new Former; }

void batchmaker_former_free(Former* former) { delete former; }

// A request's rows of the columns, as Plan.block has them relative to `bases`: of each bank and of nothing, then the
// starts of its nodes, subgraphs and slots, then its index. What waits for nothing is released.
void batchmaker_admit(Columns* columns, Cell* cells, const int64_t* block, int64_t num_nodes, int64_t num_subs,
                      int64_t num_slots, const int64_t* bases, int64_t num_banks, MakeRoom make_room) {
    const int64_t of_nodes = bases[num_banks + 1], of_subs = bases[num_banks + 2], of_slots = bases[num_banks + 3];
    const int64_t index = bases[num_banks + 4];
    int64_t size = num_nodes * columns->width, subs_size = num_subs * SUB_COLUMNS;
    int64_t* node = columns->node(of_nodes);
    for (int64_t i = 0; i < size; i++) node[i] = block[i] + bases[block[size + i]];
    block += 2 * size;
    std::copy(block, block + num_nodes, columns->waiting + of_nodes);
    block += num_nodes;
    const int64_t sub_bases[] = {0, of_nodes, of_subs, index};
    int64_t* sub = columns->sub(of_subs);
    for (int64_t i = 0; i < subs_size; i++) sub[i] = block[i] + sub_bases[block[subs_size + i]];
    const int64_t* asked = block + 2 * subs_size + num_nodes;
    const int64_t request[] = {num_subs, 0, of_nodes, of_subs, of_slots, num_subs, num_slots, (int64_t)asked};
    std::copy(request, request + REQUEST_COLUMNS, columns->request(index));
    for (int64_t number = of_subs; number < of_subs + num_subs; number++)
        if (!columns->sub(number)[WAITING]) release(*columns, cells, number, make_room);
}

// Another successor of a node in its subgraph, or a subgraph that waits for another.
void batchmaker_add_more(Former* former, int32_t is_sub, int64_t before, int64_t after) {
    (is_sub ? former->sub_more : former->more)[before].push_back(after);
}

// Forgets the further successors of a node or subgraph.
void batchmaker_drop_more(Former* former, int32_t is_sub, int64_t before) {
    (is_sub ? former->sub_more : former->more).erase(before);
}

// NumReadyNodes that `worker` may take, as far as `limit`.
int64_t batchmaker_count_ready(const Columns* columns, const Cell* cell, int64_t worker, int64_t limit) {
    int64_t count = 0;
    for (int64_t at = cell->ready.head; at < cell->ready.tail && count < limit; at++)
        count += columns->is_open(cell->ready.nodes[at], worker);
    return count;
}

// Forms a task and writes it to `out` if that has room for so many numbers; returns how many it is. 0: there is none.
int64_t batchmaker_form(Former* former, Columns* columns, Cell* cell, int64_t worker, int32_t pins, int64_t max_steps,
                        int32_t is_blind, int64_t* out, int64_t room, MakeRoom make_room) {
    if (!former->form(*columns, *cell, worker, pins, max_steps, is_blind, make_room)) return 0;
    if (former->task.size <= room) former->write(*columns, *cell, out);
    return former->task.size;
}

// Write the task just formed, for which `out` had no room.
void batchmaker_write(const Former* former, const Columns* columns, const Cell* cell, int64_t* out) {
    former->write(*columns, *cell, out);
}

// A task of `worker` failed: nothing goes on from it.
void batchmaker_lose(Former* former, int64_t worker) {
    if (worker < (int64_t)former->last.size()) former->last[worker].cell = -1;
}

// A task is completed; `values` of its results say which chains stop, or null.
void batchmaker_settle(Former* former, Columns* columns, Cell* cells, int64_t cell, const int64_t* task, int32_t pins,
                       int32_t releases, const int64_t* values, int64_t stop, int64_t* out, int64_t* sizes,
                       MakeRoom make_room) {
    former->settle(*columns, cells, cells[cell], task, pins, releases, values, stop, out, sizes, make_room);
}
}
MLSYS_FUNCTIONS(
    batchmaker_former, batchmaker_former_free, batchmaker_admit, batchmaker_add_more, batchmaker_drop_more,
    batchmaker_count_ready, batchmaker_form, batchmaker_write, batchmaker_lose, batchmaker_settle);
