// Copies between any two layouts: transposes, parts of concatenations, casts, padding. The caller has merged and
// ordered the dimensions (loops.py): the last one has the result's smallest stride.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernel.h"

namespace nimble {

constexpr int64_t UNIT_ELEMENTS = 8192;  // elements of a work unit of copies and elementwise operators, about

template <class Work>
inline void with_type(int32_t dtype, Work&& work) {
    switch (dtype) {
        case FLOAT32: return work(float());
        case BFLOAT16: return work(uint16_t());
        case INT64: return work(int64_t());
        case INT32: return work(int32_t());
        case UINT8: return work(uint8_t());
        case BOOL: return work(bool());
        default: return work(double());
    }
}

inline int64_t itemsize(int32_t dtype) {
    int64_t size = 0;
    with_type(dtype, [&](auto type) { size = sizeof(type); });
    return size;
}

// bf16 travels as uint16_t, which no other dtype uses.
template <class To, class From>
inline To converted(From x) {
    if constexpr (std::is_same_v<From, To>) {
        return x;
    } else if constexpr (std::is_same_v<From, uint16_t>) {
        const uint32_t bits = (uint32_t)x << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return converted<To>(value);
    } else if constexpr (std::is_same_v<To, uint16_t>) {
        return to_bf16((float)x);
    } else if constexpr (std::is_same_v<To, uint8_t> && std::is_floating_point_v<From>) {
        return (uint8_t)(int64_t)x;  // wraps around, as torch does
    } else {
        return (To)x;  // to bool: true if not zero
    }
}

struct Copy {
    View x, out;
};
MLSYS_STRUCT(Copy, x, out);

// Return the offset of a row of a view.
inline int64_t row_offset(const View& view, int64_t row) {
    int64_t offset = 0;
    for (int d = view.rank - 2; d >= 0; d--) {
        offset += row % view.shape[d] * view.strides[d];
        row /= view.shape[d];
    }
    return offset;
}

// The same for rows one after another, without a division for each.
class RowWalk {
  public:
    RowWalk(const View& view, int64_t row) : offset(row_offset(view, row)), view(view) {
        for (int d = view.rank - 2; d >= 0; d--) {
            index[d] = row % view.shape[d];
            row /= view.shape[d];
        }
    }

    void next() {
        for (int d = view.rank - 2; d >= 0; d--) {
            offset += view.strides[d];
            if (++index[d] < view.shape[d]) return;
            offset -= view.shape[d] * view.strides[d];
            index[d] = 0;
        }
    }

    int64_t offset;

  private:
    const View& view;
    int64_t index[MAX_RANK];
};

class CopyKernel : public Kernel {
  public:
    explicit CopyKernel(const Copy& c) : c(c) {
        const int rank = c.out.rank;
        for (int d = 0; d < rank - 1; d++) rows *= c.out.shape[d];
        width = c.out.shape[rank - 1];
        // Planes to channels-last and back: the dimension before the last has x's smallest stride.
        transposes = rank >= 2 && c.x.strides[rank - 1] != 1 && c.x.strides[rank - 2] == 1 && c.out.strides[rank - 1] == 1;
        const int64_t elements = rows * width;
        if (transposes) {
            height = c.out.shape[rank - 2];
            strips = (height + STRIP - 1) / STRIP;
            pieces = std::max<int64_t>(1, width / STRIP / 4);
            units = rows / std::max<int64_t>(height, 1) * strips * pieces;
        } else {
            rows_per_unit = std::max<int64_t>(1, std::min(UNIT_ELEMENTS / std::max<int64_t>(width, 1), rows));
            units = (rows + rows_per_unit - 1) / rows_per_unit;
            if (rows == 1 && width > UNIT_ELEMENTS) pieces = (width + UNIT_ELEMENTS - 1) / UNIT_ELEMENTS;
            units *= pieces;
        }
        if (!elements) units = 0;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        with_type(c.x.dtype, [&](auto from) {
            with_type(c.out.dtype, [&](auto to) {
                using From = decltype(from);
                using To = decltype(to);
                for (int64_t unit = begin; unit < end; unit++) transposes ? transpose<From, To>(unit) : copy<From, To>(unit);
            });
        });
    }

  private:
    static constexpr int64_t STRIP = 64, BLOCK = 16;

