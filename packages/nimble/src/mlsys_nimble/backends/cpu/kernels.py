"""The kernels but those of convolutions, one function per kind of operator: it binds the addresses, returns a handle.

What lies where is settled by the caller, who passes a :class:`View` for each tensor; results are written where ``out``
says. ``residual`` may be the same view as ``out``. A handle keeps its packed weights alive, and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.images import image, in_space
from mlsys_nimble.backends.cpu.library import (
    AttentionStruct,
    CopyStruct,
    EmbeddingStruct,
    Kernel,
    MatMulStruct,
    PadStruct,
    PointwiseStruct,
    PoolStruct,
    ReduceStruct,
    RowsStruct,
    StepStruct,
    View,
    ViewStruct,
    epilogue_struct,
    load,
    view_struct,
)
from mlsys_nimble.backends.cpu.packing import pack_row
from mlsys_nimble.ir import operators
from mlsys_nimble.ir.pointwise import OPS
from torch import Tensor

REDUCTIONS = ("sum", "mean", "max", "min")  # rows.h: Reduction
OP_CODES = {name: code for code, name in enumerate(OPS)}  # pointwise.h: Op
MAX_REGISTERS = 64  # pointwise.h


def copy(x: View, out: View, *, library: Any = None) -> Kernel:
    """X to out, both of one shape of at most six dims: layouts, casts, expansions (stride 0)."""
    library = library or load()
    x, out = loops.with_transposed_last(*loops.merged([x, out]))
    return Kernel(library, "copy", CopyStruct(view_struct(x), view_struct(out)))


def pad(kind: operators.Pad, x: View, out: View, *, library: Any = None) -> Kernel:
    """``kind.value`` around x; one dtype."""
    library = library or load()
    assert x.dtype == out.dtype, "a border is not a cast"
    dims = sorted(range(len(out.shape)), key=lambda dim: -out.strides[dim])
    struct = PadStruct(x=view_struct(x.permuted(dims)), out=view_struct(out.permuted(dims)), value=kind.value)
    struct.before[: len(dims)] = [kind.amounts[dim][0] for dim in dims]
    return Kernel(library, "pad", struct)


def pointwise(kind: operators.Pointwise, inputs: Sequence[View], out: View, *, library: Any = None) -> Kernel:
    """Inputs that broadcast to out's shape, of any dtypes; an input may be the same view as ``out``.

    Integers and float64 are computed in double: exact to 2^53.
    """
    library = library or load()
    views = loops.merged([*(loops.broadcast(view, out.shape) for view in inputs), out])
    steps, num_registers = _allocated(kind.steps, len(inputs))
    arguments = (ViewStruct * max(len(inputs), 1))(*map(view_struct, views[:-1]))
    struct = PointwiseStruct(
        inputs=ctypes.addressof(arguments),
        num_inputs=len(inputs),
        num_registers=num_registers,
        steps=ctypes.addressof(steps),
        num_steps=len(steps),
        is_wide=kind.dtype not in ("float32", "bfloat16"),
        is_integral="int" in kind.dtype,
        out=view_struct(views[-1]),
    )
    return Kernel(library, "pointwise", struct)


def _allocated(steps: Sequence[operators.Step], num_inputs: int) -> tuple[ctypes.Array[StepStruct], int]:
    """The steps with registers for their results; one is free again after its last reader."""
    last_use = {
        -1 - argument: index
        for index, step in enumerate(steps)
        for argument in step.arguments
        if isinstance(argument, int) and argument < 0
    }
    register_of: dict[int, int] = {}
    free: list[int] = []
    num_registers = num_inputs
    structs = (StepStruct * len(steps))()
    for index, (struct, step) in enumerate(zip(structs, steps, strict=True)):
        struct.op = OP_CODES[step.op]
        struct.registers[:] = [-1] * len(struct.registers)
        for position, argument in enumerate(step.arguments):
            if isinstance(argument, float):
                struct.constants[position] = argument
            else:
                struct.registers[position] = argument if argument >= 0 else register_of[-1 - argument]
        read = {-1 - argument for argument in step.arguments if isinstance(argument, int) and argument < 0}
        free += [register_of[made] for made in read if last_use[made] == index]
        if free:
            register_of[index] = free.pop()
        else:
            register_of[index], num_registers = num_registers, num_registers + 1
        struct.target = register_of[index]
    assert num_registers <= MAX_REGISTERS, f"{num_registers} values at once in one chain; fuse less"
    return structs, num_registers


def pool(kind: operators.Pool, x: View, out: View, *, residual: View | None = None, library: Any = None) -> Kernel:
    """X [N, C, *space], out and residual [N, C, *space'], channels side by side."""
    library = library or load()
    assert all(view is None or view.shape[1] == 1 or view.strides[1] == 1 for view in (x, out, residual))
    struct = PoolStruct(
        x=view_struct(image(x)),
        residual=view_struct(image(residual)),
        out=view_struct(image(out)),
        kernel=in_space(kind.kernel, 1),
        stride=in_space(kind.stride, 1),
        before=in_space([before for before, _ in kind.padding], 0),
        dilation=in_space(kind.dilation, 1),
        is_average=kind.op == "average",
        counts_padding=kind.counts_padding,
        epilogue=epilogue_struct(kind.epilogue),
    )
    return Kernel(library, "pool", struct)


def reduce(kind: operators.Reduce, x: View, out: View, *, library: Any = None) -> Kernel:
    """X of any strides; the dims that go are ones in ``out``, or not there."""
    library = library or load()
    kept = [dim for dim in range(len(x.shape)) if dim not in kind.dims]
    if kind.keeps_dims:
        out = out.permuted(kept)
    x_kept, out = loops.merged([x.permuted(kept), out])
    (reduced,) = loops.merged([x.permuted(kind.dims)])
    struct = ReduceStruct(view_struct(x_kept), view_struct(reduced), view_struct(out), REDUCTIONS.index(kind.op))
    return Kernel(library, "reduce", struct)


def _rows(x: View, out: View, dims: Sequence[int]) -> RowsStruct:
    """What both are, with ``dims`` making up the rows, in the order of ``dims``."""
    others = [dim for dim in range(len(x.shape)) if dim not in dims]
    x_kept, out_kept = loops.merged([x.permuted(others), out.permuted(others)])
    x_row, out_row = loops.folded([x.permuted(dims), out.permuted(dims)])
    return RowsStruct(view_struct(x_kept), view_struct(out_kept), view_struct(x_row), view_struct(out_row))


def softmax(kind: operators.Softmax, x: View, out: View, *, library: Any = None) -> Kernel:
    """X and out of any strides; may be the same view."""
    struct = _rows(x, out, [kind.dim])
    struct.is_log = kind.is_log
    return Kernel(library or load(), "softmax", struct)


def layer_norm(
    kind: operators.LayerNorm, x: View, weight: Tensor | None, bias: Tensor | None, out: View, *, library: Any = None
) -> Kernel:
    """X and out of any strides; may be the same view. Weight and bias have the shape of the last ``num_dims`` dims."""
    library = library or load()
    rank = len(x.shape)
    struct = _rows(x, out, range(rank - kind.num_dims, rank))
    scale, shift = (pack_row(values, library.kernel_lanes()) for values in (weight, bias))
    struct.weight = None if scale is None else scale.data_ptr()
    struct.bias = None if shift is None else shift.data_ptr()
    struct.eps = kind.eps
    return Kernel(library, "layer_norm", struct, scale, shift)


def matmul(kind: operators.MatMul, a: View, b: View, out: View, *, library: Any = None) -> Kernel:
    """A [*batch, M, K] and b [*batch, K, N] of any strides; out [*batch, M, N], columns side by side.

    More than two batch dims must fold to two in every view.
    """
    assert out.shape[-1] == 1 or out.strides[-1] == 1, "columns of the result are not side by side"
    if len(out.shape) > 4:
        lead = len(out.shape) - 2
        batches = loops.folded([view.reshaped(view.shape[:lead], view.strides[:lead]) for view in (a, b, out)])
        a, b, out = (
            view.reshaped((*batch.shape, *view.shape[lead:]), (*batch.strides, *view.strides[lead:]))
            for view, batch in zip((a, b, out), batches, strict=True)
        )
    struct = MatMulStruct(*(view_struct(_to_four(view)) for view in (a, b, out)), kind.scale)
    return Kernel(library or load(), "matmul", struct)


def _to_four(view: View) -> View:
    """With ones before its dimensions, four in all."""
    missing = 4 - len(view.shape)
    assert missing >= 0, "batch dims that do not fold to two"
    return view.reshaped((*[1] * missing, *view.shape), (*[0] * missing, *view.strides))


def attention(
    kind: operators.Attention,
    q: View,
    k: View,
    v: View,
    out: View,
    *,
    mask: View | None = None,
    library: Any = None,
) -> Kernel:
    """Q [B, H, L, D], k [B, H, S, D], v [B, H, S, E], out [B, H, L, E]: features side by side in k, v and out.

    ``mask`` is float32, of any strides, and broadcasts to [B, H, L, S].
    """
    assert all(view.shape[-1] == 1 or view.strides[-1] == 1 for view in (k, v, out))
    wanted = (*q.shape[:3], k.shape[2])
    masked = None if mask is None else loops.broadcast(mask, wanted)
    views = (view_struct(view) for view in (q, k, v, masked, out))
    struct = AttentionStruct(*views, kind.scale, kind.is_causal, kind.has_zero_rows)
    return Kernel(library or load(), "attention", struct)


def embedding(table: Tensor, indices: View, out: View, *, library: Any = None) -> Kernel:
    """Table [V, D], indices [*] int64 or int32, out [*, D], features side by side; an index outside sets ``fault``."""
    assert indices.dtype in ("int64", "int32"), f"indices of {indices.dtype}"
    rows = table.detach().float().contiguous()
    starts = out.reshaped(out.shape[:-1], out.strides[:-1])
    fault = ctypes.c_int32(0)
    places = view_struct(indices), view_struct(starts), ctypes.addressof(fault)
    struct = EmbeddingStruct(rows.data_ptr(), *rows.shape, *places)
    return Kernel(library or load(), "embedding", struct, rows, fault=fault)
