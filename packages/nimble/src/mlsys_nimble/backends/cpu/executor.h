// The replay of a schedule: a list of tasks for each worker, and for each task what it waits for.
//
// A list's progress is one number, the tasks of it that have finished since the team was made; to wait for a task is to
// wait until its list's number has passed it. The tasks of a list run in order. Its own worker begins them; a worker that
// would wait claims pieces of other lists' current tasks instead, so a worker that lost its core holds up at most the
// piece in its hands. One that waits has left the replay, which may end without it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include <mlsys/thread_pool.h>

#include "kernel.h"

namespace nimble {

struct Wait {  // until the list of `worker` has finished its first `count` tasks of this replay
    int32_t worker;
    int32_t count;
};
MLSYS_STRUCT(Wait, worker, count);

struct Task {
    const Kernel* kernel;
    int64_t begin, end;  // units
    int32_t first_wait, num_waits;
    int64_t grain;  // least number of units of a claim
};

// Progress of a task. The upper half of both numbers is the replay's number, so a replay need not reset them.
struct Claims {
    std::atomic<uint64_t> claimed{0};   // units
    std::atomic<uint64_t> finished{0};  // units
};

// Tasks of one part of a schedule, by worker; worker 0 is the caller.
struct Plan {
    explicit Plan(int workers) : lists(workers), claims(workers) {}

    void add(int worker, const Task& task) {
        lists[worker].push_back(task);
        scratch_nbytes = std::max(scratch_nbytes, task.kernel->scratch_nbytes);
    }

    // Called before a replay.
    void begin() {
        round++;
        for (size_t worker = 0; worker < lists.size(); worker++)
            if (claims[worker].size() != lists[worker].size()) claims[worker] = std::vector<Claims>(lists[worker].size());
    }

    std::vector<std::vector<Task>> lists;
    std::vector<std::vector<Claims>> claims;
    std::vector<Wait> waits;
    int64_t scratch_nbytes = sizeof(int64_t);
    uint32_t round = 0;
};

struct Times {  // begin and end of a task, nanoseconds of the steady clock
    int64_t begin, end;
};
MLSYS_STRUCT(Times, begin, end);

// Threads that replay plans, one plan at a time; all but the caller's sleep in between.
class Team {
  public:
    Team(int size, int spins)
        : size(size), spins(spins), progress(new mlsys::Signal[size]), scratches(size), bases(size), pool(size, 0, spins, true) {}

    // `times`: null, or one per task, list after list.
    void run(Plan& what, Times* into) {
        plan = &what;
        times = into;
        bool is_alone = true;
        for (int worker = 0; worker < size; worker++) {
            bases[worker] = progress[worker].read();
            if (worker && worker < num_lists() && !what.lists[worker].empty()) is_alone = false;
        }
        for (int worker = 0; worker < (is_alone ? 1 : size); worker++) {
            grow(scratches[worker], what.scratch_nbytes);
            scratches[worker].kernel = nullptr;
        }
        if (is_alone) return run_alone();
        what.begin();
        pool.run([](void* self, int worker) { ((Team*)self)->work(worker); }, this);
    }

    const int size;

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr int GLANCE = 20, LOOK_AGAIN = 100;  // pauses, within a replay and outside

    struct Memory {
        std::unique_ptr<char, decltype(&std::free)> data{nullptr, &std::free};
        int64_t nbytes = 0;
        const Kernel* kernel = nullptr;  // kernel that used this scratch last in this replay

        void run(const Kernel* next, int64_t begin, int64_t end) {
            if (begin == end) return;
            if (next != kernel) *(int64_t*)data.get() = Kernel::NEW;
            kernel = next;
            kernel->run(begin, end, data.get());
        }
    };

    static void grow(Memory& memory, int64_t nbytes) {
        if (memory.nbytes >= nbytes) return;
        nbytes = (nbytes + 63) / 64 * 64;
        memory.data.reset((char*)std::aligned_alloc(64, nbytes));
        if (!memory.data) throw std::bad_alloc();
        memory.nbytes = nbytes;
    }

