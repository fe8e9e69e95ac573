// The thread pool under all kernels: a caller and helpers that share one run at a time.
//
// Made for shared machines, where a helper may lose its core at any moment. Nobody waits for a named thread: a run ends
// when its work is done, whoever did it. Helpers that come too late stay out. Work is claimed in small pieces, so that the
// others take over what a descheduled thread has not begun. Waiting is a bounded spin, then sleep; a helper that waits
// for longer than a glance has left the run, which may end without it, so one that loses its core meanwhile delays nobody.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include <mlsys/signal.h>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace mlsys {

// A home core for each helper of a pool that has as many threads as the process has cores. Where other processes compete,
// a helper that wakes would otherwise be put on the core of the thread that woke it, and the two would take turns. With
// more cores than threads the system finds an idle core itself.
class HomeCores {
  public:
    explicit HomeCores(int threads) {
#if defined(__linux__)
        if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) != threads || threads == 1) return;
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &all)) cpus.push_back(cpu);
#else
        (void)threads;
#endif
    }

    // Bind the calling helper to its core.
    void stay(int thread) const {
#if defined(__linux__)
        if (!cpus.empty()) bind(cpus[thread]);
#else
        (void)thread;
#endif
    }

    // Move the caller, which is not ours to bind, off the helpers' cores once.
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

class ThreadPool {
  public:
    // Runs on each thread that takes part. The caller's call (thread 0) returns when all work is done.
    using Body = void (*)(void* context, int thread);

    // `spins`: pauses before a waiting thread sleeps. `start_spins`: the same between runs.
    ThreadPool(int size, int spins, int start_spins = 0, bool has_homes = false)
        : size(size), spins(spins), start_spins(start_spins), homes(has_homes ? size : 1), positions(size), shares(size) {
        for (int thread = 1; thread < size; thread++) helpers.emplace_back([this, thread] { serve(thread); });
    }

    ~ThreadPool() {
        stopping.store(true, std::memory_order_release);
        started.advance();
        for (std::thread& helper : helpers) helper.join();
    }

    // Run `what` on the caller and on the helpers that arrive in time; returns when all of them have. One run at a time.
    void run(Body what, void* with) {
        body = what;
        context = with;
        positions[0] = base = {0, done.read(), 0};
        for (Share& share : shares) share.claimed.store(0, std::memory_order_relaxed);
        if (size > 1) {
            homes.step_aside();
            // Round number in the upper half, then OPEN, then the number of helpers inside.
            door.store(((uint64_t)(uint32_t)(started.read() + 1) << 32) | OPEN, std::memory_order_release);
            started.advance();
        }
        what(with, 0);
        if (size > 1) close();
    }

    // Called by every thread of a run alike, in the same order: `work(i)` for 0 <= i < count. On return all are done.
    template <class Work>
    void for_each(int thread, int count, Work&& work) {
        for_each_dealt(thread, [&](int owner) { return (int)((int64_t)count * owner / size); }, work);
    }

    // As `for_each`; thread t begins with its own share, begin(t) to begin(t + 1) - 1, the same rows in one operator as in
    // the next, which its core's caches hold. It then helps the others. A claim takes a quarter of what is left of a share,
    // so claims are few and the last ones small.
    template <class Begin, class Work>
    void for_each_dealt(int thread, Begin&& begin, Work&& work) {
        Position& own = positions[thread];
        const uint32_t phase = ++own.phase;
        const int last = begin(size), first_of_all = begin(0);
        own.target += last - first_of_all;
        int done_here = 0;
        for (int k = 0; k < size; k++) {
            const int owner = (thread + k) % size, from = begin(owner), count = begin(owner + 1) - from;
            std::atomic<uint64_t>& claimed = shares[owner].claimed;
            uint64_t seen = claimed.load(std::memory_order_relaxed);
            for (;;) {
                const uint32_t theirs = seen >> 32;
                const int first = theirs < phase ? 0 : (int)(uint32_t)seen;
                if (theirs > phase || first >= count) break;  // the others may be past this phase
                const int stop = first + std::max(1, (count - first) / 4);
                if (!claimed.compare_exchange_weak(seen, ((uint64_t)phase << 32) | (uint32_t)stop, std::memory_order_relaxed)) continue;
                for (int i = first; i < stop; i++) work(from + i);
                done_here += stop - first;
                seen = claimed.load(std::memory_order_relaxed);
            }
        }
        if (size == 1) return;
        if (done_here) done.add(done_here, own.target);
        wait(thread, done, own.target);
    }

