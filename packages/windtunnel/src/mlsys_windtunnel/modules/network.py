"""The tensor part of a translated pipeline: operators' modules wired as the graph says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_windtunnel.checks.values import BEYOND_FLOAT32, Contract
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, has_ties
from mlsys_windtunnel.modules.ties import UndecidedError, fingerprint

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
        """Names of all its values: its own, its inputs, and those that it checks."""
        return {self.name, *self.inputs, *(name for name, _ in self.checks)}

    def renamed(self, names: Mapping[str, str]) -> Wire:
        """Return the wire in a network where each of its values has another name."""
        checks = tuple((names[name], contract) for name, contract in self.checks)
        return Wire(names[self.name], tuple(names[name] for name in self.inputs), self.methods, checks)


Refusal = tuple[str, Contract, Tensor]  # value, what is refused of it, and whether that was found: bool, no dimensions


def _refuses(contract: Contract, x: Tensor) -> Tensor:
    """Return whether a contract refuses a table, as :meth:`Contract.check` finds it; a tensor, so it can be traced."""
    if not x.is_floating_point():  # codes of categories
        return torch.zeros((), dtype=torch.bool)
    found = []
    if contract.rounds_to_float32 and not contract.takes_inf:
        is_small = x.abs() < BEYOND_FLOAT32
        found.append(~((is_small | x.isnan()) if contract.takes_nan else is_small).all())
    elif not contract.takes_inf:
        found.append(x.isinf().any() if contract.takes_nan else (x - x).sum().isnan())
    elif not contract.takes_nan:
        found.append(x.isnan().any())
    if contract.low is not None:
        found.append((x < contract.low).any())
    if contract.high is not None:
        found.append((x > contract.high).any())
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool)


def _within(module: nn.Module) -> list[Network]:
    """Return the network that a regressor is made of, if it is: it reads what the regressor reads."""
    body = getattr(module, "body", None)
    first = body[0] if isinstance(body, nn.Sequential) and len(body) else body
    return [first] if isinstance(first, Network) else []


class Network(nn.Module):
    """Operators that run in order.

    Args:
        frontier: Names and widths of the inputs, in the order in which ``forward``'s table packs them.
        wires: The operators in an order in which they can run; the last is the output.
        modules: Their modules by name.
        features: Names of the values that the source's ``transform`` answers side by side, where its last operator is a
            predictor.

    Attributes:
        origin: Checksum of the parameters that a source has left, where its answers may be ties; None elsewhere, and
            where there is no source to agree with.
        features_are_deep: Whether the source's ``transform`` answers ``[members, rows, k]``, not side by side.
    """

    origin: int | None = None
    features: tuple[str, ...] = ()  # of networks that were saved before there were any
    features_are_deep = False

    def __init__(
        self,
        frontier: Sequence[tuple[str, int]],
        wires: Sequence[Wire],
        modules: Mapping[str, OperatorModule],
        *,
        features: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if features and set(features) <= {*(name for name, _ in frontier), *(wire.name for wire in wires)}:
            self.features = tuple(features)
        self.frontier = tuple(frontier)
        self.wires = tuple(wires)
        self.operators = nn.ModuleList(modules[wire.name] for wire in wires)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the direct form, which is kept here by its own name (see ``direct/program.py``)."""
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

    @property
    def can_tie(self) -> bool:
        """True where an operator's answer may be a tie between points that its source stores."""
        return any(has_ties(part) for part in self.modules())

    @property
    def is_as_translated(self) -> bool:
        """True where there is a source to agree with: no parameter has been changed since."""
        return self.origin is not None and self.origin == fingerprint(self)

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        *,
        checks: bool = False,
        methods: Sequence[str] = (),
        ties: list[Tensor] | None = None,
        refused: list[Refusal] | None = None,
    ) -> Tensor:
        """Compute the last operator's table (a predictor's scores) from the packed frontier ``[rows, sum of widths]``.

        Args:
            x: The packed frontier, or its tables one by one, where codes may be integers.
            checks: True refuses numbers, and ties, that the operators' sources refuse or decide.
            methods: The answers that are asked of the last operator; none: any.
            ties: Takes ``[rows]`` bool of each operator that can tell rows whose answer rounding decides.
            refused: Takes each check as a tensor: for programs, which cannot raise.

        Raises:
            InvalidInputError: ``x`` has another width, or with ``checks`` a number is refused.
            UndecidedError: with ``checks``, only the source can decide ties between the points that it stores.
        """
        values = self._frontier_values(x)
        dtype = next((value.dtype for value in values.values() if value.is_floating_point()), torch.float64)
        result = next(iter(values.values()))
        missing = set(self.features if tuple(methods) == ("transform",) else ())
        wants_features = bool(missing)
        for wire, module in zip(self.wires, self.operators, strict=True):
            if wants_features and missing <= values.keys():
                break
            inputs = [values[name] for name in wire.inputs]
            if checks:
                for name, contract in wire.checks:
                    contract.check(values[name].numpy(force=True))
            if refused is not None:
                refused += [(name, contract, _refuses(contract, values[name])) for name, contract in wire.checks]
            if checks or ties is not None or refused is not None:
                for network in _within(module):
                    network(*inputs, checks=checks, ties=ties, refused=refused)
            result = self._judged(module, inputs, wire.methods or methods, checks=checks, ties=ties)
            if wire.methods and isinstance(module, PredictorModule):
                values[wire.name] = module.side_by_side(result, wire.methods, dtype=dtype)
            else:
                values[wire.name] = result
        return torch.cat([values[name] for name in self.features], dim=1) if wants_features else result

    def _frontier_values(self, x: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        if not isinstance(x, Tensor):
            return {name: table for (name, _), table in zip(self.frontier, x, strict=True)}
        if x.ndim != 2 or x.shape[1] != self.width:
            raise InvalidInputError(
                f"the packed table has shape {list(x.shape)}; [rows, {self.width} columns] is needed, as encode() gives"
            )
        values: dict[str, Tensor] = {}
        start = 0
        for name, width in self.frontier:
            values[name] = x[:, start : start + width]
            start += width
        return values

    def _judged(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        methods: Sequence[str],
        *,
        checks: bool,
        ties: list[Tensor] | None,
    ) -> Tensor:
        """Compute an operator's table; look at its ties where they are asked for."""
        if ties is None and (not checks or self.origin is None):
            result: Tensor = module(*inputs)
            return result
        assert isinstance(module, OperatorModule)
        result, unsure = module.judged(inputs, methods)
        if unsure is not None and ties is not None:
            ties.append(unsure)
        elif unsure is not None and bool(unsure.any()) and self.is_as_translated:
            raise UndecidedError(unsure.nonzero().squeeze(1).tolist())
        return result
