"""Check of a program that came from outside: kernels trust the types of values, so each must fit its operator.

Pure. What torch runs (:class:`~mlsys_nimble.ir.operators.Aten`) is left to torch, which checks its arguments and copies
a result only into a value that it fits. A check may be stricter than torch: no program of ``capture`` fails it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ITEMSIZE, Operator, Program, ValueType

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


_CASTING = (kinds.Cast, kinds.Pointwise, kinds.Embedding, kinds.Gather, kinds.ScatterAdd, kinds.Reduce, kinds.Softmax)
_INDICES = ("int64", "int32")
MAX_NUMEL = 1 << 40  # elements of one value
MAX_TERMS = (2**31 - 1) // (255 * 128) // 2  # products in an int32 sum; half, as the zero point is subtracted apart
Shape = tuple[int, ...]


class UnfitError(ValueError):
    """Error for a program that no capture makes; names the operator."""


def check_types(program: Program) -> None:
    """Check that every operator reads what exists, and makes values of the types that they are declared with.

    Raises:
        UnfitError: one does not.
    """
    for type_ in program.values:
        _need(type_.dtype in ITEMSIZE and min(type_.shape, default=0) >= 0 and type_.numel <= MAX_NUMEL, "a type")
    num_values = len(program.values)
    known = {*program.inputs, *program.constants}
    _need(len(known) == len(program.inputs) + len(program.constants), "an input that is twice there")
    _need(all(0 <= value < num_values for value in known), "an input without a type")
    for value, tensor in program.constants.items():
        type_ = program.values[value]
        _need((tuple(tensor.shape), str(tensor.dtype)) == (type_.shape, f"torch.{type_.dtype}"), "a constant's type")
    names: set[str] = set()
    for operator in program.operators:
        _need(operator.name not in names, f"two operators called {operator.name}")
        names.add(operator.name)
        _need(known.issuperset(operator.inputs), f"{operator.name}, which reads what nothing makes")
        _need(known.isdisjoint(operator.outputs), f"{operator.name}, which makes what is there")
        _need(all(0 <= value < num_values for value in operator.outputs), f"{operator.name}, a result without a type")
        _need(len(set(operator.outputs)) == len(operator.outputs) > 0, f"{operator.name}, its results")
        known.update(operator.outputs)
        inputs = [program.values[value] for value in operator.inputs]
        outputs = [program.values[value] for value in operator.outputs]
        try:
            if isinstance(operator.kind, kinds.Aten):
                used = [*operator.kind.contiguous, *_inputs_of((operator.kind.arguments, operator.kind.keywords))]
                fits = all(0 <= number < len(inputs) for number in used)
            else:
                fits = len(outputs) == 1 and _fits(operator, inputs, outputs[0])
        except (ValueError, IndexError, ZeroDivisionError):  # other numbers of inputs or of dimensions
            fits = False
        _need(fits, f"{operator.name}, whose types do not fit {type(operator.kind).__name__}")
    _need(known.issuperset(program.kept()), "a result that nothing makes")
    for old, new in program.mutations:
        _need(old in program.constants and program.values[old] == program.values[new], "a write to what is no buffer")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise UnfitError(f"{what[:120]} does not hold together")


def _inputs_of(item: Any) -> Iterator[int]:
    """Yield the numbers of the inputs among an operator's arguments."""
    if isinstance(item, kinds.Input):
        yield item.index
    for part in item if isinstance(item, tuple) else ():
        yield from _inputs_of(part)


