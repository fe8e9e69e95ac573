// The state of one iteration that operators share: registers, the batch, and what each thread keeps for itself.
#pragma once

#include <vector>

#include <mlsys/thread_pool.h>

#include "epilogue.h"
#include "gemm.h"
#include "meeting.h"
#include "operators.h"
#include "routing.h"
#include "scratch.h"

namespace orca {

constexpr int MAX_TILE_ROWS = 512;

struct RowBlock {  // a block of rows of one of several products
    int which, first, stop;
};

struct OwnMemory {
    Scratch tiles, rows, attention, pieces;  // tiles: decoded panels and sums; rows: prepared ones; pieces: Partials
    std::vector<RowBlock> blocks;
};

struct Run {
    Run(int threads, int spins, int num_registers) : pool(threads, spins), registers(num_registers), peaks(threads), own_memory(threads) {}

    // work(row) for each of `rows`, which have `size` features; every thread calls it alike.
    template <class Work>
    void for_each_row(int thread, int rows, int size, Work&& work) {
        const int step = std::max(1, 8192 / size);
        pool.for_each(thread, (rows + step - 1) / step, [&](int i) {
            for (int row = i * step; row < std::min(rows, (i + 1) * step); row++) work(row);
        });
    }

    float* scratch_of(int thread, int K) {
        return own_memory[thread].tiles.grow(
            (int64_t)NEAR_PANELS * K * PANEL + SLICE_BUFFERS * MAX_TILE_ROWS * TILE_PANELS * PANEL);
    }

    // Peaks of all rows, where `op` makes the logits and the batch wants the largest.
    Peak* peaks_of(const Gemm& op, int thread) {
        return batch->largest && op.target == (int)registers.size() - 1 ? peaks[thread].data() : nullptr;
    }

    mlsys::ThreadPool pool;
    std::vector<Register> registers;
    std::vector<std::vector<Peak>> peaks;  // per thread: of each sampled row
    std::vector<OwnMemory> own_memory;     // per thread
    std::vector<Routing> routings;         // by number
    std::vector<int32_t> span_of_row;
    float* prepared = nullptr;     // rows that all threads prepare for a product
    Scratch pieces;                // Partials of contexts that are cut
    Meeting* meeting = nullptr;    // of the ranks that share the sums; null: there is one
    const Batch* batch = nullptr;
};

}  // namespace orca
