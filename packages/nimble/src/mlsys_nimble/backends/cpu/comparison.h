// Detect changed memory: weights of which other kernels hold packed copies.
#pragma once

#include <algorithm>
#include <vector>

#include "../../state/digest.h"
#include "kernel.h"

namespace nimble {

struct Comparison {
    const void* const* addresses;  // count
    const int64_t* nbytes;         // count
    int64_t count;
    int32_t* fault;  // set to 1 where bytes have changed since the kernel was made
};
MLSYS_STRUCT(Comparison, addresses, nbytes, count, fault);

class ComparisonKernel : public Kernel {
  public:
    explicit ComparisonKernel(const Comparison& c) : fault(c.fault) {
        for (int64_t tensor = 0; tensor < c.count; tensor++)
            for (int64_t at = 0; at < c.nbytes[tensor]; at += PIECE_NBYTES) {
                const char* data = (const char*)c.addresses[tensor] + at;
                const int64_t nbytes = std::min(c.nbytes[tensor] - at, PIECE_NBYTES);
                pieces.push_back({data, nbytes, digest(data, nbytes)});
            }
        units = pieces.size();
    }

    void run(int64_t begin, int64_t end, void*) const override {
        bool is_same = true;
        for (int64_t i = begin; i < end; i++)
            is_same &= digest(pieces[i].data, pieces[i].nbytes) == pieces[i].digest;
        if (!is_same) __atomic_store_n(fault, 1, __ATOMIC_RELAXED);  // several workers may
    }

  private:
    static constexpr int64_t PIECE_NBYTES = 64 * 1024;

    struct Piece {
        const char* data;
        int64_t nbytes;
        uint64_t digest;
    };

    static uint64_t digest(const char* data, int64_t nbytes) {
        Sums sums;
        sums.read(data, nbytes);
        return sums.into(0, nbytes);
    }

    int32_t* const fault;
    std::vector<Piece> pieces;
};

}  // namespace nimble
