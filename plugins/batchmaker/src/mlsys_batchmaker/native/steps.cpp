// Several steps of a recurrent cell on rows of the state pool, in one call: rows are read and written where they lie,
// those that have ended drop out, weights were packed once. One thread; each worker has a Runner of its own.
#include "gates.h"

#include <cstring>
#include <vector>

using namespace batchmaker;

constexpr int64_t LINE = 16;  // floats of a cache line: rows a power of two apart would share the few places of one set

// Columns of a packed weight, a bias and the table: [block of UNITS][gate][unit].
struct Layer {
    Kind kind;
    int32_t hidden;
    Matrix from_input;         // K = 0: a tree's inner node, or the table has it
    Matrix from_hidden;        // weights of the hidden state; in a tree's inner node, of the left child
    Matrix from_other;         // from the right child
    const float* bias;         // [columns]
    const float* hidden_bias;  // GRU: initial value of the candidate's hidden part; else null

    int gates() const { return GATES[kind]; }
    int64_t blocks() const { return (hidden + UNITS - 1) / UNITS; }
    int64_t padded() const { return blocks() * UNITS; }
    int64_t columns() const { return padded() * gates(); }
    int64_t stride() const { return padded() + LINE; }  // floats from one row of a packed group to the next
    bool has_state() const { return kind != GRU; }
};
MLSYS_STRUCT(Layer, kind, hidden, from_input, from_hidden, from_other, bias, hidden_bias);

struct Cell {
    int32_t num_layers;
    int32_t num_words;       // rows of the projection (vocabulary size); its best word feeds the next step; 0: no projection
    const Layer* layers;     // copied
    const float* table;      // [words, columns of the first layer]: what a word gives to the gates, bias included
    const float* embedding;  // [words, K]: where there is no table. Neither: inputs are rows of floats
    Matrix projection;
    const float* word_bias;  // [panels * UNITS]
    int64_t stop;            // a row that says this word drops out; -1: none does
};
MLSYS_STRUCT(Cell, num_layers, num_words, layers, table, embedding, projection, word_bias, stop);

// Rows of the pool. Inputs: the word or vector (not of a tree's inner node), then the states of each layer, h before c;
// a tree's inner node: both h, then both c. Outputs: the word, if there is a projection, then the states.
struct Task {
    int32_t rows;
    int32_t steps;
    const int64_t* in_rows;  // [steps, rows, inputs], inputs contiguous; of states only step 0 counts
    int64_t in_step, in_row;
    const int64_t* out_rows;  // [rows, outputs]; null: nothing is written
    int64_t out_row;
    const int64_t* lengths;  // [rows]; null: all have `steps`
    void* const* in_banks;   // by input
    void* const* out_banks;  // by output
    const int64_t* in_strides;  // by input: numbers from a row of its bank to the next
    const int64_t* out_strides;
};
MLSYS_STRUCT(Task, rows, steps, in_rows, in_step, in_row, out_rows, out_row, lengths, in_banks, out_banks, in_strides,
    out_strides);

namespace {

constexpr int WINDOW = 16;  // steps whose inputs are multiplied at once
constexpr int64_t GROUP_BYTES = 256 << 10;  // bytes of a group of rows that passes a whole weight at a time

struct Runner {
    Cell cell;
    std::vector<Layer> layers;
    Task task;
    std::vector<float> hidden;   // [layer][step][row][padded]: after each step
    std::vector<int64_t> first;  // by layer: where its part of `hidden` begins
    std::vector<int64_t> words;  // [step][row]
    std::vector<int64_t> taken;  // by row: steps
    std::vector<float> given;    // [rows of a window][columns]: the inputs' part of the gates
    std::vector<int64_t> window; // by step of the window: the first row of `given`
    std::vector<float> sums;     // [gate][active row][UNITS]
    std::vector<float> best;     // by active row: of the projection so far
    std::vector<int64_t> chosen;
    std::vector<int> active;     // rows that have this step
    std::vector<const float*> inputs, left, right, begin;  // by active row

