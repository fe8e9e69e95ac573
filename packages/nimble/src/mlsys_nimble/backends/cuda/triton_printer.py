"""Printer of Triton source for chains of elementwise steps. Pure; :mod:`.pointwise` compiles and calls the kernels.

A kernel reads each input once and writes its result once. Sizes and strides are part of the source, so a tensor that is
repeated along a dimension, or lies channels last, costs the index arithmetic that it needs and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlsys_nimble.ir.operators import Pointwise


def _expm1(x: str) -> str:
    """Print exp(x) - 1 for x <= 0 without cancellation: the logarithm makes good the rounding of exp (Kahan)."""
    exp = f"tl.exp({x})"
    return f"tl.where({exp} == 1.0, {x}, tl.where({exp} - 1.0 == -1.0, -1.0, ({exp} - 1.0) * ({x}) / tl.log({exp})))"


_TANH_OF_MINUS_ABS = f"{_expm1('-2.0 * tl.abs({0})')} / (2.0 + {_expm1('-2.0 * tl.abs({0})')})"
_EXPRESSIONS: dict[str, str] = {  # {0}, {1}, {2}: the arguments, in the dtype of the computation
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "sign": "tl.where({0} > 0, 1.0, 0.0) - tl.where({0} < 0, 1.0, 0.0)",
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "relu6": "tl.where({0} < 0, 0.0, tl.where({0} > 6, 6.0, {0}))",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "tanh": f"tl.where({{0}} < 0, 1.0, -1.0) * ({_TANH_OF_MINUS_ABS})",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "{0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0})))",
    "hardswish": "{0} * tl.where({0} < -3, 0.0, tl.where({0} > 3, 6.0, {0} + 3.0)) / 6.0",
    "hardsigmoid": "tl.where({0} < -3, 0.0, tl.where({0} > 3, 6.0, {0} + 3.0)) / 6.0",
    "leaky_relu": "tl.where({0} > 0, {0}, {0} * {1})",
    "elu": f"tl.where({{0}} > 0, {{0}}, {{1}} * {_expm1('tl.where({0} > 0, 0.0, {0})')})",
    **{
        name: f"tl.where({{0}} {sign} {{1}}, 1.0, 0.0)"
        for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
    },
    "logical_and": "tl.where(({0} != 0) & ({1} != 0), 1.0, 0.0)",
    "logical_or": "tl.where(({0} != 0) | ({1} != 0), 1.0, 0.0)",
    "logical_not": "tl.where({0} == 0, 1.0, 0.0)",
    "where": "tl.where({0} != 0, {1}, {2})",
    "clamp": "tl.where({0} < {1}, {1}, tl.where({0} > {2}, {2}, {0}))",
}
_COMPUTED_IN = {"float32": "tl.float32", "float16": "tl.float32", "bfloat16": "tl.float32", "float64": "tl.float64"}


@dataclass(frozen=True, slots=True)
class Window:
    """View of a tensor in a kernel: the result's merged shape, and the tensor's strides along it (0: repeated)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements


def can_print(kind: Pointwise) -> bool:
    """Return whether every step, and the dtype of the computation, can be printed."""
    return kind.dtype in _COMPUTED_IN and all(step.op in _EXPRESSIONS for step in kind.steps)


def print_kernel(kind: Pointwise, inputs: Sequence[Window], out: Window) -> str:
    """Print a module with one function ``kernel(x0, ..., out, BLOCK)``, over ``prod(out.shape)`` elements.

    Example:
        >>> from mlsys_nimble.ir.operators import Step
        >>> row = Window("float32", (8,), (1,))
        >>> print(print_kernel(Pointwise((Step("relu", (0,)),)), [row], row).partition("@triton.jit")[2].strip())
        def kernel(x0, out, BLOCK: tl.constexpr):
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = i < 8
            a0 = tl.load(x0 + i, mask=inside, other=0).to(tl.float32)
            s0 = tl.where(a0 < 0, 0.0, a0)
            tl.store(out + i, s0.to(out.dtype.element_ty), mask=inside)
    """
    computed_in = _COMPUTED_IN[kind.dtype]
    count = 1
    for size in out.shape:
        count *= size
    names = [f"x{number}" for number in range(len(inputs))]
    lines = [
        "i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        f"inside = i < {count}",
        *_indices(out.shape),
    ]
    for number, window in enumerate(inputs):
        load = f"tl.load(x{number}{_offset(window)}, mask=inside, other=0)"
        if not any(window.strides):
            load = f"tl.load(x{number})"
        lines.append(f"a{number} = {load}.to({computed_in})")
    for number, step in enumerate(kind.steps):
        arguments = [_argument(argument) for argument in step.arguments]
        lines.append(f"s{number} = {_EXPRESSIONS[step.op].format(*arguments)}")
    result = f"s{len(kind.steps) - 1}"
    result = f"{result} != 0" if out.dtype == "bool" else f"{result}.to(out.dtype.element_ty)"
    lines.append(f"tl.store(out{_offset(out)}, {result}, mask=inside)")
    head = ["import triton", "import triton.language as tl", "", "", "@triton.jit"]
    signature = f"def kernel({', '.join([*names, 'out', 'BLOCK: tl.constexpr'])}):"
    return "\n".join([*head, signature, *(f"    {line}" for line in lines), ""])


def _indices(shape: Sequence[int]) -> list[str]:
    """Return lines that compute an index for each dimension, where there are several."""
    if len(shape) == 1:
        return []
    lines, rest = [], "i"
    for dim in reversed(range(1, len(shape))):
        lines.append(f"i{dim} = {rest} % {shape[dim]}")
        lines.append(f"r{dim} = {rest} // {shape[dim]}")
        rest = f"r{dim}"
    return [*lines, f"i0 = {rest}"]


def _offset(window: Window) -> str:
    """Return the offset that is added to a pointer."""
    if len(window.shape) == 1:
        return " + i" if window.strides == (1,) else f" + i * {window.strides[0]}"
    terms = [f"i{dim} * {stride}" for dim, stride in enumerate(window.strides) if stride]
    return "".join(f" + {term}" for term in terms)


def _argument(argument: int | float) -> str:
    if isinstance(argument, float):
        named = {"inf": "float('inf')", "-inf": "float('-inf')", "nan": "float('nan')"}
        text = named.get(repr(argument), repr(argument))
        return f"({text})" if argument < 0 else text
    return f"a{argument}" if argument >= 0 else f"s{-1 - argument}"
