// The replay of a schedule: each worker runs its list of tasks, and waits where a task needs what another worker makes.
//
// A worker's progress is one number, the tasks it has finished since it was made; to wait for a task is to wait until its
// worker's number has passed it. Waiting is a short spin, then sleep: a worker that finds nothing to do leaves its core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#endif

#include "kernel.h"

namespace nimble {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A number that only grows, that one thread advances and others wait for.
class alignas(64) Progress {
  public:
    uint32_t read() const { return value.load(std::memory_order_acquire); }

    void advance() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) wake();
    }

    // Until it has reached `target`; numbers wrap around.
    void wait_for(uint32_t target, int spins) {
        for (int i = 0; i < spins; i++) {
            if ((int32_t)(read() - target) >= 0) return;
            pause_briefly();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (uint32_t seen; (int32_t)((seen = value.load(std::memory_order_seq_cst)) - target) < 0;) sleep(seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
#if defined(__linux__)
    void sleep(uint32_t seen) { syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
    std::atomic<uint32_t> value{0};
    std::atomic<int32_t> sleepers{0};
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
    Team(int size, int spins) : size(size), spins(spins), progress(new Progress[size]), scratches(size) {
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
        for (uint32_t round = 0;; round++) {
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
            for (const Wait* wait = &plan->waits[task.first_wait], *end = wait + task.num_waits; wait < end; wait++)
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
    std::vector<std::thread> threads;
    std::unique_ptr<Progress[]> progress;
    std::unique_ptr<Progress[]> done{new Progress[size]};
    std::vector<Memory> scratches;
    std::vector<uint32_t> bases;  // every worker's progress when the replay began
    const Plan* plan = nullptr;
    Times* times = nullptr;
    Progress started;
    uint32_t rounds = 0;
};

}  // namespace nimble
