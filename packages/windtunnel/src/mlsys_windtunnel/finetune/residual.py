"""The exact-residual start: answers are the source's plus what training has changed (DESIGN.md, section 7).

``scores(x) = exact(x) + soft(x; now) - soft(x; start)``: with nothing trained the last two cancel to the last bit.
Scores that are probabilities (forests) are put together as logarithms.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.base import Classifier, OperatorModule, PredictorModule
from mlsys_windtunnel.modules.network import Network, Wire

SMALLEST = 1e-6  # probabilities below have no logarithm here
EXACT, SOFT, START = "exact/", "soft/", "start/"  # before the names of wires of a network of three


class Residual(PredictorModule):
    """Sum of the scores of the exact network and of the soft one, less those of the soft one at the start.

    Args:
        head: The exact network's last operator, which makes answers of scores; its body is not kept.
    """

    def __init__(self, head: PredictorModule) -> None:
        super().__init__(classes=head.classes, answers=sorted(head.answers))
        self.task, self.outputs = head.task, head.outputs
        if head.ranks:
            self.ranks = True
        self.head = _without_body(head)
        self.has_probabilities = is_probability(head)

    def forward(self, exact: Tensor, soft: Tensor, start: Tensor) -> Tensor:
        """Return scores, as the head reads them."""
        return self.joined(soft, self.offset(exact, start))

    def offset(self, exact: Tensor, start: Tensor) -> Tensor:
        """Return the addend of the soft scores: constant in training."""
        return self._spread(exact) - self._spread(start)

    def joined(self, soft: Tensor, offset: Tensor) -> Tensor:
        """Return scores from soft ones and :meth:`offset`."""
        together = self._spread(soft) + offset
        return together.softmax(dim=1) if self.has_probabilities else together

    def _spread(self, scores: Tensor) -> Tensor:
        return scores.clamp(min=SMALLEST).log() if self.has_probabilities else scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Delegate to the wrapped head, as the methods below do."""
        return self.head.probabilities(scores)

    def decision(self, scores: Tensor) -> Tensor:
        """See :meth:`probabilities`."""
        return self.head.decision(scores)

    def samples(self, scores: Tensor) -> Tensor:
        """See :meth:`probabilities`."""
        return self.head.samples(scores)

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """See :meth:`probabilities`."""
        return self.head.log_probabilities(scores)

    def prediction(self, scores: Tensor) -> Tensor:
        """See :meth:`probabilities`."""
        return self.head.prediction(scores)


def is_probability(head: PredictorModule) -> bool:
    """Return whether scores are probabilities of classes."""
    return bool(head.classes) and isinstance(head, Classifier) and head.link == "identity"


def _without_body(head: PredictorModule) -> PredictorModule:
    if not isinstance(getattr(head, "body", None), nn.Module):
        return copy.deepcopy(head)
    body, head.body = head.body, nn.Identity()
    try:
        return copy.deepcopy(head)
    finally:
        head.body = body


@dataclass(frozen=True, slots=True)
class Tunable:
    """Networks and host part that fine-tuning works on."""

    frontend: Frontend
    soft: Network  # is trained
    exact: Network | None = None  # with an exact-residual start: is not
    start: Network | None = None  # the soft network as it was then

    @property
    def residual(self) -> Residual | None:
        """Module that joins the three; None where the soft network answers alone."""
        if self.exact is None:
            return None
        head = self.exact.output
        assert isinstance(head, PredictorModule)
        return Residual(head)

    @property
    def head(self) -> PredictorModule:
        """Head that makes answers of scores."""
        head = self.soft.output
        assert isinstance(head, PredictorModule)
        return head

    @property
    def place(self) -> torch.device:
        """Torch's device that the networks lie on."""
        return next((tensor.device for tensor in self.soft.state_dict().values()), torch.device("cpu"))

    def move(self, place: torch.device | str) -> None:
        """Move the networks to a device of torch."""
        for network in (self.soft, self.exact, self.start):
            if network is not None:
                network.to(place)

    def module(self) -> WindTunnelModule:
        """Return all as one module, in evaluation mode."""
        residual = self.residual
        if residual is None or self.exact is None or self.start is None:
            return WindTunnelModule(self.frontend, self.soft).eval()
        wires: list[Wire] = []
        modules: dict[str, OperatorModule] = {}
        inputs = {name for name, _ in self.soft.frontier}
        for prefix, network in ((EXACT, self.exact), (SOFT, self.soft), (START, self.start)):
            names = {*inputs, *(wire.name for wire in network.wires)}
            for wire, operator in zip(network.wires, network.operators, strict=True):
                assert isinstance(operator, OperatorModule)
                wires.append(wire.renamed({name: name if name in inputs else prefix + name for name in names}))
                modules[prefix + wire.name] = operator
        last = self.soft.wires[-1].name
        wires.append(Wire(last, (EXACT + last, SOFT + last, START + last)))
        modules[last] = residual
        return WindTunnelModule(self.frontend, Network(self.soft.frontier, wires, modules)).eval()

    @classmethod
    def of(cls, module: WindTunnelModule) -> Tunable | None:
        """Return the parts of a module that :meth:`module` put together or that is soft; None for an exact one."""
        from mlsys_windtunnel.backends.soft.trees import SoftTrees

        network = module.network
        if isinstance(network.output, Residual):
            exact, soft, start = (_part(network, prefix) for prefix in (EXACT, SOFT, START))
            return cls(module.frontend, soft, exact, start)
        if any(isinstance(part, SoftTrees) for part in network.modules()):
            return cls(module.frontend, network)
        return None


def _part(network: Network, prefix: str) -> Network:
    wires: list[Wire] = []
    modules: dict[str, OperatorModule] = {}
    for wire, operator in zip(network.wires, network.operators, strict=True):
        if wire.name.startswith(prefix):
            assert isinstance(operator, OperatorModule)
            local = {name: name.removeprefix(prefix) for name in wire.names}
            wires.append(wire.renamed(local))
            modules[local[wire.name]] = operator
    return Network(network.frontier, wires, modules)
