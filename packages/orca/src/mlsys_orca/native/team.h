// The threads that run a model's iterations: one team for the life of an engine, asleep between iterations.
//
// All of them run the same program (`run`), and meet at the end of each operator (`for_each`). Work is claimed tile by
// tile, so a thread that the host has taken off its core leaves the rest of its share to the others. Waiting is a short
// spin and then sleep: where other processes want the cores, a spinning waiter takes time from the thread it waits for.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include <mlsys/signal.h>

namespace orca {

using mlsys::Signal;

class Team {
  public:
    using Body = void (*)(void* context, int thread);

    Team(int size, int spins) : size(size), spins(spins) {
        for (int thread = 1; thread < size; thread++) threads.emplace_back([this, thread] { serve(thread); });
    }

    ~Team() {
        body = nullptr;
        started.advance();
        for (std::thread& thread : threads) thread.join();
    }

    // Run `body` on every thread, the caller's among them; returns when all have.
    void run(Body what, void* with) {
        body = what;
        context = with;
        started.advance();
        what(with, 0);
        barrier();
    }

    // Called by every thread of `run` alike: `work(i)` for 0 <= i < count, each on whichever thread claims it; returns
    // when all are done. A claim is of a share of what is left, so that claims are few and the last ones small.
    template <class Work>
    void for_each(int count, Work&& work) {
        int first = claimed.load(std::memory_order_relaxed);
        while (first < count) {
            const int stop = first + std::max(1, (count - first) / (2 * size));
            if (!claimed.compare_exchange_weak(first, stop, std::memory_order_relaxed)) continue;
            for (int i = first; i < stop; i++) work(i);
            first = claimed.load(std::memory_order_relaxed);
        }
        barrier();
    }

    const int size;

  private:
    void serve(int thread) {
        int32_t seen = 0;
        for (;;) {
            started.wait_past(seen++, 0);
            if (!body) return;
            body(context, thread);
            barrier();
        }
    }

    void barrier() {
        if (size == 1) {
            claimed.store(0, std::memory_order_relaxed);
            return;
        }
        int32_t seen = passed.read();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            claimed.store(0, std::memory_order_relaxed);
            passed.advance();
        } else {
            passed.wait_past(seen, spins);
        }
    }

    const int spins;
    std::vector<std::thread> threads;
    Body body = nullptr;
    void* context = nullptr;
    Signal started, passed;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> claimed{0};
};

}  // namespace orca