    explicit Runner(const Cell& given_cell)
        : cell(given_cell), layers(given_cell.layers, given_cell.layers + given_cell.num_layers) {}

    bool is_inner() const { return layers[0].kind == TREE_INNER; }
    int64_t length(int row) const { return task.lengths ? task.lengths[row] : task.steps; }
    float* hidden_of(int layer, int step, int row) {
        return hidden.data() + first[layer] + ((int64_t)step * task.rows + row) * layers[layer].stride();
    }
    int first_input(int layer) const {  // the place of h among the inputs
        int states = layers[0].has_state() ? 2 : 1;
        return is_inner() ? 0 : 1 + layer * states;
    }
    int first_output(int layer) const { return (cell.num_words ? 1 : 0) + layer * (layers[0].has_state() ? 2 : 1); }
    int64_t in_row(int input, int step, int row) const {
        return task.in_rows[step * task.in_step + row * task.in_row + input];
    }
    const float* row_in(int input, int step, int row) const {
        return (const float*)task.in_banks[input] + in_row(input, step, row) * task.in_strides[input];
    }
    float* row_out(int output, int row) const {
        return (float*)task.out_banks[output] + task.out_rows[row * task.out_row + output] * task.out_strides[output];
    }
    int64_t word_of(int step, int row) const {
        if (cell.num_words && step > 0) return words[(int64_t)(step - 1) * task.rows + row];
        return ((const int64_t*)task.in_banks[0])[in_row(0, step, row)];
    }
    const float* input_of(int layer, int step, int row) {
        if (layer) return hidden_of(layer - 1, step, row);
        if (cell.embedding) return cell.embedding + word_of(step, row) * layers[0].from_input.K;
        return row_in(0, step, row);
    }

    // The inputs' part of the gates of all rows in `inputs`, into `given`.
    void multiply_inputs(const Layer& layer) {
        int count = (int)inputs.size();
        given.resize(count * layer.columns());
        sums.resize((int64_t)count * UNITS);
        for (int64_t panel = 0; panel < layer.blocks() * layer.gates(); panel++) {
            for (int row = 0; row < count; row++) std::memcpy(&sums[row * UNITS], layer.bias + panel * UNITS, 4 * UNITS);
            multiply(inputs.data(), count, layer.from_input, panel, sums.data());
            for (int row = 0; row < count; row++)
                std::memcpy(&given[row * layer.columns() + panel * UNITS], &sums[row * UNITS], 4 * UNITS);
        }
    }

    // Initial value of the gates' sums, by active row.
    void find_beginnings(int number, int step) {
        const Layer& layer = layers[number];
        begin.resize(active.size());
        if (is_inner()) {
            for (auto& each : begin) each = layer.bias;
        } else if (number == 0 && cell.table) {
            for (size_t i = 0; i < active.size(); i++) begin[i] = cell.table + word_of(step, active[i]) * layer.columns();
        } else {
            int size = cell.num_words ? 1 : WINDOW;  // what is fed back is not known before
            if (step % size == 0) {
                inputs.clear();
                window.clear();
                for (int at = step; at < task.steps && at < step + size; at++) {
                    window.push_back(inputs.size());
                    for (int row : active)
                        if (at < length(row)) inputs.push_back(input_of(number, at, row));
                }
                multiply_inputs(layer);
            }
            for (size_t i = 0; i < active.size(); i++)
                begin[i] = &given[(window[step % size] + i) * layer.columns()];
        }
    }