    static int64_t now() { return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

    int num_lists() const { return (int)plan->lists.size(); }

    // All tasks are on the caller's list.
    void run_alone() {
        Times* time = times;
        for (const Task& task : plan->lists[0]) {
            if (time) time->begin = now();
            scratches[0].run(task.kernel, task.begin, task.end);
            if (time) time++->end = now();
        }
    }

    // Run one worker's part of a replay: it claims pieces of its own list first, then of other workers' lists.
    void work(int worker) {
        for (int idle = 0;;) {
            Wait stall{-1, 0};  // the wait to sleep on if nothing can be claimed
            bool is_over = true, has_worked = false;
            for (int k = 0; k < num_lists() && !has_worked; k++) {
                const int list = (worker + k) % num_lists();
                const int number = (int)((uint32_t)progress[list].read() - (uint32_t)bases[list]);
                if (number == (int)plan->lists[list].size()) continue;
                is_over = false;
                if (const Wait* unmet = first_unmet(plan->lists[list][number])) {
                    if (stall.worker < 0) stall = *unmet;
                } else if (run_piece(list, number, worker)) {
                    has_worked = true;
                } else if (stall.worker < 0) {
                    stall = {list, number + 1};
                }
            }
            if (is_over) return;
            if (has_worked) {
                idle = 0;
                continue;
            }
            mlsys::Signal& signal = progress[stall.worker];
            const int32_t target = bases[stall.worker] + stall.count;
            if (signal.spin(target, GLANCE)) continue;
            const bool sleeps = (idle += LOOK_AGAIN) >= spins;  // pieces may come before the signal
            if (!pool.wait_outside(worker, signal, target, LOOK_AGAIN, sleeps)) return;
            if (sleeps) idle = 0;
        }
    }

    const Wait* first_unmet(const Task& task) const {
        const Wait* wait = plan->waits.data() + task.first_wait;
        for (const Wait* end = wait + task.num_waits; wait < end; wait++)
            if (!progress[wait->worker].has_reached(bases[wait->worker] + wait->count)) return wait;
        return nullptr;
    }

    // Claim a piece of a task and run it; false: all of it is claimed already.
    bool run_piece(int list, int number, int worker) {
        const Task& task = plan->lists[list][number];
        Claims& claims = plan->claims[list][number];
        // A task may have no units, if the job has fewer units than shares: it is claimed and finished as if it had one.
        const uint64_t round = (uint64_t)plan->round << 32, units = std::max<int64_t>(task.end - task.begin, 1);
        uint64_t seen = claims.claimed.load(std::memory_order_relaxed), first, count;
        do {
            first = (seen ^ round) >> 32 ? 0 : (uint32_t)seen;
            if (first == units) return false;
            count = std::min<uint64_t>(units - first, std::max<uint64_t>((units - first) / 2, task.grain));
        } while (!claims.claimed.compare_exchange_weak(seen, round | (first + count), std::memory_order_relaxed));
        Times* time = times ? time_of(list, number) : nullptr;
        if (time && !first) time->begin = now();
        const int64_t begin = task.begin + first;
        scratches[worker].run(task.kernel, begin, std::min<int64_t>(begin + count, task.end));
        if (count != units && !is_last_piece(claims.finished, round, count, units)) return true;
        if (time) time->end = now();
        progress[list].advance();
        return true;
    }

    static bool is_last_piece(std::atomic<uint64_t>& finished, uint64_t round, uint64_t count, uint64_t units) {
        uint64_t seen = finished.load(std::memory_order_relaxed), before;
        do
            before = (seen ^ round) >> 32 ? 0 : (uint32_t)seen;
        while (!finished.compare_exchange_weak(seen, round | (before + count), std::memory_order_acq_rel));
        return before + count == units;
    }

    Times* time_of(int list, int number) const {
        Times* time = times + number;
        for (int before = 0; before < list; before++) time += plan->lists[before].size();
        return time;
    }

    const int spins;
    std::unique_ptr<mlsys::Signal[]> progress;
    std::vector<Memory> scratches;
    std::vector<int32_t> bases;  // every list's progress when the replay began
    Plan* plan = nullptr;
    Times* times = nullptr;
    mlsys::ThreadPool pool;  // last: a helper that leaves late reads the signals above
};

}  // namespace nimble
