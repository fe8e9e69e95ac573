// Memory in which the ranks of one stage meet: the partial sums of each, and signals that they are there (ADR 22).
//
// Every rank maps the same memory. A meeting has a number, which all ranks count alike: each writes what it has into its own
// slot, says that it has arrived, and waits for the others: a bounded spin, then a futex. Slots come in two sets that take
// turns, so one wait a meeting is enough: who arrives at meeting n has read what meeting n - 2 left in that set.
// A rank whose peer is gone is woken by `abort`, and no wait lasts from then on.
// Ranks of other hosts have slots here as well: who carries them between hosts writes those and arrives for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include <mlsys/signal.h>

#include "rows.h"

namespace orca {

constexpr int MAX_RANKS = 8;
constexpr int MEETING_HEADER = 1024;  // bytes before the slots
MLSYS_CONSTANTS(MAX_RANKS, MEETING_HEADER);

// At the beginning of the memory, which was all zeros.
struct MeetingHeader {
    struct alignas(64) Line {
        std::atomic<uint32_t> arrived;   // number of the rank's last meeting
        std::atomic<uint32_t> sleepers;  // that wait for it; one that died may still be counted
        std::atomic<uint64_t> sizes[2];  // of both slots: the meeting's number in the upper half, its floats in the lower
    } ranks[MAX_RANKS];
    alignas(64) std::atomic<uint32_t> aborted;
};
static_assert(sizeof(MeetingHeader) <= MEETING_HEADER, "the slots begin behind the header");

class Meeting {
  public:
    Meeting(void* memory, int rank, int num_ranks, int64_t slot_size)
        : rank(rank), num_ranks(num_ranks), slot_size(slot_size), header((MeetingHeader*)memory),
          slots((float*)((char*)memory + MEETING_HEADER)) {}

    // Where `whose` partial sums of a meeting are.
    float* slot(uint32_t number, int whose) const { return slots + ((number & 1) * num_ranks + whose) * slot_size; }

    // Say that `num_floats` of this rank's slot of a meeting are written. Any thread, and several, may say so.
    void arrive(uint32_t number, int64_t num_floats) {
        MeetingHeader::Line& own = header->ranks[rank];
        std::atomic<uint64_t>& size = own.sizes[number & 1];
        uint64_t noted = size.load(std::memory_order_relaxed);  // a late thread must not undo what a later meeting noted
        while ((int32_t)((uint32_t)(noted >> 32) - number) < 0)
            if (size.compare_exchange_weak(noted, (uint64_t)number << 32 | (uint32_t)num_floats, std::memory_order_relaxed))
                break;
        uint32_t seen = own.arrived.load(std::memory_order_acquire);
        while ((int32_t)(seen - number) < 0)
            if (own.arrived.compare_exchange_weak(seen, number, std::memory_order_seq_cst)) {
                if (own.sleepers.load(std::memory_order_seq_cst)) wake(own);
                return;
            }
    }

    // Wait until all have arrived at a meeting; return false if it was aborted.
    bool wait(uint32_t number) {
        for (int other = 0; other < num_ranks; other++) {
            MeetingHeader::Line& line = header->ranks[other];
            for (int i = 0; i < SPINS && !has_arrived(line, number); i++) mlsys::pause_briefly();
            while (!has_arrived(line, number)) {
                if (is_aborted()) return false;
                sleep(line, number);
            }
        }
        return !is_aborted();
    }

    // Wait until this rank, of which another process may be, has arrived at a meeting, and return the floats of its slot;
    // -1: aborted. Sleeps: this is for who carries slots to other hosts.
    int64_t await(uint32_t number) {
        MeetingHeader::Line& own = header->ranks[rank];
        while (!has_arrived(own, number)) {
            if (is_aborted()) return -1;
            sleep(own, number);
        }
        return is_aborted() ? -1 : (int64_t)(uint32_t)own.sizes[number & 1].load(std::memory_order_relaxed);
    }

    void abort() {
        header->aborted.store(1, std::memory_order_seq_cst);
        for (int i = 0; i < num_ranks; i++) wake(header->ranks[i]);
    }

    bool is_aborted() const { return header->aborted.load(std::memory_order_acquire); }

    const int rank, num_ranks;
    const int64_t slot_size;  // floats
    uint32_t next = 1;        // number of the meeting that comes

  private:
    static constexpr int SPINS = 4000;  // pauses: some 40 microseconds, as long as ranks that run side by side are apart
    static constexpr long LONGEST_SLEEP_NS = 50'000'000;  // then it looks at `aborted` itself

    static bool has_arrived(const MeetingHeader::Line& line, uint32_t number) {
        return (int32_t)(line.arrived.load(std::memory_order_acquire) - number) >= 0;
    }

    static void sleep(MeetingHeader::Line& line, uint32_t number) {
#if defined(__linux__)
        const timespec longest{0, LONGEST_SLEEP_NS};
        line.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = line.arrived.load(std::memory_order_seq_cst);
        if ((int32_t)(seen - number) < 0) syscall(SYS_futex, &line.arrived, FUTEX_WAIT, seen, &longest, nullptr, 0);
        line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
        (void)line, (void)number;
        std::this_thread::yield();
#endif
    }

    static void wake(MeetingHeader::Line& line) {
#if defined(__linux__)
        syscall(SYS_futex, &line.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
        (void)line;
#endif
    }

    MeetingHeader* const header;
    float* const slots;
};

// The sum of `num_ranks` parts (1 to 4, or 8) in the tree that `add_slices` has: each part is a subtree.
template <class Load>
inline vf add_ranks(int num_ranks, Load&& part) {
    if (num_ranks == 1) return part(0);
    const vf first = part(0) + part(1);
    if (num_ranks == 2) return first;
    if (num_ranks == 3) return first + part(2);
    const vf four = first + (part(2) + part(3));
    return num_ranks == 4 ? four : four + ((part(4) + part(5)) + (part(6) + part(7)));
}

}  // namespace orca
