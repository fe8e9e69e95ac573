"""Description of a cell for the compiled loops: its kind, and its weights by gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

Kind = Literal["lstm", "gru", "tree-leaf", "tree-inner"]
GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "tree-leaf": 3, "tree-inner": 5}  # in the order of gates.h


@dataclass(frozen=True, slots=True, eq=False)
class LayerForm:
    """Weights of one layer as rows times [K, gates * h], float32; gates in the order of ``gates.h``."""

    hidden_size: int
    bias: Tensor  # [gates * h]; of a GRU without the candidate's hidden part
    from_input: Tensor | None = None
    from_hidden: Tensor | None = None  # of a tree's inner node: from the left child
    from_other: Tensor | None = None  # from the right child
    hidden_bias: Tensor | None = None  # GRU: [gates * h], of which the candidate's part is used


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A whole cell. Ports are in the order of ``steps.cpp``: word or vector, then each layer's states."""

    kind: Kind
    layers: Sequence[LayerForm]
    embedding: Tensor | None = None  # [words, K]; None: inputs are vectors, or there are none
    projection: tuple[Tensor, Tensor] | None = None  # weight [words, h] and bias: the best word feeds the next step


@runtime_checkable
class HasForm(Protocol):
    """A cell that compiled loops can run."""

    def form(self) -> Form:
        """Return the cell's kind and weights."""
        ...
