// Steps of elementwise chains over a tile: in float32 by vectors, in int64, in float64.
#pragma once

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
    int32_t registers[MAX_ARGUMENTS];  // register of each argument; negative: the constant
    double constants[MAX_ARGUMENTS];
    int32_t target;  // a register; inputs come first
};
MLSYS_STRUCT(Step, op, registers, constants, target);

// Operand of a step: adjacent elements, or one vector for all.
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

template <class F>
inline void each_integer(int count, const Operand<int64_t>* args, int64_t* to, F&& f) {
    const int64_t *a = args[0].from, *b = args[1].from, *c = args[2].from;
    const int a_step = args[0].step, b_step = args[1].step, c_step = args[2].step;
    for (int i = 0; i < count; i++) to[i] = f(a[i * a_step], b[i * b_step], c[i * c_step]);
}

// int64, which wraps around.
inline void apply(int32_t op, int count, const Operand<int64_t>* args, int64_t* to) {
    using whole = uint64_t;  // unsigned: overflow is defined
    switch (op) {
#define NIMBLE_OP(NAME, EXPRESSION)                                                        \
    case NAME:                                                                             \
        return each_integer(count, args, to, [](int64_t a, int64_t b, int64_t c) -> int64_t { \
            (void)a, (void)b, (void)c;                                                     \
            return EXPRESSION;                                                             \
        });
        NIMBLE_OP(ADD, (whole)a + (whole)b)
        NIMBLE_OP(SUB, (whole)a - (whole)b)
        NIMBLE_OP(MUL, (whole)a * (whole)b)
        NIMBLE_OP(NEG, -(whole)a)
        NIMBLE_OP(ABS, a < 0 ? -(whole)a : (whole)a)
        NIMBLE_OP(SQUARE, (whole)a * (whole)a)
        NIMBLE_OP(OP_RELU, a < 0 ? 0 : a)
        NIMBLE_OP(MAXIMUM, a > b ? a : b)
        NIMBLE_OP(MINIMUM, a < b ? a : b)
        NIMBLE_OP(EQ, a == b)
        NIMBLE_OP(NE, a != b)
        NIMBLE_OP(LT, a < b)
        NIMBLE_OP(LE, a <= b)
        NIMBLE_OP(GT, a > b)
        NIMBLE_OP(GE, a >= b)
        NIMBLE_OP(LOGICAL_AND, a && b)
        NIMBLE_OP(LOGICAL_OR, a || b)
        NIMBLE_OP(LOGICAL_NOT, !a)
        NIMBLE_OP(WHERE, a ? b : c)
        NIMBLE_OP(CLAMP, c < (b > a ? b : a) ? c : (b > a ? b : a))
#undef NIMBLE_OP
    }
}

// In double, an element at a time.
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

}  // namespace nimble
