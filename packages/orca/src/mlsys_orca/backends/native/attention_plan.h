// Work items of an attention in one iteration: tiles of rows, and pieces of their contexts where there are too few
// tiles.
#pragma once

#include <vector>

#include "attention.h"
#include "operators.h"

namespace orca {

constexpr int TILE_QUERIES = 24;      // rows of one tile, of all query heads of a key head
constexpr int ITEMS_PER_THREAD = 4;   // at least, if contexts are long enough to be cut

class AttentionPlan {
  public:
    struct Task {
        int span, begin, end;         // rows
        int first_piece, num_pieces;  // that they see
        int64_t memory;               // where the pieces of the first key head go
    };
    struct Item {
        int task, head, first_piece, stop_piece;
    };

    std::vector<Task> tasks;  // in row order
    std::vector<Item> items;  // where contexts are cut
    bool is_cut = false;
    // Each task has all rows of its request, so it may keep their keys and values itself: nobody else reads them.
    bool is_whole = true;
    int64_t num_floats = 0;  // of all pieces, where contexts are cut

    // `most`: rows of a tile.
    AttentionPlan(const Attention& op, const Batch& batch, const std::vector<int32_t>& span_of_row, int most, int threads)
        : num_heads(op.num_heads), num_kv_heads(op.num_kv_heads), head_dim(op.head_dim), window(op.window), only_sampled(op.only_sampled) {
        const int group = num_heads / num_kv_heads, rows = std::max(1, most / group);
        if (only_sampled && batch.num_sampled < batch.num_rows) {
            for (int i = 0; i < batch.num_sampled; i++)
                add(op, batch, span_of_row[batch.sampled[i]], batch.sampled[i], batch.sampled[i] + 1);
            is_whole = false;
        } else {
            for (int s = 0; s < batch.num_spans; s++) {
                const int stop = batch.spans[s].stop;
                is_whole &= stop - batch.spans[s].start <= rows;
                for (int row = batch.spans[s].start; row < stop; row += rows) add(op, batch, s, row, std::min(stop, row + rows));
            }
        }
        if (threads > 1) cut(group, threads);
    }

    // Return whether `op` needs the same plan: most layers are alike.
    bool is_for(const Attention& op) const {
        return num_heads == op.num_heads && num_kv_heads == op.num_kv_heads && head_dim == op.head_dim && window == op.window &&
               only_sampled == op.only_sampled;
    }

  private:
    void add(const Attention& op, const Batch& batch, int span, int begin, int end) {
        const Reach reach(op, batch.spans[span], begin, end);
        const int first = reach.first_block * PANEL / PIECE;
        tasks.push_back({span, begin, end, first, (reach.limit - 1) / PIECE + 1 - first, 0});
    }

    // Cut contexts so that every thread has some items. Bits do not depend on it: pieces are added in their order.
    void cut(int group, int threads) {
        int64_t pieces = 0;
        for (const Task& task : tasks) pieces += task.num_pieces * num_kv_heads;
        const int most = (int)std::max<int64_t>(1, pieces / (ITEMS_PER_THREAD * threads));
        for (const Task& task : tasks) is_cut |= task.num_pieces > most;
        is_cut &= tasks.size() * num_kv_heads < (size_t)ITEMS_PER_THREAD * threads;
        if (!is_cut) return;
        is_whole = false;
        for (size_t i = 0; i < tasks.size(); i++) {
            Task& task = tasks[i];
            const int parts = (task.num_pieces + most - 1) / most;
            task.memory = num_floats;
            for (int head = 0; head < num_kv_heads; head++)
                for (int part = 0; part < parts; part++)
                    items.push_back(
                        {(int)i, head, task.first_piece + task.num_pieces * part / parts,
                         task.first_piece + task.num_pieces * (part + 1) / parts});
            num_floats += num_kv_heads * Partials::size(task.num_pieces, (task.end - task.begin) * group, padded(head_dim));
        }
    }

    const int num_heads, num_kv_heads, head_dim, window, only_sampled;
};

}  // namespace orca
