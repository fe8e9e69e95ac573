// The threads that run a model's iterations: one team for the life of an engine, asleep between iterations.
//
// All of them run the same program (`run`), and meet at the end of each operator (`for_each`). Each begins with a share of
// its own, the same rows in one operator as in the next, which its core's caches have; it claims tile by tile, and then
// helps the others, so a thread that the host has taken off its core leaves the rest of its share to them. Waiting is a short
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

    Team(int size, int spins) : size(size), spins(spins), shares(size) {
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

    // Called by every thread of `run` alike: `work(i)` for 0 <= i < count; returns when all are done.
    template <class Work>
    void for_each(int thread, int count, Work&& work) {
        for_each_dealt(thread, [&](int owner) { return (int)((int64_t)count * owner / size); }, work);
    }

    // As `for_each`, thread t having begin(t) to begin(t + 1) - 1. A claim is of a part of what is left of a share, so that
    // claims are few and the last ones small.
    template <class Begin, class Work>
    void for_each_dealt(int thread, Begin&& begin, Work&& work) {
        for (int k = 0; k < size; k++) {
            const int owner = (thread + k) % size, from = begin(owner), count = begin(owner + 1) - from;
            std::atomic<int>& claimed = shares[owner].claimed;
            int first = claimed.load(std::memory_order_relaxed);
            while (first < count) {
                const int stop = first + std::max(1, (count - first) / 4);
                if (!claimed.compare_exchange_weak(first, stop, std::memory_order_relaxed)) continue;
                for (int i = first; i < stop; i++) work(from + i);
                first = claimed.load(std::memory_order_relaxed);
            }
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
        if (size == 1) return deal_anew();
        int32_t seen = passed.read();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            deal_anew();
            passed.advance();
        } else {
            passed.wait_past(seen, spins);
        }
    }

    void deal_anew() {
        for (Share& share : shares) share.claimed.store(0, std::memory_order_relaxed);
    }

    struct alignas(64) Share {
        std::atomic<int> claimed{0};
    };

    const int spins;
    std::vector<Share> shares;
    std::vector<std::thread> threads;
    Body body = nullptr;
    void* context = nullptr;
    Signal started, passed;
    alignas(64) std::atomic<int> arrived{0};
};

}  // namespace orca
