"""Options that make a translated pipeline soft: plain data, checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlsys_core.errors import InvalidInputError

Level = Literal["L1", "L2", "L3", "L4"]
Gate = Literal["softmax", "tanh"]
Init = Literal["residual", "source", "random"]
Scope = Literal["pipeline", "trees"]

LEAF_TEMPERATURES: dict[Gate, float] = {"softmax": 0.25, "tanh": 0.5}


@dataclass(frozen=True, slots=True)
class SoftOptions:
    """Choice of the parts of a pipeline that are trained, and the smoothness of its trees.

    Attributes:
        level: Trained parts of a tree (section 5.2.2): L1 leaves, L2 thresholds too, L3 the features that a split reads
            too, L4 which splits a leaf reads too.
        gate: Choice of a leaf: by ``tanh`` of its path's sum, as in the paper, or by ``softmax`` over the sums of
            all leaves of the tree, whose weights add up to one.
        init: ``residual``: answers are the source's plus what training changed, so they start as the source's own;
            ``source``: soft trees that start at the source's parameters; ``random``: the paper's cold start.
        scope: ``pipeline`` trains all that was translated; ``trees`` the trees alone (the paper's GBDT2NN).
        temperature: Temperature of splits, in standard deviations of the feature read; the paper's is 1. A split
            between values that lie further apart takes half their distance to the threshold.
        leaf_temperature: Temperature of leaves, in path literals; None: .25 for softmax, .5 for tanh. The paper's is 1.
        dropout: Share of split and leaf outputs that are dropped in training; the paper's is .1.
        rank: At L3 and L4, train a correction of this rank to the features that splits read in place of a weight for
            each split and feature; None: a full table up to 512 features, rank 32 beyond; 0: always a full table.
    """

    level: Level = "L2"
    gate: Gate = "softmax"
    init: Init = "residual"
    scope: Scope = "pipeline"
    temperature: float = 0.1
    leaf_temperature: float | None = None
    dropout: float = 0.0
    rank: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("level", Level), ("gate", Gate), ("init", Init), ("scope", Scope)):
            if getattr(self, name) not in get_args(kind):
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(kind))}")
        for name in ("temperature", "leaf_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidInputError(f"{name} is {value}; it must be above 0 and finite")
        if not 0 <= self.dropout < 1:
            raise InvalidInputError(f"dropout is {self.dropout}; it must be from 0 to below 1")
        if self.rank is not None and self.rank < 0:
            raise InvalidInputError(f"rank is {self.rank}; it must be 0 or more, or None")

    @property
    def number(self) -> int:
        """The level as 1 to 4."""
        return int(self.level[1])

    @property
    def leaf_scale(self) -> float:
        """Inverse temperature of leaves."""
        return 1 / (self.leaf_temperature or LEAF_TEMPERATURES[self.gate])