    void run_layer_step(int number, int step) {
        const Layer& layer = layers[number];
        int count = (int)active.size(), h_in = first_input(number);
        find_beginnings(number, step);
        left.resize(count), right.resize(count);
        for (int i = 0; i < count; i++) {
            int row = active[i];
            if (layer.kind == TREE_LEAF) break;
            left[i] = step ? hidden_of(number, step - 1, row) : row_in(h_in, 0, row);
            if (is_inner()) right[i] = row_in(h_in + 1, 0, row);
        }
        // All panels pass by a group of rows that stays in the second-level cache, then by the next.
        int64_t row_bytes = 4 * std::max<int64_t>(1, layer.from_hidden.K + layer.from_other.K);
        int most = (int)std::max<int64_t>(4 * MAX_MR, GROUP_BYTES / row_bytes);
        for_row_groups(count, most, [&](int from, int size) { run_group(number, step, from, size); });
    }

    // All units of active rows `from` to `from + count`.
    void run_group(int number, int step, int from, int count) {
        const Layer& layer = layers[number];
        int gates = layer.gates();
        sums.resize((int64_t)gates * count * UNITS);
        for (int64_t block = 0; block < layer.blocks(); block++) {
            for (int gate = 0; gate < gates; gate++) {
                int64_t panel = block * gates + gate;
                float* own = &sums[(int64_t)gate * count * UNITS];
                bool is_apart = layer.kind == GRU && gate == 2;  // is multiplied by the reset gate before it is added
                for (int i = 0; i < count; i++) {
                    const float* first = is_apart ? layer.hidden_bias : begin[from + i];
                    std::memcpy(own + i * UNITS, first + panel * UNITS, 4 * UNITS);
                }
                if (layer.kind == TREE_LEAF) continue;
                multiply(left.data() + from, count, layer.from_hidden, panel, own);
                if (is_inner()) multiply(right.data() + from, count, layer.from_other, panel, own);
            }
            finish_block(number, step, block, from, count);
        }
    }

    void finish_block(int number, int step, int64_t block, int from, int count) {
        const Layer& layer = layers[number];
        int64_t at = block * UNITS;
        for (int i = from; i < from + count; i++) {
            int row = active[i];
            Row states = {};
            states.new_hidden = hidden_of(number, step, row) + at;
            if (layer.kind == GRU) {
                states.hidden = left[i] + at;
                states.given = begin[i] + (block * layer.gates() + 2) * UNITS;
            } else {
                float* kept = row_out(first_output(number) + 1, row);
                states.new_state = kept + at;
                if (is_inner()) {
                    states.state = row_in(2, 0, row) + at;
                    states.other = row_in(3, 0, row) + at;
                } else if (layer.kind == LSTM) {
                    states.state = (step ? kept : row_in(first_input(number) + 1, 0, row)) + at;
                }
            }
            finish((Kind)layer.kind, &sums[(i - from) * UNITS], (int64_t)count * UNITS, states, layer.hidden - at);
        }
    }

    // Argmax word of each active row; the first of equals.
    void choose_words(int step) {
        int count = (int)active.size(), top = cell.num_layers - 1;
        for (int i = 0; i < count; i++) left[i] = hidden_of(top, step, active[i]);
        sums.resize((int64_t)count * UNITS);
        best.assign(count, -__builtin_inff());
        chosen.assign(count, 0);
        for (int64_t panel = 0; panel * UNITS < cell.num_words; panel++) {
            for (int i = 0; i < count; i++) std::memcpy(&sums[i * UNITS], cell.word_bias + panel * UNITS, 4 * UNITS);
            multiply(left.data(), count, cell.projection, panel, sums.data());
            int width = (int)std::min<int64_t>(UNITS, cell.num_words - panel * UNITS);
            for (int i = 0; i < count; i++) {
                vf most = load(&sums[i * UNITS]);
                for (int v = 1; v < VECS; v++) most = larger(most, load(&sums[i * UNITS + v * LANES]));
                if (width == UNITS && !(largest(most) > best[i])) continue;
                for (int u = 0; u < width; u++)
                    if (sums[i * UNITS + u] > best[i]) best[i] = sums[i * UNITS + u], chosen[i] = panel * UNITS + u;
            }
        }
        for (int i = 0; i < count; i++) {
            int row = active[i];
            words[(int64_t)step * task.rows + row] = chosen[i];
            if (chosen[i] != cell.stop) continue;
            taken[row] = step + 1;
            for (int later = step + 1; later < task.steps; later++) words[(int64_t)later * task.rows + row] = cell.stop;
        }
    }

