"""Functions that run operators on a GPU: ATen as in ``backends/reference``, and kernels for elementwise chains."""

from __future__ import annotations

import hashlib
import linecache
from functools import cache
from math import prod
from typing import Any

import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.cpu.loops import broadcast, merged
from mlsys_nimble.backends.cuda.convolutions import LAYOUTS, SelectedConvolution
from mlsys_nimble.backends.cuda.triton_printer import Window, can_print, print_kernel
from mlsys_nimble.backends.reference.operators import compile_operator
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import Aten, Convolution, Pointwise
from mlsys_nimble.ir.program import Program, ValueType
from mlsys_nimble.ir.strides import dense, order_of, row_major
from torch import Tensor

BLOCK = 1024  # elements of a program
_FLOATS = ("float32", "float16", "bfloat16", "float64")


def make_pointwise(kind: Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Run | None:
    """Return a function from the input tensors to the result; None if torch must run the steps."""
    types = (*inputs, result)
    if not can_print(kind) or result.numel == 0 or any(type_.dtype not in (*_FLOATS, "bool") for type_ in types):
        return None
    dtype: torch.dtype = getattr(torch, result.dtype)
    known: dict[
        tuple[tuple[int, ...], ...], tuple[Any, tuple[int, ...]]
    ] = {}  # kernel and result's strides, by input strides

    def run(*tensors: Tensor) -> Tensor:
        strides = tuple([tensor.stride() for tensor in tensors])
        found = known.get(strides)
        if found is None:
            found = known[strides] = _compile(kind, tensors, result)
        kernel, out_strides = found
        out = torch.empty_strided(result.shape, out_strides, dtype=dtype, device=tensors[0].device)
        kernel[(-(-result.numel // BLOCK),)](*tensors, out, BLOCK=BLOCK)
        return out

    return run if inputs else None


def _compile(kind: Pointwise, tensors: tuple[Tensor, ...], result: ValueType) -> tuple[Any, tuple[int, ...]]:
    """Return the kernel for tensors of these strides, and the result's: those of the first dense input of its shape."""
    views = [View.of(tensor) for tensor in tensors]
    strides = dense(result.shape, row_major(len(result.shape)))
    for view in views:
        if view.shape == result.shape and view.strides == dense(view.shape, order_of(view.shape, view.strides)):
            strides = view.strides
            break
    out = View(0, result.dtype, result.shape, strides)
    *merged_views, merged_out = merged([*(broadcast(view, out.shape) for view in views), out])
    windows = [Window(view.dtype, merged_out.shape, view.strides) for view in merged_views]
    source = print_kernel(kind, windows, Window(out.dtype, merged_out.shape, merged_out.strides))
    assert prod(merged_out.shape) == result.numel
    return _load(source), strides


@cache
def _load(source: str) -> Any:
    """Load the kernel of a printed module; triton reads its source from ``linecache``."""
    name = f"<nimble {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace["kernel"]


# cuSOLVER waits for the device, and after a failed capture its handle fails outside of one too.
_SOLVERS = frozenset(
    {
        *("cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "cond", "det", "eig", "eigh", "eigvals"),
        *("eigvalsh", "geqrf", "householder_product", "inv", "inv_ex", "inverse", "ldl_factor", "ldl_factor_ex"),
        *("ldl_solve", "lobpcg", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_rank", "orgqr"),
        *("ormqr", "pinv", "pinverse", "qr", "slogdet", "solve", "solve_ex", "svd", "svdvals", "tensorinv"),
        "tensorsolve",
    }
)


def is_kept_out(kind: Any) -> bool:
    """Return whether an operator cannot be captured in a graph, and should not be tried.

    Example:
        >>> is_kept_out(Aten("aten._linalg_eigh.default", ())), is_kept_out(Aten("aten.detach.default", ()))
        (True, False)
    """
    if not isinstance(kind, Aten):
        return False
    return kind.target.split(".")[1].lstrip("_").removeprefix("linalg_") in _SOLVERS


def make_functions(program: Program, kernels: str, *, layout: str = LAYOUTS[0]) -> list[Run]:
    """Make a function for each operator of a program.

    Args:
        program: Program after the passes.
        kernels: ``"triton"`` for elementwise chains by our own printer, ``"aten"`` for torch's operators.
        layout: Layout of images between convolutions, one of :data:`~mlsys_nimble.backends.cuda.convolutions.LAYOUTS`.
    """
    compiled: dict[tuple[Any, ...], Run] = {}  # equal operators share a kernel
    functions: list[Run] = []
    fixed = set(program.constants) - {old for old, _ in program.mutations}
    for operator in program.operators:
        kind = operator.kind
        inputs = tuple(program.values[value] for value in operator.inputs)
        result = program.values[operator.outputs[0]]
        run = compile_operator(operator, program.values)
        if isinstance(kind, Convolution):
            run = SelectedConvolution(run, has_constant_weight=operator.inputs[1] in fixed, layout=layout)
        elif kernels == "triton" and isinstance(kind, Pointwise):
            key = (repr(kind), inputs, result)
            if key not in compiled:
                compiled[key] = make_pointwise(kind, inputs, result) or run
            run = compiled[key]
        functions.append(run)
    return functions
