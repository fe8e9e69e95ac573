"""The tensor part of a translated pipeline: operators' modules wired as the graph says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule

DIRECT = "_direct"


@dataclass(frozen=True, slots=True)
class Wire:
    """One operator of the network: what it reads and, for a predictor within the graph, which answers flow on."""

    name: str
    inputs: tuple[str, ...]  # names of frontier values or of earlier operators
    methods: tuple[str, ...] = ()  # side by side; none: what the module's ``forward`` gives


class Network(nn.Module):
    """Runs operators in order.

    Args:
        frontier: Names and widths of the inputs, in the order in which ``forward``'s table packs them.
        wires: The operators in an order in which they can run; the last is the output.
        modules: Their modules by name.
    """

    def __init__(
        self, frontier: Sequence[tuple[str, int]], wires: Sequence[Wire], modules: Mapping[str, OperatorModule]
    ) -> None:
        super().__init__()
        self.frontier = tuple(frontier)
        self.wires = tuple(wires)
        self.operators = nn.ModuleList(modules[wire.name] for wire in wires)

    def __getstate__(self) -> dict[str, Any]:
        """Without the direct form, which is kept here under a name of its own (see ``direct/program.py``)."""
        return {name: value for name, value in vars(self).items() if name != DIRECT}

    @property
    def output(self) -> OperatorModule:
        """The last operator."""
        operators = self._modules["operators"]  # each prediction asks, and as an attribute it takes a microsecond
        assert operators is not None
        last = next(reversed(operators._modules.values()))
        assert isinstance(last, OperatorModule)
        return last

    def forward(self, x: Tensor) -> Tensor:
        """From the packed frontier ``[rows, sum of widths]`` to the last operator's table (scores of a predictor)."""
        values: dict[str, Tensor] = {}
        start = 0
        for name, width in self.frontier:
            values[name] = x[:, start : start + width]
            start += width
        result = x
        for wire, module in zip(self.wires, self.operators, strict=True):
            result = module(*(values[name] for name in wire.inputs))
            if wire.methods and isinstance(module, PredictorModule):
                values[wire.name] = module.side_by_side(result, wire.methods, dtype=x.dtype)
            else:
                values[wire.name] = result
        return result
