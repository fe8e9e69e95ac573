// Attention as an operator: keys and values are kept, then tiles of rows, or pieces of their contexts, are claimed.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "run.h"

namespace orca {

template <class Arithmetic>
void run_attention(Run& run, const Attention& op, const AttentionPlan& plan, int thread) {
    using Cache = typename Arithmetic::Cache;
    const int padded_dim = padded(op.head_dim), group = op.num_heads / op.num_kv_heads;
    const Cache cache{
        (typename Cache::Element*)run.batch->keys, (typename Cache::Element*)run.batch->values, run.batch->num_layers, op.layer, op.num_kv_heads,
        op.head_dim, padded_dim};
    const Rows rows{
        run.registers[op.source].floats, run.registers[op.source].width, op.rotary_dim ? run.batch->cos[op.rotary] : nullptr,
        op.rotary_dim ? run.batch->sin[op.rotary] : nullptr};
    const auto keep_row = [&](const Span& span, int row, int head) {
        const int64_t at = (int64_t)row * op.rotary_dim;
        keep(op, cache, span, run.batch->block_tables + span.table, row, head, rows.qkv + (int64_t)row * rows.width, rows.cos + at, rows.sin + at);
    };
    const auto tile_of = [&](const AttentionPlan::Task& task, int head) {
        const Span& span = run.batch->spans[task.span];
        return Tile{span, run.batch->block_tables + span.table, head, task.begin, task.end};
    };
    const auto partials_of = [&](const AttentionPlan::Task& task, float* memory) {
        return Partials{memory, (task.end - task.begin) * group, padded_dim, task.first_piece};
    };
    // Rows of a request see each other's keys: all are kept before any tile that may need them.
    if (!plan.is_whole) {
        const int step = 8;
        run.pool.for_each(thread, (run.batch->num_rows + step - 1) / step, [&](int i) {
            for (int row = i * step; row < std::min(run.batch->num_rows, (i + 1) * step); row++)
                for (int head = 0; head < op.num_kv_heads; head++)
                    keep_row(run.batch->spans[run.span_of_row[row]], row, head);
        });
    }
    const int num_tiles = (int)plan.tasks.size() * op.num_kv_heads;
    if (plan.is_cut) {
        const auto memory_of = [&](const AttentionPlan::Task& task, int head) {
            return run.pieces.grow(0) + task.memory + head * Partials::size(task.num_pieces, (task.end - task.begin) * group, padded_dim);
        };
        run.pool.for_each(thread, plan.items.size(), [&](int i) {
            const AttentionPlan::Item& item = plan.items[i];
            const AttentionPlan::Task& task = plan.tasks[item.task];
            attend<Arithmetic>(
                op, cache, tile_of(task, item.head), item.first_piece, item.stop_piece, rows,
                partials_of(task, memory_of(task, item.head)), run.own_memory[thread].attention);
        });
        run.pool.for_each(thread, num_tiles, [&](int i) {
            const AttentionPlan::Task& task = plan.tasks[i / op.num_kv_heads];
            const int head = i % op.num_kv_heads;
            combine(op, tile_of(task, head), partials_of(task, memory_of(task, head)), run.registers[op.target]);
        });
        return;
    }
    const auto first_task = [&](int owner) {  // rows that are this thread's in other operators, too
        const int row = (int64_t)run.batch->num_rows * owner / run.pool.size;
        const auto at = std::lower_bound(
            plan.tasks.begin(), plan.tasks.end(), row, [](const AttentionPlan::Task& task, int row) { return task.begin < row; });
        return (int)(at - plan.tasks.begin()) * op.num_kv_heads;
    };
    run.pool.for_each_dealt(thread, first_task, [&](int i) {
        const AttentionPlan::Task& task = plan.tasks[i / op.num_kv_heads];
        const Tile tile = tile_of(task, i % op.num_kv_heads);
        if (plan.is_whole)
            for (int row = task.begin; row < task.end; row++) keep_row(tile.span, row, tile.head);
        OwnMemory& own = run.own_memory[thread];
        const Partials parts =
            partials_of(task, own.pieces.grow(Partials::size(task.num_pieces, (task.end - task.begin) * group, padded_dim)));
        attend<Arithmetic>(op, cache, tile, task.first_piece, task.first_piece + task.num_pieces, rows, parts, own.attention);
        combine(op, tile, parts, run.registers[op.target]);
    });
}

}  // namespace orca
