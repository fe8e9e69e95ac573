// Chains of elementwise operations, interpreted a tile at a time: a tile of every intermediate result stays in the
// first-level cache, so that a chain reads its inputs and writes its result once.
#pragma once

#include <vector>

#include "steps.h"

namespace nimble {

struct Pointwise {
    const View* inputs;  // of the result's merged shape
    int32_t num_inputs;
    int32_t num_registers;
    const Step* steps;
    int32_t num_steps;
    Dtype dtype;  // computed in: float, int64 that wraps around as the dtype does, or double
    View out;
};
MLSYS_STRUCT(Pointwise, inputs, num_inputs, num_registers, steps, num_steps, dtype, out);

constexpr int TILE = 512;  // elements

template <class T>
class PointwiseKernel : public Kernel {
  public:
    explicit PointwiseKernel(const Pointwise& p)
        : inputs(p.inputs, p.inputs + p.num_inputs), steps(p.steps, p.steps + p.num_steps), out(p.out),
          num_registers(p.num_registers), dtype(p.dtype) {
        const int last = out.rank - 1;
        for (int d = 0; d < last; d++) rows *= out.shape[d];
        width = out.shape[last];
        pieces = (width + TILE - 1) / TILE;
        tile_rows = width ? std::clamp<int64_t>(TILE / width, 1, rows ? rows : 1) : 1;
        if (tile_rows > VECTOR) tile_rows -= tile_rows % VECTOR;  // whole vectors
        row_tiles = (rows + tile_rows - 1) / tile_rows;
        tiles_per_unit = std::max<int64_t>(1, UNIT_ELEMENTS / std::max<int64_t>(1, tile_rows * std::min<int64_t>(width, TILE)));
        const int64_t tiles = row_tiles * pieces;
        units = rows && width ? (tiles + tiles_per_unit - 1) / tiles_per_unit : 0;
        scratch_nbytes = (int64_t)(num_registers + 1) * TILE * sizeof(T) + (inputs.size() + steps.size() * MAX_ARGUMENTS) * VECTOR * sizeof(T);
    }

    void run(int64_t begin, int64_t end, void* scratch) const override {
        T* registers = (T*)scratch;
        T* constants = registers + (int64_t)(num_registers + 1) * TILE;
        for (size_t i = 0; i < steps.size() * MAX_ARGUMENTS; i++)
            std::fill_n(constants + i * VECTOR, VECTOR, (T)steps[i / MAX_ARGUMENTS].constants[i % MAX_ARGUMENTS]);
        for (int64_t tile = begin * tiles_per_unit; tile < std::min(row_tiles * pieces, end * tiles_per_unit); tile++) {
            const int64_t row = tile / pieces * tile_rows, piece = tile % pieces;
            const int64_t first = piece * TILE, some = std::min<int64_t>(width - first, TILE);
            run_tile(row, std::min(tile_rows, rows - row), first, some, registers, constants, tile == begin * tiles_per_unit);
        }
    }

  private:
    static constexpr int VECTOR = std::is_same_v<T, float> ? LANES : 1;

    // `count` rows of `some` elements each.
    void run_tile(int64_t row, int64_t count, int64_t first, int64_t some, T* registers, const T* constants, bool is_first) const {
        const int elements = count * some, whole = elements / VECTOR * VECTOR;
        const T* where[MAX_REGISTERS];
        for (size_t i = 0; i < inputs.size(); i++) {
            T* buffer = registers + i * TILE;
            where[i] = adjacent(inputs[i], row, count, some) && whole == elements ? at<T>(inputs[i], row, first)
                                                                                     : buffer;
            // An operand that is equal in all rows (a factor per channel) is gathered for the first tile only.
            if (where[i] == buffer && (is_first || pieces > 1 || !repeats(inputs[i]))) gather(inputs[i], row, count, first, some, buffer);
        }
        for (int r = inputs.size(); r < num_registers; r++) where[r] = registers + r * TILE;
        T* result = registers + (int64_t)num_registers * TILE;
        const bool in_place = adjacent(out, row, count, some) && whole == elements;
        if (in_place) result = (T*)at<T>(out, row, first);
        for (size_t s = 0; s < steps.size(); s++) {
            Operand<T> args[MAX_ARGUMENTS];
            for (int k = 0; k < MAX_ARGUMENTS; k++) {
                const int32_t reg = steps[s].registers[k];
                if (reg >= 0)
                    args[k] = {where[reg], 1};
                else
                    args[k] = {constants + (s * MAX_ARGUMENTS + k) * VECTOR, 0};
            }
            T* to = s + 1 == steps.size() ? result : registers + steps[s].target * TILE;
            apply(steps[s].op, elements, args, to);
            if constexpr (std::is_same_v<T, int64_t>) {
                if (dtype == INT32) std::transform(to, to + elements, to, [](int64_t x) { return (int32_t)x; });
                if (dtype == UINT8) std::transform(to, to + elements, to, [](int64_t x) { return (uint8_t)x; });
            }
        }
        if (!in_place) scatter(row, count, first, some, result);
    }

    template <class S>
    static const S* at(const View& view, int64_t row, int64_t first) {
        return view.as<const S>() + row_offset(view, row) + first * view.strides[view.rank - 1];
    }

    static bool repeats(const View& view) {
        return std::all_of(view.strides, view.strides + view.rank - 1, [](int64_t stride) { return stride == 0; });
    }

    // Whether the tile lies in one run of T's.
    static bool adjacent(const View& view, int64_t row, int64_t count, int64_t some) {
        if (view.dtype != (std::is_same_v<T, float> ? FLOAT32 : std::is_same_v<T, double> ? FLOAT64 : INT64)) return false;
        const int last = view.rank - 1;
        if (view.strides[last] != 1 && some != 1) return false;
        if (count == 1) return true;
        if (view.strides[last - 1] != some) return false;
        return row % view.shape[last - 1] + count <= view.shape[last - 1];
    }

    void gather(const View& view, int64_t row, int64_t count, int64_t first, int64_t some, T* to) const {
        with_type(view.dtype, [&](auto type) {
            using From = decltype(type);
            const int64_t step = view.strides[view.rank - 1];
            for (int64_t r = 0; r < count; r++, to += some) {
                const From* from = at<From>(view, row + r, first);
                if (step == 0)
                    std::fill_n(to, some, converted<T>(*from));
                else if (step == 1)
                    for (int64_t i = 0; i < some; i++) to[i] = converted<T>(from[i]);
                else
                    for (int64_t i = 0; i < some; i++) to[i] = converted<T>(from[i * step]);
            }
        });
        const int64_t elements = count * some;  // the last vector is computed in full
        std::fill(to, to + (VECTOR - elements % VECTOR) % VECTOR, T(1));
    }

    void scatter(int64_t row, int64_t count, int64_t first, int64_t some, const T* from) const {
        with_type(out.dtype, [&](auto type) {
            using To = decltype(type);
            const int64_t step = out.strides[out.rank - 1];
            for (int64_t r = 0; r < count; r++, from += some) {
                To* to = (To*)at<To>(out, row + r, first);
                if (step == 1)
                    for (int64_t i = 0; i < some; i++) to[i] = converted<To>(from[i]);
                else
                    for (int64_t i = 0; i < some; i++) to[i * step] = converted<To>(from[i]);
            }
        });
    }

    const std::vector<View> inputs;
    const std::vector<Step> steps;
    const View out;
    const int num_registers;
    const Dtype dtype;
    int64_t rows = 1, width, pieces, tile_rows, row_tiles, tiles_per_unit;
};

}  // namespace nimble
