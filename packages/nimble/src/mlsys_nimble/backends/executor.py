"""Executors: what runs a program. Small, so that each machine can bring its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError
from mlsys_core.lazy import resolve
from mlsys_core.native import warn_without_kernels
from mlsys_nimble.ir.program import Program, ValueId

ExecutorName = Literal["auto", "native", "reference"]


class Executor(Protocol):
    """Runs one program, one call at a time; :class:`~mlsys_nimble.module.Nimble` sees to that."""

    @property
    def copies(self) -> Collection[ValueId]:
        """Constants that were copied when the executor was made; it reads the others where they are."""
        ...

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The program's outputs for its inputs, both in the program's order, of the dtypes and shapes it was made for.

        Mutations are written to their buffers and inputs before it returns. Results belong to the caller: a later call
        leaves them alone. An output that is an input or a constant is that very tensor,
        with what the call wrote to it.
        """
        ...


_FACTORIES = {
    "native": "mlsys_nimble.backends.cpu.executor:NativeExecutor",
    "cuda": "mlsys_nimble.backends.cuda.executor:CudaExecutor",
    "training": "mlsys_nimble.training.executor:TensorExecutor",
    "reference": "mlsys_nimble.backends.reference.operators:ReferenceExecutor",
}


def make_executor(name: str, program: Program, **options: Any) -> Executor:
    """The executor called ``name`` for a program; ``auto`` is the native one where it can be built, else the reference.

    Raises:
        InvalidInputError: no executor has that name.
        MissingDependencyError: ``native`` was asked for by name and cannot be built here.
    """
    if name in ("auto", "training"):
        try:
            return _make("native" if name == "auto" else name, program, **options)
        except KernelUnavailableError as error:
            warn_without_kernels("Nimble", "the schedule is replayed by torch's operators", error)
            return _make("reference", program, **options)
    if name not in _FACTORIES:
        raise InvalidInputError(f"no executor is called {name!r}; there are auto, {', '.join(_FACTORIES)}")
    return _make(name, program, **options)


def _make(name: str, program: Program, **options: Any) -> Executor:
    factory: Callable[..., Executor] = resolve(_FACTORIES[name])
    return factory(program, **options)
