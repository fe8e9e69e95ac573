"""Functions that run operators on a GPU: ATen as in ``backends/reference``, and kernels for elementwise chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble.backends.cuda.convolutions import LAYOUTS, SelectedConvolution
from mlsys_nimble.backends.reference.operators import compile_operator
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import FUSABLE, Aten, Convolution, Pointwise
from mlsys_nimble.ir.program import Program

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
KERNELS = ("triton", "inductor", "aten")


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
        kernels: Compiler of fused kernels: ``"triton"`` for elementwise chains by our own printer; ``"inductor"`` for
            chains, reductions and norms; ``"aten"`` for none.
        layout: Layout of images between convolutions, one of :data:`~mlsys_nimble.backends.cuda.convolutions.LAYOUTS`.

    Raises:
        InvalidInputError: ``kernels`` is none of these.
    """
    if kernels not in KERNELS:
        raise InvalidInputError(f"kernels is {kernels!r}; there are {', '.join(KERNELS)}")
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
        elif kernels == "inductor" and isinstance(kind, FUSABLE):
            run = compiled.setdefault((repr(kind), inputs, result), _by_inductor(run))
        elif kernels == "triton" and isinstance(kind, Pointwise):
            from mlsys_nimble.backends.cuda.pointwise import make_pointwise

            key = (repr(kind), inputs, result)
            if key not in compiled:
                compiled[key] = make_pointwise(kind, inputs, result) or run
            run = compiled[key]
        functions.append(run)
    return functions


def _by_inductor(run: Run) -> Run:
    """Compile one operator by Inductor at its first call, in the pre-run, without CUDA graphs of its own."""
    compiled: Callable[..., Any] = torch.compile(run, dynamic=False, options={"triton.cudagraphs": False})
    return compiled