    template <class From, class To>
    void copy(int64_t unit) const {
        const int64_t x_step = c.x.strides[c.x.rank - 1], out_step = c.out.strides[c.out.rank - 1];
        const int64_t piece = unit % pieces, start = width * piece / pieces, stop = width * (piece + 1) / pieces;
        const int64_t first = unit / pieces * rows_per_unit;
        RowWalk x_walk(c.x, first), out_walk(c.out, first);
        for (int64_t row = first; row < std::min(rows, first + rows_per_unit); row++, x_walk.next(), out_walk.next()) {
            const From* from = c.x.as<const From>() + x_walk.offset;
            To* to = c.out.as<To>() + out_walk.offset;
            if (std::is_same_v<From, To> && x_step == 1 && out_step == 1)
                std::memcpy((void*)(to + start), (const void*)(from + start), (stop - start) * sizeof(To));
            else if (x_step == 1 && out_step == 1)
                for (int64_t i = start; i < stop; i++) to[i] = converted<To>(from[i]);
            else
                for (int64_t i = start; i < stop; i++) to[i * out_step] = converted<To>(from[i * x_step]);
        }
    }

    template <class From, class To>
    void transpose(int64_t unit) const {
        const int rank = c.out.rank;
        const int64_t piece = unit % pieces, strip = unit / pieces % strips, outer = unit / pieces / strips * height;
        const int64_t first = strip * STRIP, last = std::min(height, first + STRIP);
        const From* from = c.x.as<const From>() + row_offset(c.x, outer);
        To* to = c.out.as<To>() + row_offset(c.out, outer);
        const int64_t x_step = c.x.strides[rank - 1], out_row = c.out.strides[rank - 2];
        const int64_t end = width * (piece + 1) / pieces;
        for (int64_t j = width * piece / pieces; j < end; j += BLOCK) {
            const int64_t stop = std::min(end, j + BLOCK);
            for (int64_t i = first; i < last; i++)
                for (int64_t k = j; k < stop; k++) to[i * out_row + k] = converted<To>(from[k * x_step + i]);
        }
    }

    const Copy c;
    int64_t rows = 1, width, rows_per_unit = 1, pieces = 1, height = 0, strips = 0;
    bool transposes;
};

struct Pad {
    View x, out;               // of one rank and dtype; dimensions in the result's order of closeness
    int64_t before[MAX_RANK];  // x's first element in the result; negative crops
    double value;
};
MLSYS_STRUCT(Pad, x, out, before, value);

class PadKernel : public Kernel {
  public:
    explicit PadKernel(const Pad& p) : p(p) {
        for (int d = 0; d < p.out.rank - 1; d++) rows *= p.out.shape[d];
        const int64_t width = p.out.shape[p.out.rank - 1];
        rows_per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / std::max<int64_t>(width, 1));
        units = rows && width ? (rows + rows_per_unit - 1) / rows_per_unit : 0;
    }

    void run(int64_t begin, int64_t end, void*) const override {
        with_type(p.out.dtype, [&](auto type) {
            for (int64_t row = begin * rows_per_unit; row < std::min(rows, end * rows_per_unit); row++) fill<decltype(type)>(row);
        });
    }

  private:
    template <class T>
    void fill(int64_t row) const {
        const int last = p.out.rank - 1;
        const T value = converted<T>(p.value);
        T* to = p.out.as<T>() + row_offset(p.out, row);
        const T* from = p.x.as<const T>();
        bool inside = true;
        for (int d = last - 1; d >= 0; d--) {
            const int64_t i = row % p.out.shape[d] - p.before[d];
            row /= p.out.shape[d];
            inside &= i >= 0 && i < p.x.shape[d];
            from += i * p.x.strides[d];
        }
        const int64_t width = p.out.shape[last], step = p.out.strides[last], x_step = p.x.strides[last];
        const int64_t left = inside ? std::clamp<int64_t>(p.before[last], 0, width) : width;
        const int64_t right = inside ? std::clamp<int64_t>(p.before[last] + p.x.shape[last], left, width) : width;
        for (int64_t i = 0; i < left; i++) to[i * step] = value;
        for (int64_t i = left; i < right; i++) to[i * step] = from[(i - p.before[last]) * x_step];
        for (int64_t i = right; i < width; i++) to[i * step] = value;
    }

    const Pad p;
    int64_t rows = 1, rows_per_unit;
};

}  // namespace nimble
