// Chains of elementwise operations, interpreted a tile at a time: a tile of every intermediate result stays in the
// first-level cache, so that a chain reads its inputs and writes its result once.
#pragma once

#include <vector>

#include "copy.h"

namespace nimble {

MLSYS_ENUM(
    Op,
    ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, POW,
    NEG, ABS, EXP, LOG, SQRT, RSQRT, RECIPROCAL, SQUARE, ERF, SIN, COS,
    FLOOR, CEIL, ROUND, TRUNC, SIGN,
    OP_RELU, OP_RELU6, OP_SILU, OP_SIGMOID, OP_TANH, OP_GELU, OP_GELU_TANH, OP_HARDSWISH, OP_HARDSIGMOID,
    OP_LEAKY_RELU, OP_ELU,
    EQ, NE, LT, LE, GT, GE, LOGICAL_AND, LOGICAL_OR, LOGICAL_NOT, WHERE, CLAMP);

constexpr int MAX_ARGUMENTS = 3;
constexpr int MAX_REGISTERS = 64;
MLSYS_CONSTANTS(MAX_REGISTERS);

struct Step {
    Op op;
    int32_t registers[MAX_ARGUMENTS];  // of the arguments; negative: the constant
    double constants[MAX_ARGUMENTS];
    int32_t target;  // a register; inputs come first
};
MLSYS_STRUCT(Step, op, registers, constants, target);

struct Pointwise {
    const View* inputs;  // of the result's merged shape
    int32_t num_inputs;
    int32_t num_registers;
    const Step* steps;
    int32_t num_steps;
    int32_t is_wide;      // computed in double: integers, float64
    int32_t is_integral;  // every step's result is cut to a whole number
    View out;
};
MLSYS_STRUCT(Pointwise, inputs, num_inputs, num_registers, steps, num_steps, is_wide, is_integral, out);

constexpr int TILE = 512;  // elements

// What a step reads: elements side by side, or one vector over and over.
template <class T>
struct Operand {
    const T* from;
    int step;  // 1 or 0
};

inline vf truth(vi mask) { return (vf)(mask & 0x3f800000); }

inline vf power(vf x, vf y) {
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = std::pow(x[i], y[i]);
    return out;
}

template <class F>
inline void each_vector(int count, const Operand<float>* args, float* to, F&& f) {
    const float *a = args[0].from, *b = args[1].from, *c = args[2].from;
    const int a_step = args[0].step, b_step = args[1].step, c_step = args[2].step;
    for (int i = 0; i < count; i += LANES) store(to + i, f(load(a + i * a_step), load(b + i * b_step), load(c + i * c_step)));
}

inline void apply(int32_t op, int count, const Operand<float>* args, float* to) {
    const vf one = splat(1.0f), zero{};
    switch (op) {
#define NIMBLE_OP(NAME, EXPRESSION)                                            \
    case NAME:                                                                 \
        return each_vector(count, args, to, [=](vf a, vf b, vf c) -> vf {      \
            (void)a, (void)b, (void)c, (void)one, (void)zero;                  \
            return EXPRESSION;                                                 \
        });
        NIMBLE_OP(ADD, a + b)
        NIMBLE_OP(SUB, a - b)
        NIMBLE_OP(MUL, a * b)
        NIMBLE_OP(DIV, a / b)
        NIMBLE_OP(MAXIMUM, maximum(a, b))
        NIMBLE_OP(MINIMUM, minimum(a, b))
        NIMBLE_OP(POW, power(a, b))
        NIMBLE_OP(NEG, -a)
        NIMBLE_OP(ABS, abs(a))
        NIMBLE_OP(EXP, exp(a))
        NIMBLE_OP(LOG, log(a))
        NIMBLE_OP(SQRT, sqrt(a))
        NIMBLE_OP(RSQRT, one / sqrt(a))
        NIMBLE_OP(RECIPROCAL, one / a)
        NIMBLE_OP(SQUARE, a * a)
        NIMBLE_OP(ERF, erf(a))
        NIMBLE_OP(SIN, sin(a))
        NIMBLE_OP(COS, cos(a))
        NIMBLE_OP(FLOOR, floor(a))
        NIMBLE_OP(CEIL, ceil(a))
        NIMBLE_OP(ROUND, round(a))
        NIMBLE_OP(TRUNC, trunc(a))
        NIMBLE_OP(SIGN, truth(a > zero) - truth(a < zero))
        NIMBLE_OP(OP_RELU, activate(a, RELU, 0))
        NIMBLE_OP(OP_RELU6, activate(a, RELU6, 0))
        NIMBLE_OP(OP_SILU, activate(a, SILU, 0))
        NIMBLE_OP(OP_SIGMOID, activate(a, SIGMOID, 0))
        NIMBLE_OP(OP_TANH, activate(a, TANH, 0))
        NIMBLE_OP(OP_GELU, activate(a, GELU, 0))
        NIMBLE_OP(OP_GELU_TANH, activate(a, GELU_TANH, 0))
        NIMBLE_OP(OP_HARDSWISH, activate(a, HARDSWISH, 0))
        NIMBLE_OP(OP_HARDSIGMOID, activate(a, HARDSIGMOID, 0))
        NIMBLE_OP(OP_LEAKY_RELU, activate(a, LEAKY_RELU, b[0]))
        NIMBLE_OP(OP_ELU, activate(a, ELU, b[0]))
        NIMBLE_OP(EQ, truth(a == b))
        NIMBLE_OP(NE, truth(a != b))
        NIMBLE_OP(LT, truth(a < b))
        NIMBLE_OP(LE, truth(a <= b))
        NIMBLE_OP(GT, truth(a > b))
        NIMBLE_OP(GE, truth(a >= b))
        NIMBLE_OP(LOGICAL_AND, truth((a != zero) & (b != zero)))
        NIMBLE_OP(LOGICAL_OR, truth((a != zero) | (b != zero)))
        NIMBLE_OP(LOGICAL_NOT, truth(a == zero))
        NIMBLE_OP(WHERE, chosen(a != zero, b, c))
        NIMBLE_OP(CLAMP, smaller(c, larger(b, a)))
#undef NIMBLE_OP
    }
}

// In double, an element at a time: for integers, which it holds exactly to 2^53.
inline double applied(int32_t op, double a, double b, double c) {
    switch (op) {
        case ADD: return a + b;
        case SUB: return a - b;
        case MUL: return a * b;
        case DIV: return a / b;
        case MAXIMUM: return a != a || a > b ? a : b;
        case MINIMUM: return a != a || a < b ? a : b;
        case POW: return std::pow(a, b);
        case NEG: return -a;
        case ABS: return std::fabs(a);
        case EXP: return std::exp(a);
        case LOG: return std::log(a);
        case SQRT: return std::sqrt(a);
        case RSQRT: return 1 / std::sqrt(a);
        case RECIPROCAL: return 1 / a;
        case SQUARE: return a * a;
        case ERF: return std::erf(a);
        case SIN: return std::sin(a);
        case COS: return std::cos(a);
        case FLOOR: return std::floor(a);
        case CEIL: return std::ceil(a);
        case ROUND: return std::nearbyint(a);
        case TRUNC: return std::trunc(a);
        case SIGN: return (a > 0) - (a < 0);
        case OP_RELU: return 0 > a ? 0 : a;
        case OP_RELU6: return 0 > a ? 0 : 6 < a ? 6 : a;
        case OP_SILU: return a / (1 + std::exp(-a));
        case OP_SIGMOID: return 1 / (1 + std::exp(-a));
        case OP_TANH: return std::tanh(a);
        case OP_GELU: return 0.5 * a * (1 + std::erf(a * 0.70710678118654752));
        case OP_GELU_TANH: return 0.5 * a * (1 + std::tanh(0.79788456080286536 * (a + 0.044715 * a * a * a)));
        case OP_HARDSWISH: return a * applied(OP_RELU6, a + 3, 0, 0) / 6;
        case OP_HARDSIGMOID: return applied(OP_RELU6, a + 3, 0, 0) / 6;
        case OP_LEAKY_RELU: return a > 0 ? a : a * b;
        case OP_ELU: return a > 0 ? a : b * std::expm1(a);
        case EQ: return a == b;
        case NE: return a != b;
        case LT: return a < b;
        case LE: return a <= b;
        case GT: return a > b;
        case GE: return a >= b;
        case LOGICAL_AND: return a != 0 && b != 0;
        case LOGICAL_OR: return a != 0 || b != 0;
        case LOGICAL_NOT: return a == 0;
        case WHERE: return a != 0 ? b : c;
        case CLAMP: return b > a ? b : c < a ? c : a;
    }
    return 0;
}

inline void apply(int32_t op, int count, const Operand<double>* args, double* to) {
    for (int i = 0; i < count; i++)
        to[i] = applied(op, args[0].from[i * args[0].step], args[1].from[i * args[1].step], args[2].from[i * args[2].step]);
}

template <class T>
class PointwiseKernel : public Kernel {
  public:
    explicit PointwiseKernel(const Pointwise& p)
        : inputs(p.inputs, p.inputs + p.num_inputs), steps(p.steps, p.steps + p.num_steps), out(p.out),
          num_registers(p.num_registers), is_integral(p.is_integral) {
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
            // Where all rows are one, such as a factor per channel, the first tile's are there already.
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
            if constexpr (std::is_same_v<T, double>)
                if (is_integral) std::transform(to, to + elements, to, [](double x) { return std::trunc(x); });
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
        if (view.dtype != (std::is_same_v<T, float> ? FLOAT32 : FLOAT64)) return false;
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
        const int64_t elements = count * some;  // the last vector is computed whole
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
    const bool is_integral;
    int64_t rows = 1, width, pieces, tile_rows, row_tiles, tiles_per_unit;
};

}  // namespace nimble