def _fits(operator: Operator, inputs: Sequence[ValueType], out: ValueType) -> bool:
    """Return whether the kind gives a value of this type from inputs of these types."""
    kind = operator.kind
    shapes = [each.shape for each in inputs]
    if isinstance(kind, kinds.IntegerProduct):
        return _integers(kind, inputs, out)
    if isinstance(kind, kinds.Quantise | kinds.Dequantise | kinds.ChooseScale):
        return _coded(kind, inputs, out)
    if isinstance(kind, kinds.Bf16Product):
        kind = kind.main
        if out.dtype != "float32":
            return False
    epilogue = getattr(kind, "epilogue", kinds.NOTHING)
    if epilogue.has_residual:
        *shapes, residual = shapes
        if residual != out.shape or inputs[-1].dtype != out.dtype:
            return False
        inputs = inputs[:-1]
    if not isinstance(kind, _CASTING) and any(each.dtype != out.dtype for each in inputs):
        return False
    match kind:
        case kinds.Pointwise():
            return _pointwise(kind, len(shapes)) and all(_expands(shape, out.shape) for shape in shapes)
        case kinds.Concat():
            return _concatenated(shapes, kind.dim) == out.shape
        case kinds.Convolution():
            x, weight, *bias = shapes
            return _biases(bias, kind.has_bias, weight[0]) and _convolved(kind, x, weight) == out.shape
        case kinds.Separable():
            return _separable(kind, shapes) == out.shape
        case kinds.Linear():
            x, (columns, rows), *bias = shapes
            return _biases(bias, kind.has_bias, columns) and (*x[:-1], columns) == out.shape and x[-1] == rows
        case kinds.MatMul():
            a, b = shapes
            lead = out.shape[:-2]
            batches = len(a) >= 2 <= len(b) and _expands(a[:-2], lead) and _expands(b[:-2], lead)
            return batches and a[-1] == b[-2] and (a[-2], b[-1]) == out.shape[-2:]
        case kinds.Attention():
            return _attention(kind, shapes, out.shape)
        case kinds.Embedding():
            (_, width), indices = shapes
            return (*indices, width) == out.shape and inputs[1].dtype in _INDICES
        case kinds.Gather():
            table, taken = shapes
            is_sound = len(table) > 0 and inputs[0].dtype == out.dtype and inputs[1].dtype in _INDICES
            return is_sound and (*taken, *table[1:]) == out.shape
        case kinds.ScatterAdd():
            return _rows_added(kind, inputs) and inputs[0] == out
        case kinds.LayerNorm():
            x, *affine = shapes
            row = x[len(x) - kind.num_dims :]
            wanted = [row] * (kind.has_weight + kind.has_bias)
            return 0 < kind.num_dims <= len(x) and affine == wanted and x == out.shape
    (x,) = shapes
    match kind:
        case kinds.Pool():
            return _pooled(kind, x) == out.shape
        case kinds.Reduce():
            return _reduced(kind, x) == out.shape
        case kinds.Softmax():
            return x == out.shape and 0 <= kind.dim < len(x)
        case kinds.Reshape():
            return prod(x) == out.numel
        case kinds.Permute():
            return sorted(kind.dims) == [*range(len(x))] and tuple(x[dim] for dim in kind.dims) == out.shape
        case kinds.Slice():
            length = out.shape[kind.dim]
            inside = kind.start + (length - 1) * kind.step < x[kind.dim] if length else kind.start <= x[kind.dim]
            rest = _without(x, kind.dim) == _without(out.shape, kind.dim)
            return 0 <= kind.dim < len(x) and kind.start >= 0 and kind.step >= 1 and inside and rest
        case kinds.Expand():
            return _expands(x, out.shape)
        case kinds.Pad():
            padded = tuple(size + before + after for size, (before, after) in zip(x, kind.amounts, strict=True))
            return padded == out.shape
        case kinds.Cast() | kinds.Copy():
            return x == out.shape
    return False  # kinds of training


_PARAMETERS = ValueType((2,), "float32")


def _coded(
    kind: kinds.Quantise | kinds.Dequantise | kinds.ChooseScale, inputs: Sequence[ValueType], out: ValueType
) -> bool:
    x, *rest = inputs
    if isinstance(kind, kinds.ChooseScale):
        return x.dtype == "float32" and x.numel > 0 and out == _PARAMETERS and not rest and kind.least < kind.most
    codes, floats = (out, x) if isinstance(kind, kinds.Quantise) else (x, out)
    is_sound = codes.dtype in ("uint8", "int8") and floats.dtype == "float32" and x.shape == out.shape
    lowest = 0 if codes.dtype == "uint8" else -128
    return is_sound and rest == [_PARAMETERS] * kind.is_dynamic and _is_range(kind.codes, lowest)


def _is_range(codes: kinds.Codes, lowest: int) -> bool:
    inside = lowest <= codes.least <= codes.most <= lowest + 255 and lowest <= codes.zero_point <= lowest + 255
    return inside and codes.scale > 0


def _integers(kind: kinds.IntegerProduct, inputs: Sequence[ValueType], out: ValueType) -> bool:
    """Return whether quantised values fit a product, and no sum overflows int32."""
    every = [each for each in (kind.x, kind.residual, kind.result) if each is not None]
    if not all(_is_range(each, 0) for each in every):
        return False
    residual = ["float32" if kind.residual is None else "uint8"] * kind.epilogue.has_residual
    dtypes = ["uint8", "int8", "float32", *["float32"] * (kind.main.has_bias + kind.is_dynamic), *residual]
    result = "float32" if kind.result is None else "uint8"
    weight, columns = inputs[1].shape, inputs[1].shape[:1]
    if [each.dtype for each in inputs] != dtypes or out.dtype != result or prod(weight[1:]) > MAX_TERMS:
        return False
    shapes = [columns] * (1 + kind.main.has_bias) + [(2,)] * kind.is_dynamic + [out.shape] * len(residual)
    if [each.shape for each in inputs[2:]] != shapes:
        return False
    x = inputs[0].shape
    if isinstance(kind.main, kinds.Linear):
        return len(weight) == 2 and x[-1] == weight[1] and (*x[:-1], *columns) == out.shape
    return _convolved(kind.main, x, weight) == out.shape


