"""Protocol of executors, which run a program, and their table; a backend brings its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError
from mlsys_core.lazy import resolve
from mlsys_core.native import warn_without_kernels
from mlsys_nimble.ir.program import Program, ValueId


class Executor(Protocol):
    """Executor of one program, one call at a time; :class:`~mlsys_nimble.module.Nimble` makes calls wait."""

    @property
    def copies(self) -> Collection[ValueId]:
        """Return the constants that were copied when the executor was made; it reads the others in place."""
        ...

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the program's outputs for inputs of its dtypes and shapes, both in the program's order.

        Mutations are written to their buffers and inputs before it returns. Results belong to the caller: no later
        call writes to them. An output that is an input or a constant is that very tensor, after the call's writes.
        """
        ...


@runtime_checkable
class Releasing(Protocol):
    """An executor that can forget constants which it has packed."""

    def release(self, own: Collection[torch.Tensor]) -> None:
        """Forget what it has packed, but for the caller's ``own``; the program's copies go with it."""
        ...


_FACTORIES = {
    "native": "mlsys_nimble.backends.cpu.executor:NativeExecutor",
    "ranged": "mlsys_nimble.backends.cpu.ranged:RangedExecutor",
    "cuda": "mlsys_nimble.backends.cuda.executor:CudaExecutor",
    "training": "mlsys_nimble.training.executor:TensorExecutor",
    "reference": "mlsys_nimble.backends.reference.operators:ReferenceExecutor",
}


def make_executor(name: str, program: Program, **options: Any) -> Executor:
    """Make the executor called ``name``; ``auto`` is the native one where it can be built, else the reference.

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
