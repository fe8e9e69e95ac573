"""The tensor part of a translated pipeline: operators' modules wired as the graph says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule

DIRECT = "_direct"


@dataclass(frozen=True, slots=True)
class Wire:
    """One operator of the network: what it reads and, for a predictor within the graph, which answers flow on."""

    name: str
    inputs: tuple[str, ...]  # names of frontier values or of earlier operators
    methods: tuple[str, ...] = ()  # side by side; none: what the module's ``forward`` gives
    checks: tuple[tuple[str, Contract], ...] = ()  # values that the operator's source looks at, and what it takes

    @property
    def names(self) -> set[str]:
        """All values that it names."""
        return {self.name, *self.inputs, *(name for name, _ in self.checks)}

    def renamed(self, names: Mapping[str, str]) -> Wire:
        """The wire in a network where each of its values has another name."""
        checks = tuple((names[name], contract) for name, contract in self.checks)
        return Wire(names[self.name], tuple(names[name] for name in self.inputs), self.methods, checks)


def _within(module: nn.Module) -> list[Network]:
    """The network that a regressor is made of, if it is: it reads what the regressor reads."""
    body = getattr(module, "body", None)
    first = body[0] if isinstance(body, nn.Sequential) and len(body) else body
    return [first] if isinstance(first, Network) else []


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

    @property
    def width(self) -> int:
        """Columns of the packed frontier."""
        return sum(width for _, width in self.frontier)

    def forward(self, x: Tensor, *, checks: bool = False) -> Tensor:
        """From the packed frontier ``[rows, sum of widths]`` to the last operator's table (scores of a predictor).

        Args:
            x: The packed frontier.
            checks: Whether numbers are refused that the operators' sources refuse.

        Raises:
            InvalidInputError: ``x`` has another width, or with ``checks`` a number is refused.
        """
        if x.ndim != 2 or x.shape[1] != self.width:
            raise InvalidInputError(
                f"the packed table has shape {list(x.shape)}; [rows, {self.width} columns] is needed, as encode() gives"
            )
        values: dict[str, Tensor] = {}
        start = 0
        for name, width in self.frontier:
            values[name] = x[:, start : start + width]
            start += width
        result = x
        for wire, module in zip(self.wires, self.operators, strict=True):
            inputs = [values[name] for name in wire.inputs]
            if checks:
                for name, contract in wire.checks:
                    contract.check(values[name].numpy(force=True))
                for network in _within(module):
                    network(*inputs, checks=True)
            result = module(*inputs)
            if wire.methods and isinstance(module, PredictorModule):
                values[wire.name] = module.side_by_side(result, wire.methods, dtype=x.dtype)
            else:
                values[wire.name] = result
        return result
