// The seam between kernels and the executor. A kernel is one operator with its arguments bound: pointers into the arena,
// packed weights, and what else can be settled ahead of time. It runs a range of its units (rows of pixels, tiles of a
// matrix), on any thread, with scratch memory of that thread's own, so that the planner may cut it in tasks as it likes.
#pragma once

#include <cstdint>

#include <mlsys/layout.h>
#include <mlsys/math.h>

namespace nimble {

using namespace mlsys;

constexpr int MAX_RANK = 6;
MLSYS_CONSTANTS(MAX_RANK);

MLSYS_ENUM(Dtype, FLOAT32, BFLOAT16, INT64, INT32, UINT8, BOOL, FLOAT64);

// A strided window: logical shape, strides in elements (0: broadcast). Channels-last images have shape N, C, H, W and
// strides that make C the closest.
struct View {
    void* data;    // null: `*slot` at the time of the call, for a caller's own tensors
    void** slot;
    Dtype dtype;
    int32_t rank;
    int64_t shape[MAX_RANK];
    int64_t strides[MAX_RANK];

    template <class T>
    T* as() const {
        return (T*)(data ? data : *slot);
    }
};
MLSYS_STRUCT(View, data, slot, dtype, rank, shape, strides);

class Kernel {
  public:
    virtual ~Kernel() = default;
    // Its work is units 0 to units - 1, of about equal cost and independent of each other.
    int64_t units = 1;
    int64_t scratch_nbytes = 0;  // that one call of `run` wants, 64-byte aligned
    virtual void run(int64_t begin, int64_t end, void* scratch) const = 0;
};

}  // namespace nimble
