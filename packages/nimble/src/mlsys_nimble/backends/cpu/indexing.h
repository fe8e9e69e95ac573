// Gather of rows and scatter-add into rows, by indices that are known at the call.
#pragma once

#include <vector>

#include "rows.h"

namespace nimble {

// The row of an index; negative ones count from the end where that is allowed. -1: there is none.
inline int64_t row_of(const View& indices, int64_t offset, int64_t num_rows, bool wraps) {
    int64_t row = indices.dtype == INT64 ? indices.as<const int64_t>()[offset] : indices.as<const int32_t>()[offset];
    if (wraps && row < 0) row += num_rows;
    return row >= 0 && row < num_rows ? row : -1;
}

struct Gather {
    View x;         // [rows, width], elements of a row side by side
    View indices;
    View out;       // as indices, of the rows' first elements
    int32_t wraps;  // negative indices count from the end
    int32_t* fault;  // set to 1 where an index has no row
};
MLSYS_STRUCT(Gather, x, indices, out, wraps, fault);

class GatherKernel : public Kernel {
  public:
    explicit GatherKernel(const Gather& g) : g(g), from(offsets_of(g.indices)), to(offsets_of(g.out)) {
        per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / std::max<int64_t>(1, g.x.shape[1]));
        units = (from.size() + per_unit - 1) / per_unit;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        const int64_t size = itemsize(g.x.dtype), nbytes = g.x.shape[1] * size, step = g.x.strides[0] * size;
        const char* x = g.x.as<const char>();
        char* out = g.out.as<char>();
        for (int64_t i = begin * per_unit; i < std::min<int64_t>(from.size(), end * per_unit); i++) {
            const int64_t row = row_of(g.indices, from[i], g.x.shape[0], g.wraps);
            if (row < 0)
                __atomic_store_n(g.fault, 1, __ATOMIC_RELAXED);  // several workers may
            else if (nbytes == 4)
                std::memcpy(out + to[i] * size, x + row * step, 4);  // one instruction
            else
                std::memcpy(out + to[i] * size, x + row * step, nbytes);
        }
    }

  private:
    const Gather g;
    const std::vector<int64_t> from, to;
    int64_t per_unit;
};

struct ScatterAdd {
    View x;        // [rows, width]; of it and the two below, elements of a row are side by side
    View source;   // [terms, width], or [rows, width] if `taken` selects some
    View out;      // [rows, width]; may be x
    View indices;  // [terms]
    View taken;    // [terms]: rows of the source; rank 0: all in order
    View scale;    // [terms]: a factor of each row; rank 0: none
    int32_t wraps;  // negative numbers in `taken` count from the end
    int32_t* fault;
};
MLSYS_STRUCT(ScatterAdd, x, source, out, indices, taken, scale, wraps, fault);

// A work unit is a range of columns, so the terms of each sum are added in the same order by any number of workers.
class ScatterAddKernel : public Kernel {
  public:
    explicit ScatterAddKernel(const ScatterAdd& s) : s(s) {
        units = s.x.shape[0] ? (s.x.shape[1] + COLUMNS - 1) / COLUMNS : 0;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        const int64_t first = begin * COLUMNS, stop = std::min(s.x.shape[1], end * COLUMNS), count = stop - first;
        const float *x = s.x.as<const float>() + first, *source = s.source.as<const float>() + first;
        float* out = s.out.as<float>() + first;
        const int64_t out_step = s.out.strides[0];
        if (x != out)
            for (int64_t row = 0; row < s.x.shape[0]; row++)
                std::memcpy(out + row * out_step, x + row * s.x.strides[0], count * sizeof(float));
        for (int64_t term = 0; term < s.indices.shape[0]; term++) {
            const int64_t row = row_of(s.indices, term * s.indices.strides[0], s.x.shape[0], false);
            const int64_t of = s.taken.rank ? row_of(s.taken, term * s.taken.strides[0], s.source.shape[0], s.wraps) : term;
            if (row < 0 || of < 0) {
                __atomic_store_n(s.fault, 1, __ATOMIC_RELAXED);
                continue;
            }
            const vf scale = splat(s.scale.rank ? s.scale.as<const float>()[term * s.scale.strides[0]] : 1.0f);
            float* to = out + row * out_step;
            const float* from = source + of * s.source.strides[0];
            if (count == 1) {  // a masked vector would wait for the one before it
                to[0] += from[0] * scale[0];
                continue;
            }
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) store(to + i, load(to + i) + load(from + i) * scale);
            if (i < count) store_first(to + i, load_first(to + i, count - i) + load_first(from + i, count - i) * scale, count - i);
        }
    }

  private:
    static constexpr int64_t COLUMNS = 64;
    const ScatterAdd s;
};

}  // namespace nimble
