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
from mlsys_nimble.backends.cpu.library import Kernel, View, array_of, load
from mlsys_nimble.backends.cpu.packing import pack_row
from mlsys_nimble.ir import operators
from torch import Tensor


def copy(x: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a copy from x to out, both of one shape of at most six dims: layouts, casts, expansions (stride 0)."""
    library = library or load()
    x, out = loops.with_transposed_last(*loops.merged([x, out]))
    return Kernel(library, "copy", {"x": x, "out": out})


def pad(kind: operators.Pad, x: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a pad: ``kind.value`` around x; one dtype."""
    library = library or load()
    assert x.dtype == out.dtype, "a border is not a cast"
    dims = sorted(range(len(out.shape)), key=lambda dim: -out.strides[dim])
    before = [kind.amounts[dim][0] for dim in dims]
    arguments = {"x": x.permuted(dims), "out": out.permuted(dims), "before": before, "value": kind.value}
    return Kernel(library, "pad", arguments)


def pointwise(kind: operators.Pointwise, inputs: Sequence[View], out: View, *, library: Any = None) -> Kernel:
    """Bind a chain of steps to inputs of any dtypes that broadcast to out's shape.

    An input may be the same view as ``out``. Integers and float64 are computed in double: exact to 2^53.
    """
    library = library or load()
    views = loops.merged([*(loops.broadcast(view, out.shape) for view in inputs), out])
    steps, num_registers = _allocated(kind.steps, len(inputs), library)
    inputs_struct = array_of(library.structs["View"], views[:-1])
    steps_struct = array_of(library.structs["Step"], steps)
    arguments = {
        "inputs": ctypes.addressof(inputs_struct),
        "num_inputs": len(inputs),
        "num_registers": num_registers,
        "steps": ctypes.addressof(steps_struct),
        "num_steps": len(steps),
        "is_wide": kind.dtype not in ("float32", "bfloat16"),
        "is_integral": "int" in kind.dtype,
        "out": views[-1],
    }
    return Kernel(library, "pointwise", arguments)


def _allocated(steps: Sequence[operators.Step], num_inputs: int, library: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the steps with registers for their results, and how many registers; one is free after its last reader."""
    last_use = {
        -1 - argument: index
        for index, step in enumerate(steps)
        for argument in step.arguments
        if isinstance(argument, int) and argument < 0
    }
    register_of: dict[int, int] = {}
    free: list[int] = []
    num_registers = num_inputs
    allocated = []
    for index, step in enumerate(steps):
        registers, constants = [-1, -1, -1], [0.0, 0.0, 0.0]
        for position, argument in enumerate(step.arguments):
            if isinstance(argument, float):
                constants[position] = argument
            else:
                registers[position] = argument if argument >= 0 else register_of[-1 - argument]
        read = {-1 - argument for argument in step.arguments if isinstance(argument, int) and argument < 0}
        free += [register_of[made] for made in read if last_use[made] == index]
        if free:
            register_of[index] = free.pop()
        else:
            register_of[index], num_registers = num_registers, num_registers + 1
        op = step.op if step.op in library.enums["Op"] else f"op_{step.op}"
        target = register_of[index]
        allocated.append({"op": op, "registers": registers, "constants": constants, "target": target})
    most = library.constants["MAX_REGISTERS"]
    assert num_registers <= most, f"{num_registers} values at once in one chain; {most} are allowed, fuse less"
    return allocated, num_registers


def pool(kind: operators.Pool, x: View, out: View, *, residual: View | None = None, library: Any = None) -> Kernel:
    """Bind a pool of x [N, C, *space] to out and residual [N, C, *space'], channels side by side."""
    library = library or load()
    assert all(view is None or view.shape[1] == 1 or view.strides[1] == 1 for view in (x, out, residual))
    arguments = {
        "x": image(x),
        "residual": image(residual),
        "out": image(out),
        "kernel": in_space(kind.kernel, 1),
        "stride": in_space(kind.stride, 1),
        "before": in_space([before for before, _ in kind.padding], 0),
        "dilation": in_space(kind.dilation, 1),
        "is_average": kind.op == "average",
        "counts_padding": kind.counts_padding,
        "epilogue": kind.epilogue,
    }
    return Kernel(library, "pool", arguments)


def reduce(kind: operators.Reduce, x: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a reduction of x, of any strides; the dims that go are ones in ``out``, or not there."""
    library = library or load()
    kept = [dim for dim in range(len(x.shape)) if dim not in kind.dims]
    if kind.keeps_dims:
        out = out.permuted(kept)
    x_kept, out = loops.merged([x.permuted(kept), out])
    (reduced,) = loops.merged([x.permuted(kind.dims)])
    return Kernel(library, "reduce", {"x": x_kept, "reduced": reduced, "out": out, "op": f"reduce_{kind.op}"})


def _rows(x: View, out: View, dims: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that all row kernels share; ``dims`` make up the rows, in their order."""
    others = [dim for dim in range(len(x.shape)) if dim not in dims]
    x_kept, out_kept = loops.merged([x.permuted(others), out.permuted(others)])
    x_row, out_row = loops.folded([x.permuted(dims), out.permuted(dims)])
    views = {"x": x_kept, "out": out_kept, "x_row": x_row, "out_row": out_row}
    return {**views, "weight": None, "bias": None, "eps": 0.0, "is_log": False}


def softmax(kind: operators.Softmax, x: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a softmax; x and out of any strides, they may be the same view."""
    return Kernel(library or load(), "softmax", _rows(x, out, [kind.dim]) | {"is_log": kind.is_log})


def layer_norm(
    kind: operators.LayerNorm, x: View, weight: Tensor | None, bias: Tensor | None, out: View, *, library: Any = None
) -> Kernel:
    """Bind a layer norm; x and out of any strides, they may be the same view.

    Weight and bias have the shape of the last ``num_dims`` dims.
    """
    library = library or load()
    rank = len(x.shape)
    scale, shift = (pack_row(values, library.kernel_lanes()) for values in (weight, bias))
    arguments = _rows(x, out, range(rank - kind.num_dims, rank)) | {
        "weight": None if scale is None else scale.data_ptr(),
        "bias": None if shift is None else shift.data_ptr(),
        "eps": kind.eps,
    }
    return Kernel(library, "layer_norm", arguments, scale, shift)


def matmul(kind: operators.MatMul, a: View, b: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a product of a [*batch, M, K] and b [*batch, K, N], of any strides.

    The columns of out [*batch, M, N] are side by side. More than two batch dims must fold to two in every view.
    """
    assert out.shape[-1] == 1 or out.strides[-1] == 1, "columns of the result are not side by side"
    if len(out.shape) > 4:
        lead = len(out.shape) - 2
        batches = loops.folded([view.reshaped(view.shape[:lead], view.strides[:lead]) for view in (a, b, out)])
        a, b, out = (
            view.reshaped((*batch.shape, *view.shape[lead:]), (*batch.strides, *view.strides[lead:]))
            for view, batch in zip((a, b, out), batches, strict=True)
        )
    arguments = {"a": _to_four(a), "b": _to_four(b), "out": _to_four(out), "scale": kind.scale}
    return Kernel(library or load(), "matmul", arguments)


def _to_four(view: View) -> View:
    """Return the view with ones before its dimensions, four in all."""
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
    """Bind attention: q [B, H, L, D], k [B, H, S, D], v [B, H, S, E], out [B, H, L, E].

    Features are side by side in k, v and out. ``mask`` is float32, of any strides, and broadcasts to [B, H, L, S].
    """
    assert all(view.shape[-1] == 1 or view.strides[-1] == 1 for view in (k, v, out))
    wanted = (*q.shape[:3], k.shape[2])
    masked = None if mask is None else loops.broadcast(mask, wanted)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "mask": masked,
        "out": out,
        "scale": kind.scale,
        "is_causal": kind.is_causal,
        "has_zero_rows": kind.has_zero_rows,
    }
    return Kernel(library or load(), "attention", arguments)


def embedding(table: Tensor, indices: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a look-up: table [V, D], indices [*] int64 or int32, out [*, D], features side by side.

    An index outside of the table sets ``fault``.
    """
    assert indices.dtype in ("int64", "int32"), f"indices of {indices.dtype}"
    rows = table.detach().float().contiguous()
    fault = ctypes.c_int32(0)
    arguments = {
        "table": rows.data_ptr(),
        "rows": len(rows),
        "width": rows.shape[1],
        "indices": indices,
        "out": out.reshaped(out.shape[:-1], out.strides[:-1]),
        "fault": ctypes.addressof(fault),
    }
    return Kernel(library or load(), "embedding", arguments, rows, fault=fault)
