// Products of all rows, and of unlike rows: experts, and heads by themselves. Each is divided into tiles that threads claim.
#pragma once

#include "gemm_input.h"
#include "run.h"
#include "tile.h"

namespace orca {

constexpr int MIN_TILE_ROWS = 48, TILES_PER_THREAD = 8;
constexpr int NEAR_TILE_ROWS = 96;    // rows whose sums stay in the first-level cache
constexpr int AMX_BYTES = 640 << 10;  // bytes of rows that AMX reads repeatedly: they stay in the second-level cache

// How many blocks `rows` fall into, if a block has `most` at most and every thread is to have several tiles.
inline int blocks_of_rows(const Run& run, int rows, int most, int across) {
    return std::max((rows + most - 1) / most, (TILES_PER_THREAD * run.pool.size + across - 1) / across);
}

// As `run_tiles`, rows in pairs of bf16: all panels meet one block of rows, then the next; 32 rows at a time are
// multiplied and finished, so that their sums never leave the first-level cache.
template <class Form>
void run_by_amx(Run& run, const Gemm& op, const Register& target, int thread, int rows, GemmInput& input, float* scratch) {
    const int across = (op.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
    const int wanted = blocks_of_rows(run, rows, std::max(AMX_MR, AMX_BYTES / op.matrix.K / 2), across);
    const int block = ((rows + wanted - 1) / wanted + AMX_MR - 1) / AMX_MR * AMX_MR;
    run.pool.for_each(thread, across * ((rows + block - 1) / block), [&](int i) {
        const int panel = i % across * TILE_PANELS, first = i / across * block, stop = std::min(rows, first + block);
        run_tile<Form>(op, target, run.peaks_of(op, thread), panel, first, stop, input.rows(), input.lda, scratch);
    });
}

// A tile is a pair of panels against a block of rows: the more rows, the less often a panel is read and decoded.
template <class Form>
void run_tiles(Run& run, const Gemm& op, const Register& target, int thread, int rows, GemmInput& input, float* scratch) {
    if constexpr (Form::BY_AMX) return run_by_amx<Form>(run, op, target, thread, rows, input, scratch);
    using Panel = typename Form::Panel;
    const int across = (op.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
    // Where a panel is read as it stands, the next rows find it in the second-level cache; else it was decoded for all.
    constexpr bool IN_QUADS = std::is_same_v<Panel, Int8Quads> || std::is_same_v<Panel, Int4Quads> || is_block_panel<Panel>;
    constexpr bool AS_IT_IS = IN_QUADS || std::is_same_v<Panel, F32Panel> || std::is_same_v<Panel, PairsPanel>;
    int wanted = blocks_of_rows(run, rows, AS_IT_IS ? NEAR_TILE_ROWS : MAX_TILE_ROWS, across);
    if (wanted > 1) wanted = (wanted + run.pool.size - 1) / run.pool.size * run.pool.size;  // each thread has its own rows
    const int block = std::max((rows + wanted - 1) / wanted, std::min(rows, MIN_TILE_ROWS));
    const int down = (rows + block - 1) / block;
    // Each thread takes blocks of its own, panel by panel, where there are enough of them; else panels of its own.
    const int sets = down % run.pool.size ? 1 : run.pool.size, own = down / sets;
    run.pool.for_each(thread, across * down, [&](int i) {
        const int set = i / (across * own), rest = i % (across * own);
        const int panel = rest / own * TILE_PANELS, first = (set * own + rest % own) * block;
        const int stop = std::min(rows, first + block);
        run_tile<Form>(op, target, run.peaks_of(op, thread), panel, first, stop, input.rows(), input.lda, scratch);
    });
}

inline void run_gemm(Run& run, const Gemm& op, int thread, int rows, const Register& target) {
    const int K = op.matrix.K;
    if (!rows) return;
    GemmInput input(op, run.registers[op.source], rows, run.own_memory[thread].rows);
    if (input.is_prepared_by_all()) {
        float* spare = run.own_memory[thread].rows.grow(K);
        run.for_each_row(thread, rows, K, [&](int row) { input.prepare(row, run.prepared, spare); });
        input.use(run.prepared);
    }
    with_form(op, [&](auto form) { run_tiles<decltype(form)>(run, op, target, thread, rows, input, run.scratch_of(thread, K)); });
}

inline void run_route(Run& run, const Route& op, int thread, int rows) {
    Routing& routing = run.routings[op.routing];
    const Register& scores = run.registers[op.source];
    run.for_each_row(thread, rows, 16 * op.num_experts, [&](int row) {
        choose_experts(op, scores.floats + row * scores.stride, row, routing);
    });
    run.pool.for_each(thread, 1, [&](int) { order_entries(op, rows, routing); });
}

// Products of unlike rows. Late threads count what others have done: entries stay as they are until the run is over.
inline void run_grouped(Run& run, const Grouped& op, int thread, int rows, Register target) {
    if (!rows) return;
    const bool is_parts = op.rows_of == PARTS;
    const Routing* routing = is_parts ? nullptr : &run.routings[op.routing];
    const bool is_shared = is_parts && !op.source_step;  // all products meet the same rows
    const int count = is_shared ? rows : rows * (is_parts ? op.count : routing->num_chosen), K = op.gemm.matrix.K;
    const Register& source = run.registers[op.gemm.source];
    OwnMemory& own = run.own_memory[thread];
    GemmInput input(op.gemm, source, count, own.rows);
    if (op.rows_of != ENTRIES || input.is_prepared_by_all()) {
        float* spare = own.rows.grow(K);
        run.for_each_row(thread, count, K, [&](int i) {
            const int64_t row = op.rows_of == TOKENS ? routing->tokens[i] : i % rows;
            if (op.rows_of == ENTRIES) return input.prepare(i, run.prepared, spare);
            const int64_t column = is_parts ? op.source_column + (int64_t)(i / rows) * op.source_step : 0;
            input.prepare(source.floats + row * source.stride + column, i, run.prepared, spare);
        });
        input.use(run.prepared);
    }
    if (!is_parts) target.stride = target.width / routing->num_chosen;
    own.blocks.clear();
    for (int which = 0; which < op.count; which++) {
        const int begin = is_parts ? (is_shared ? 0 : which * rows) : routing->begins[which];
        const int end = is_parts ? begin + rows : routing->begins[which + 1];
        for (int first = begin; first < end; first += NEAR_TILE_ROWS)
            own.blocks.push_back({which, first, std::min(end, first + NEAR_TILE_ROWS)});
    }
    const int across = (op.gemm.matrix.panels() + TILE_PANELS - 1) / TILE_PANELS;
    with_form(op.gemm, [&](auto form) {
        float* scratch = run.scratch_of(thread, K);
        run.pool.for_each(thread, across * (int)own.blocks.size(), [&](int i) {
            const RowBlock& block = own.blocks[i / across];
            Gemm gemm = op.gemm;
            gemm.matrix = op.matrices[block.which];
            if (op.biases) gemm.bias = ((const float* const*)op.biases)[block.which];
            Register to = target;
            const float* from = input.rows();
            if (is_parts) {
                const int64_t before = is_shared ? 0 : (int64_t)block.which * rows;
                to.move(block.which * (int64_t)op.target_step - before * to.stride);
            }
            run_tile<decltype(form)>(
                gemm, to, run.peaks_of(gemm, thread), i % across * TILE_PANELS, block.first, block.stop, from, input.lda, scratch);
        });
    });
}

}  // namespace orca
