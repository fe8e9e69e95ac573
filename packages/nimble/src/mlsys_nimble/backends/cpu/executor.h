// The replay of a schedule: each worker runs its list of tasks, and waits where a task needs what another worker makes.
//
// A worker's progress is one number, the tasks it has finished since it was made; to wait for a task is to wait until its
// worker's number has passed it. Waiting is a short spin, then sleep: a worker that finds nothing to do leaves its core.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include <mlsys/signal.h>

#include "kernel.h"

namespace nimble {

// A home core for each worker of a team that has as many as the process may use. Where others compete for the cores, a
// worker that wakes is else put beside the one that woke it, and the two take turns; where there are more cores than
// workers, the system finds an idle one by itself.
class Homes {
  public:
    explicit Homes(int workers) {
#if defined(__linux__)
        if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) != workers || workers == 1) return;
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &all)) cpus.push_back(cpu);
#else
        (void)workers;
#endif
    }

    // For the threads of the team's own.
    void stay(int worker) const {
#if defined(__linux__)
        if (!cpus.empty()) bind(cpus[worker]);
#else
        (void)worker;
#endif
    }

    // For the caller's thread, which is not ours to bind: off the others' cores, once, if it stands on one.
    void step_aside() const {
#if defined(__linux__)
        if (cpus.empty() || sched_getcpu() == cpus[0]) return;
        cpu_set_t before;
        if (sched_getaffinity(0, sizeof before, &before)) return;
        bind(cpus[0]);
        sched_setaffinity(0, sizeof before, &before);
#endif
    }

  private:
#if defined(__linux__)
    static void bind(int cpu) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    cpu_set_t all;
#endif
    std::vector<int> cpus;
};

struct Wait {  // until `worker` has finished its first `count` tasks of this replay
    int32_t worker;
    int32_t count;
};

struct Task {
    const Kernel* kernel;
    int64_t begin, end;  // units
    int32_t first_wait, num_waits;
};

// The tasks of one stretch of a schedule, by worker; worker 0 is the caller.
struct Plan {
    explicit Plan(int workers) : lists(workers) {}
    std::vector<std::vector<Task>> lists;
    std::vector<Wait> waits;
    int64_t scratch_nbytes = 0;
};

struct Times {  // of a task, in nanoseconds of the steady clock
    int64_t begin, end;
};

// Threads that replay plans, one plan at a time; all but the caller's sleep in between.
class Team {
  public:
    Team(int size, int spins) : size(size), spins(spins), homes(size), progress(new mlsys::Signal[size]), scratches(size) {
        for (int worker = 1; worker < size; worker++) threads.emplace_back([this, worker] { serve(worker); });
    }

    ~Team() {
        plan = nullptr;
        started.advance();
        for (std::thread& thread : threads) thread.join();
    }

    // `times`: null, or one per task, list after list.
    void run(const Plan& what, Times* into) {
        bool alone = true;
        for (int worker = 0; worker < size; worker++) {
            grow(scratches[worker], what.scratch_nbytes);
            if (worker && worker < (int)what.lists.size() && !what.lists[worker].empty()) alone = false;
        }
        plan = &what;
        times = into;
        bases.resize(size);
        for (int worker = 0; worker < size; worker++) bases[worker] = progress[worker].read();
        if (alone) {
            work(0);
            return;
        }
        homes.step_aside();
        started.advance();
        work(0);
        for (int worker = 1; worker < size; worker++) done[worker].wait_for(rounds + 1, spins);
        rounds++;
    }

    const int size;

  private:
    using Scratch = std::unique_ptr<char, decltype(&std::free)>;

    struct Memory {
        Scratch data{nullptr, &std::free};
        int64_t nbytes = 0;
    };

    static void grow(Memory& memory, int64_t nbytes) {
        if (memory.nbytes >= nbytes) return;
        nbytes = (nbytes + 63) / 64 * 64;
        memory.data = Scratch((char*)std::aligned_alloc(64, nbytes), &std::free);
        memory.nbytes = nbytes;
    }

    void serve(int worker) {
        homes.stay(worker);
        for (int32_t round = 0;; round++) {
            started.wait_for(round + 1, spins);
            if (!plan) return;
            if (worker < (int)plan->lists.size()) work(worker);
            done[worker].advance();
        }
    }

    void work(int worker) {
        using Clock = std::chrono::steady_clock;
        Times* time = times;
        if (time)
            for (int before = 0; before < worker; before++) time += plan->lists[before].size();
        void* scratch = scratches[worker].data.get();
        for (const Task& task : plan->lists[worker]) {
            for (const Wait* wait = plan->waits.data() + task.first_wait, *end = wait + task.num_waits; wait < end; wait++)
                progress[wait->worker].wait_for(bases[wait->worker] + wait->count, spins);
            if (!time) {
                task.kernel->run(task.begin, task.end, scratch);
            } else {
                time->begin = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
                task.kernel->run(task.begin, task.end, scratch);
                time++->end = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
            }
            progress[worker].advance();
        }
    }

    const int spins;
    const Homes homes;
    std::vector<std::thread> threads;
    std::unique_ptr<mlsys::Signal[]> progress;
    std::unique_ptr<mlsys::Signal[]> done{new mlsys::Signal[size]};
    std::vector<Memory> scratches;
    std::vector<int32_t> bases;  // every worker's progress when the replay began
    const Plan* plan = nullptr;
    Times* times = nullptr;
    mlsys::Signal started;
    int32_t rounds = 0;
};

}  // namespace nimble
