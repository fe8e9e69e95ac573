// A number that threads wait for to change: a short spin, then sleep.
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

// A number that threads wait for to change, or that grows and they wait for to reach another; numbers wrap around.
class Signal {
  public:
    int32_t read() const { return value.load(std::memory_order_acquire); }

    void advance() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) wake();
    }

    void wait_past(int32_t seen, int spins) {
        for (int i = 0; i < spins; i++) {
            if (read() != seen) return;
            pause_briefly();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == seen) sleep(seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

    void wait_for(int32_t target, int spins) {
        for (int i = 0; i < spins; i++) {
            if (has_reached(read(), target)) return;
            pause_briefly();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (int32_t seen; !has_reached(seen = value.load(std::memory_order_seq_cst), target);) sleep(seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    static bool has_reached(int32_t seen, int32_t target) { return (int32_t)((uint32_t)seen - (uint32_t)target) >= 0; }

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
