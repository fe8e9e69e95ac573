"""The table of operators: of each kind its meaning in torch, and its kernel of the CPU if it has one.

A family of kinds is a file of ``backends/operators`` whose ``FAMILY`` declares both side by side; :data:`FAMILIES`
lists the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from mlsys_nimble.ir.program import Operator, ValueId, ValueType

if TYPE_CHECKING:
    from mlsys_nimble.backends.cpu.library import Kernel, View

FAMILIES = (
    "convolution",
    "indexing",
    "integers",
    "matmul",
    "pointwise",
    "pool",
    "rows",
    "shapes",
)
FLOAT32 = frozenset({"float32"})  # dtypes of single-precision kernels

Run: TypeAlias = Callable[..., Any]  # inputs -> the result (a sequence of them, for an operator of several)
Meaning: TypeAlias = Callable[[Any, tuple[ValueType, ...], ValueType], Run]  # kind, inputs, result
Lowering: TypeAlias = "Callable[[Call], Kernel | None]"
Packs: TypeAlias = Callable[[Operator, Sequence[ValueType]], tuple[ValueId, ...]]
_Meaning = TypeVar("_Meaning", bound=Meaning)
_Lowering = TypeVar("_Lowering", bound="Lowering")


@dataclass(frozen=True, slots=True)
class Call:
    """An operator with the memory of its tensors, for a lowering."""

    kind: Any
    inputs: Sequence[View]
    weights: Sequence[torch.Tensor | None]  # by input; None: not a constant
    out: View
    library: Any = None  # None: the default library
    in_place: bool = False  # read the weight of a linear of one row where it lies (cpu/own_weights.py)


@dataclass(slots=True)
class Implementation:
    """Declarations of one kind."""

    meaning: Meaning | None = None  # a function of tensors; the reference backend, and where there is no kernel
    lower: Lowering | None = None  # binds the kernel; gives None for a use that it does not cover
    dtypes: frozenset[str] | None = None  # dtypes of the kernel's tensors; None: any that kernels know
    packs: Packs | None = None  # inputs that the kernel packs if they are constants


class Family:
    """Declarations of one file of ``backends/operators``, by kind."""

    def __init__(self) -> None:
        self.entries: dict[type, Implementation] = {}

    def meaning(self, kind: type) -> Callable[[_Meaning], _Meaning]:
        """Declare a kind's meaning: a function from kind, input types and result type to a function of tensors."""

        def declare(function: _Meaning) -> _Meaning:
            entry = self.entries.setdefault(kind, Implementation())
            assert entry.meaning is None, f"two meanings of {kind.__name__}"
            entry.meaning = function
            return function

        return declare

    def lowering(
        self, *kinds: type, dtypes: frozenset[str] | None = None, packs: Packs | None = None
    ) -> Callable[[_Lowering], _Lowering]:
        """Declare what binds the kernel of some kinds, and which tensors it takes; see :class:`Implementation`."""

        def declare(function: _Lowering) -> _Lowering:
            for kind in kinds:
                entry = self.entries.setdefault(kind, Implementation())
                assert entry.lower is None, f"two kernels of {kind.__name__}"
                entry.lower, entry.dtypes, entry.packs = function, dtypes, packs
            return function

        return declare


def find(kind: type) -> Implementation:
    """Return what is declared of a kind; nothing of one that no family knows."""
    return _table().get(kind) or Implementation()


def weights_of(operator: Operator, _: Sequence[ValueType]) -> tuple[ValueId, ...]:
    """Return weights and biases: what kernels pack. An input and a residual are read where they lie."""
    epilogue = getattr(operator.kind, "epilogue", None)
    end = len(operator.inputs) - (epilogue is not None and epilogue.has_residual)
    read = (operator.inputs[0], *operator.inputs[end:])
    return tuple(value for value in operator.inputs[1:end] if value not in read)


def dtype_of(type_: ValueType) -> torch.dtype:
    """Return torch's dtype of a value."""
    dtype: torch.dtype = getattr(torch, type_.dtype)
    return dtype


@cache
def _table() -> dict[type, Implementation]:
    table: dict[type, Implementation] = {}
    for name in FAMILIES:
        family: Family = import_module(f"mlsys_nimble.backends.operators.{name}").FAMILY
        assert not table.keys() & family.entries.keys(), f"{name} declares kinds of another family"
        table |= family.entries
    return table
