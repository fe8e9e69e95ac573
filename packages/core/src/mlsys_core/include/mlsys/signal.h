// A counter that threads wait for: a bounded spin, then sleep (futex).
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#endif

namespace mlsys {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Counts modulo 2^32; "reached" compares by the difference, so counters may wrap around.
class Signal {
  public:
    int32_t read() const { return value.load(std::memory_order_acquire); }
    bool has_reached(int32_t target) const { return reached(read(), target); }

    void advance() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) wake();
    }

    // Add `count`; wake sleepers only once the value reaches `target`, which is all that anyone waits for.
    void add(int32_t count, int32_t target) {
        const int32_t now = (int32_t)((uint32_t)value.fetch_add(count, std::memory_order_seq_cst) + (uint32_t)count);
        if (reached(now, target) && sleepers.load(std::memory_order_seq_cst)) wake();
    }

    // Spin for at most `spins` pauses; return whether the target was reached.
    bool spin(int32_t target, int spins) const {
        for (int i = 0; i < spins; i++) {
            if (has_reached(target)) return true;
            pause_briefly();
        }
        return has_reached(target);
    }

    void sleep_until(int32_t target) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (int32_t seen; !reached(seen = value.load(std::memory_order_seq_cst), target);) sleep(seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

    void wait_for(int32_t target, int spins) {
        if (!spin(target, spins)) sleep_until(target);
    }

  private:
    static bool reached(int32_t seen, int32_t target) { return (int32_t)((uint32_t)seen - (uint32_t)target) >= 0; }

#if defined(__linux__)
    void sleep(int32_t seen) { syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(int32_t) { std::this_thread::yield(); }
    void wake() {}
#endif
    alignas(64) std::atomic<int32_t> value{0};
    std::atomic<int32_t> sleepers{0};
};

}  // namespace mlsys