def _expands(shape: Shape, wanted: Shape) -> bool:
    """Return whether a shape broadcasts to another one."""
    lead = len(wanted) - len(shape)
    return lead >= 0 and all(size in (1, other) for size, other in zip(shape, wanted[lead:], strict=True))


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _biases(shapes: Sequence[Shape], has_bias: bool, columns: int) -> bool:
    return list(shapes) == ([(columns,)] if has_bias else [])


def _windows(
    space: Shape, kernel: Shape, stride: Shape, padding: Sequence[tuple[int, int]], dilation: Shape
) -> Shape | None:
    """Return the number of windows by dimension; None for numbers that make no sense."""
    found = []
    for size, width, step, (before, after), gap in zip(space, kernel, stride, padding, dilation, strict=True):
        if min(width, step, gap) < 1 or not -size <= min(before, after) <= max(before, after) < MAX_NUMEL:
            return None
        room = size + before + after - gap * (width - 1) - 1
        if room < 0:
            return None
        found.append(room // step + 1)
    return tuple(found) if 1 <= len(found) <= 3 else None


def _convolved(kind: kinds.Convolution, x: Shape, weight: Shape) -> Shape | None:
    space = _windows(x[2:], weight[2:], kind.stride, kind.padding, kind.dilation)
    groups = kind.groups
    if space is None or groups < 1 or weight[0] % groups or weight[1] * groups != x[1] or not weight[0]:
        return None
    return (x[0], weight[0], *space)


def _separable(kind: kinds.Separable, shapes: Sequence[Shape]) -> Shape | None:
    x, *rest = shapes
    made: Shape | None = x
    if len(rest) != kind.num_weights or kind.depthwise.groups != x[1] or len(x) != 4:
        return None
    for part in (kind.depthwise, kind.pointwise):
        weight = rest.pop(0)
        bias = [rest.pop(0)] if part.has_bias else []
        if made is None or not _biases(bias, part.has_bias, weight[0]):
            return None
        made = _convolved(part, made, weight)
    is_pointwise = kind.pointwise.groups == 1 and weight[2:] == (1, 1) and {*kind.pointwise.stride} == {1}
    plain = is_pointwise and not any(map(any, kind.pointwise.padding)) and not kind.depthwise.epilogue.has_residual
    return made if plain else None


def _attention(kind: kinds.Attention, shapes: Sequence[Shape], out: Shape) -> bool:
    q, k, v, *mask = shapes
    batch, heads, queries, width = q
    keys = k[2]
    fits = k == (batch, heads, keys, width) and v[:3] == k[:3] and out == (batch, heads, queries, v[3])
    return fits and len(mask) == kind.has_mask and all(_expands(each, (batch, heads, queries, keys)) for each in mask)


def _pooled(kind: kinds.Pool, x: Shape) -> Shape | None:
    space = _windows(x[2:], kind.kernel, kind.stride, kind.padding, kind.dilation)
    if space is None or (kind.op == "average" and {*kind.dilation} != {1}):
        return None
    return (*x[:2], *space)


def _reduced(kind: kinds.Reduce, x: Shape) -> Shape | None:
    dims = kind.dims
    if not dims or list(dims) != sorted(set(dims)) or dims[0] < 0 or dims[-1] >= len(x):
        return None
    if kind.squares and kind.op not in ("sum", "mean"):
        return None
    ones = tuple(1 if dim in dims else size for dim, size in enumerate(x))
    return ones if kind.keeps_dims else tuple(size for dim, size in enumerate(x) if dim not in dims)


def _rows_added(kind: kinds.ScatterAdd, inputs: Sequence[ValueType]) -> bool:
    summed, indices, source, *rest = inputs
    (terms,), width = indices.shape, summed.shape[1:]
    if len(rest) != (kind.taken is not None) + kind.has_scale or not summed.shape:
        return False
    if kind.taken is not None and (rest[0].shape != (terms,) or rest.pop(0).dtype not in _INDICES):
        return False
    if kind.has_scale and (rest[0].dtype != summed.dtype or rest[0].shape != (terms, *(1 for _ in width))):
        return False
    num_rows = source.shape[0] if kind.taken is not None else terms
    return source == ValueType((num_rows, *width), summed.dtype) and indices.dtype in _INDICES


def _concatenated(shapes: Sequence[Shape], dim: int) -> Shape | None:
    first = shapes[0]
    if not 0 <= dim < len(first) or any(_without(shape, dim) != _without(first, dim) for shape in shapes):
        return None
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def _pointwise(kind: kinds.Pointwise, num_inputs: int) -> bool:
    """Return whether every step reads inputs and earlier steps, as many as its operation takes."""
    if not kind.steps or kind.dtype not in ITEMSIZE:
        return False
    for index, step in enumerate(kind.steps):
        if len(step.arguments) != OPS.get(step.op):
            return False
        if any(isinstance(each, int) and not -1 - index < each < num_inputs for each in step.arguments):
            return False
    return True