    // Write each row's states after its last step to the pool; cell states are there already.
    void write_back() {
        for (int row = 0; row < task.rows; row++) {
            int last = (int)taken[row] - 1;
            for (int number = 0; number < cell.num_layers; number++)
                std::memcpy(row_out(first_output(number), row), hidden_of(number, last, row),
                            sizeof(float) * layers[number].hidden);
            if (cell.num_words)
                ((int64_t*)task.out_banks[0])[task.out_rows[row * task.out_row]] = words[(int64_t)last * task.rows + row];
        }
    }

    int64_t run(const Task& now) {
        task = now;
        int64_t size = 0;
        first.clear();
        for (const Layer& layer : layers) {
            first.push_back(size);
            size += (int64_t)task.steps * task.rows * layer.stride();
        }
        hidden.resize(size);
        words.resize(cell.num_words ? (int64_t)task.steps * task.rows : 0);
        taken.resize(task.rows);
        int64_t wanted = 0, computed = 0;
        for (int row = 0; row < task.rows; row++) wanted += taken[row] = length(row);
        for (int number = 0; number < cell.num_layers; number++) {
            for (int step = 0; step < task.steps; step++) {
                active.clear();
                for (int row = 0; row < task.rows; row++)
                    if (step < taken[row]) active.push_back(row);
                if (active.empty()) break;
                run_layer_step(number, step);
                if (cell.num_words) choose_words(step);
            }
        }
        for (int row = 0; row < task.rows; row++) computed += taken[row];
        if (task.out_rows) write_back();
        return wanted - computed;
    }
};

}  // namespace

extern "C" {

int64_t batchmaker_units() { return UNITS; }

void* batchmaker_runner(const Cell* cell) { return new Runner(*cell); }

void batchmaker_free(void* runner) { delete (Runner*)runner; }

// Runs a task; returns how many steps were not computed because their row had stopped.
int64_t batchmaker_run(void* runner, const Task* task) { return ((Runner*)runner)->run(*task); }

// Of the latest task, the hidden states of a layer (-1: the words) after `steps` of `rows`, `count` of them each.
void batchmaker_results(void* runner, int32_t layer, int64_t count, const int64_t* steps, const int64_t* rows,
                        void* results) {
    Runner& r = *(Runner*)runner;
    for (int64_t i = 0; i < count; i++) {
        if (layer < 0) {
            ((int64_t*)results)[i] = r.words[steps[i] * r.task.rows + rows[i]];
        } else {
            int64_t hidden = r.layers[layer].hidden;
            std::memcpy((float*)results + i * hidden, r.hidden_of(layer, (int)steps[i], (int)rows[i]), 4 * hidden);
        }
    }
}

// Pack `weight` [K, gates * hidden] in panels of UNITS columns: [block][gate][K][unit], zeros beyond the last unit.
void batchmaker_pack(const float* weight, float* panels, int64_t K, int32_t gates, int32_t hidden) {
    int64_t blocks = (hidden + UNITS - 1) / UNITS;
    for (int64_t block = 0; block < blocks; block++)
        for (int gate = 0; gate < gates; gate++) {
            const float* at = weight + gate * hidden + block * UNITS;
            pack_panel<UNITS>(
                panels + (block * gates + gate) * K * UNITS, K, hidden - block * UNITS,
                [&](int64_t k, int unit) { return at[k * gates * hidden + unit]; });
        }
}
}
MLSYS_FUNCTIONS(
    batchmaker_units, batchmaker_runner, batchmaker_free, batchmaker_run, batchmaker_results, batchmaker_pack);