    // Within a run: wait until `signal` reaches `target`, which it does before the run ends. A helper leaves the run for
    // that; if the run ends meanwhile, `Ended` unwinds the helper's body.
    void wait(int thread, Signal& signal, int32_t target) {
        if (signal.spin(target, std::min(GLANCE, spins))) return;
        if (!wait_outside(thread, signal, target, spins, true)) throw Ended();
    }

    // Within a run: spin until `signal` reaches `target`, at most `pauses`; then sleep until it does, if `sleeps`. A
    // helper leaves the run meanwhile. Returns false if the run has ended: the helper must return, and touch nothing of it.
    bool wait_outside(int thread, Signal& signal, int32_t target, int pauses, bool sleeps) {
        Position& own = positions[thread];
        if (thread) leave();
        if (!signal.spin(target, pauses) && sleeps) signal.sleep_until(target);
        return !thread || (own.is_inside = enter(own.round));
    }

    const int size;

  private:
    struct Ended {};
    static constexpr int GLANCE = 50;  // pauses: a microsecond or two
    static constexpr uint64_t OPEN = 1u << 31;

    struct alignas(64) Position {  // of one thread
        uint32_t phase = 0;  // number of the `for_each` in this run
        int32_t target = 0;  // of `done`, once this phase is over
        uint32_t round = 0;
        bool is_inside = true;  // a helper, in the run
    };
    struct alignas(64) Share {
        std::atomic<uint64_t> claimed{0};  // phase in the upper half, then the first item that is not claimed
    };

    void serve(int thread) {
        homes.stay(thread);
        for (uint32_t round = 0;;) {
            started.wait_for((int32_t)(round + 1), start_spins);
            if (stopping.load(std::memory_order_acquire)) return;
            round = (uint32_t)started.read();
            if (!enter(round)) continue;
            positions[thread] = base;
            positions[thread].round = round;
            try {
                body(context, thread);
            } catch (const Ended&) {
            }
            if (positions[thread].is_inside) leave();
        }
    }

    bool enter(uint32_t round) {
        uint64_t seen = door.load(std::memory_order_acquire);
        while ((uint32_t)(seen >> 32) == round && (seen & OPEN))
            if (door.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    void leave() {
        const uint64_t now = door.fetch_sub(1, std::memory_order_acq_rel) - 1;
        if (!(now & OPEN) && !(now & (OPEN - 1))) left.advance();
    }

    // No helper enters from here on; those inside find no work and leave.
    void close() {
        const int32_t target = left.read() + 1;
        const uint64_t before = door.fetch_and(~OPEN, std::memory_order_acq_rel);
        if (before & (OPEN - 1)) left.wait_for(target, spins);
    }

    const int spins, start_spins;
    const HomeCores homes;
    std::vector<Position> positions;
    std::vector<Share> shares;
    Body body = nullptr;
    void* context = nullptr;
    Position base;
    std::atomic<bool> stopping{false};
    alignas(64) std::atomic<uint64_t> door{0};
    Signal started, done, left;
    std::vector<std::thread> helpers;  // last: they use all of the above
};

// A library's own pool, for calls that any thread may make: one call at a time has the helpers, others run alone.
class SharedPool {
  public:
    // Call `work()` on up to `threads` threads; returns when all calls have. `work` claims what it does.
    template <class Work>
    static void run(int threads, Work&& work) {
        State& own = state();
        std::unique_lock<std::mutex> lock(own.mutex, std::defer_lock);
        if (threads < 2 || !lock.try_lock()) return work();
        if (!own.pool || own.pool->size != threads) own.pool = std::make_unique<ThreadPool>(threads, 2000);
        own.pool->run([](void* with, int) { (*(std::remove_reference_t<Work>*)with)(); }, (void*)&work);
    }

  private:
    struct State {
        std::mutex mutex;
        std::unique_ptr<ThreadPool> pool;
    };

    // Never destroyed: threads may still call while the process ends. A forked child has no helpers and begins anew.
    static inline std::atomic<State*> current{nullptr};

    static State& state() {
        static const bool is_prepared = [] {
            current = new State;
#if defined(__linux__)
            pthread_atfork(nullptr, nullptr, [] { current = new State; });
#endif
            return true;
        }();
        (void)is_prepared;
        return *current;
    }
};

}  // namespace mlsys
