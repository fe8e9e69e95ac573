"""Elementwise operations that a :class:`~mlsys_nimble.ir.operators.Pointwise` may hold: names and arities.

``backends/reference`` gives each its torch function and ``backends/cpu/pointwise.h`` its vector code; a test walks
this table.
"""

from __future__ import annotations

OPS: dict[str, int] = {  # name: number of arguments
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "pow"), 2),
    **dict.fromkeys(("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "erf", "sin", "cos"), 1),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "sign"), 1),
    **dict.fromkeys(("relu", "relu6", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh", "hardswish", "hardsigmoid"), 1),
    **dict.fromkeys(("leaky_relu", "elu"), 2),  # the second: slope, alpha; a constant
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"), 2),  # 1.0 or 0.0
    "logical_not": 1,
    "where": 3,  # condition, if true, if false
    "clamp": 3,  # x, low, high; the bounds are constants
}
