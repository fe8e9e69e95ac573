"""Common parts of ``.pt2`` and ONNX files: the network as a program, and the description that goes with it.

A program takes the packed table of the frontier and gives a table for each answer. The description, JSON inside the
file, holds the host's part and the labels; ``exported.py`` puts the two together again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from mlsys_core.errors import InvalidInputError, MlsysError
from torch import Tensor, nn

from mlsys_windtunnel.backends.direct.watch import checks_of, frontier_checks
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.export.exported import FORMAT, MAIN, TIES, VERSION
from mlsys_windtunnel.export.host_parts import Code, Codes, HostPlan
from mlsys_windtunnel.export.plain import Writer
from mlsys_windtunnel.module import METHODS, WindTunnelModule
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding
from mlsys_windtunnel.modules.network import Network, Refusal

INPUT = "x"


class Answers(nn.Module):
    """A translated pipeline that gives the answers of several methods of its source at once.

    Args:
        module: The pipeline.
        methods: Names of the source's methods; labels come as class indices. None: what ``forward`` answers. With
            methods, a network whose answers may be ties tells in a last answer, ``undecided``, which rows are such.
        tells_refusals: After the answers come truth values: whether the input is refused, for each of :attr:`refusals`;
            "within": only for what the numbers of the input do not show, see :func:`frontier_checks`.
        coded: Values of the frontier that are codes of categories, in which there is nothing to refuse.

    Raises:
        InvalidInputError: the source has no such method, or answers it with three dimensions.
    """

    def __init__(
        self,
        module: WindTunnelModule,
        methods: Sequence[str] | None,
        *,
        tells_refusals: bool | Literal["within"] = False,
        coded: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        offered = [name for name in METHODS if hasattr(module, name)]
        if methods is not None and (not methods or set(methods) - set(offered)):
            raise InvalidInputError(f"methods are {list(methods)}; this module has {', '.join(offered)}")
        if methods is not None and "transform" in methods and module.network.features_are_deep:
            raise InvalidInputError(
                "transform answers [members, rows, k] here, which no table holds: fit the source with "
                "flatten_transform=True, or leave transform out of methods"
            )
        self.pipeline = module
        self.methods = None if methods is None else tuple(methods)
        self.tells_ties = methods is not None and module.network.is_as_translated
        self.refusals: tuple[Refused, ...] = ()
        if tells_refusals:
            found: list[Refusal] = []
            with torch.no_grad():
                module.network(example(module), methods=self.methods or (), refused=found)
            needed = {
                check for part in module.network.modules() if isinstance(part, Network) for check in _needed(part)
            }
            excused = {check for check in needed if check[0] in coded}
            if tells_refusals == "within":
                excused |= set(frontier_checks(module.network))
            self.refusals = tuple(
                dict.fromkeys((name, each) for name, each, _ in found if (name, each) in needed - excused)
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the answers, in order."""
        return (*(self.methods or (MAIN,)), *([TIES] if self.tells_ties else []))

    def forward(self, *tables: Tensor) -> tuple[Tensor, ...]:
        """Return a table of two dimensions or more for each answer, from ``[rows, width]`` or the frontier's tables."""
        x = tables[0] if len(tables) == 1 else tables
        if self.methods is None:
            return (self.pipeline(x),)
        ties: list[Tensor] = []
        found: list[Refusal] = []
        network = self.pipeline.network
        scores = network(
            x,
            methods=self.methods,
            ties=ties if self.tells_ties else None,
            refused=found if self.refusals else None,
        )
        predictor = self.pipeline.predictor
        answers = tuple(
            network(x, methods=(name,))
            if self.pipeline.has_features(name)
            else scores
            if predictor is None
            else predictor.table(scores, name)
            for name in self.methods
        )
        if self.tells_ties:
            answers = (*answers, torch.stack(ties).any(dim=0))
        flags = {(name, contract): flag for name, contract, flag in found}
        return (*answers, *(flags[each] for each in self.refusals))


Refused = tuple[str, Contract]  # a value, and what is refused of it


def _needed(network: Network) -> list[Refused]:
    """Return the checks that together refuse all that the network's checks refuse."""
    ahead, late = checks_of(network)
    return [*ahead, *late]


def default_methods(module: WindTunnelModule) -> list[str]:
    """Return the answers of a file for prediction: predictions and a classifier's probabilities or decision values."""
    wanted = [name for name in ("predict", "predict_proba", "transform") if not module.has_features(name)]
    names = [name for name in wanted if hasattr(module, name)]
    return names if "predict" not in names or len(names) > 1 else [*names, *_decision(module)]


def _decision(module: WindTunnelModule) -> list[str]:
    return ["decision_function"] if hasattr(module, "decision_function") else []


@contextmanager
def tracing(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode for the context; it computes as for inference, in the sources' order."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def example(module: WindTunnelModule) -> Tensor:
    """Return ``[2, width]`` of zeros, which every network takes; a dimension of 1 is taken for a constant."""
    return torch.zeros(2, sum(width for _, width in module.network.frontier), dtype=module.dtype)


def whole_codes(module: WindTunnelModule, plan: HostPlan) -> frozenset[str]:
    """Return the tables of the plan that hold codes which nothing but embeddings reads: these may be integers."""
    network = module.network
    codes = {
        name
        for name, part in zip(plan.frontier, plan.tables, strict=True)
        if isinstance(part, Codes)
        and all(isinstance(each, Code) and each.unknown == each.unknown for each in part.columns)
    }
    for wire, part in zip(network.wires, network.operators, strict=True):
        if type(part) is not CategoryEmbedding:
            codes -= set(wire.inputs)
    return frozenset(codes - set(network.features))


def describe(module: WindTunnelModule, names: Sequence[str], refusals: Sequence[Refused] = ()) -> str:
    """Describe a program as JSON text. Fallback operators are named in it.

    Args:
        module: What the program computes.
        names: Its answers.
        refusals: What the truth values after them tell.
    """
    fallbacks = list(dict.fromkeys(module.frontend.fallbacks))
    writer = Writer(keep_arrays=True)
    predictor = module.predictor
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "answers": list(names),
            "flat": flat_answers(module, names),
            "classes": writer.write(list(predictor.classes) if predictor is not None else []),
            "outputs": writer.write([list(labels) for labels in predictor.outputs] if predictor is not None else []),
            "dtype": str(module.dtype).removeprefix("torch."),
            "inputs": [[name, width] for name, width in module.network.frontier],
            "checks": writer.write(frontier_checks(module.network), "checks"),
            "refusals": [contract.refusal for _, contract in refusals],
            "foreign": fallbacks,
            "frontend": None if fallbacks else writer.write(module.frontend, "frontend"),
        },
        allow_nan=False,
    )


def flat_answers(module: WindTunnelModule, names: Sequence[str]) -> list[str]:
    """Return the answers that the source gives as one number a row, not as a table."""
    predictor = module.predictor
    if predictor is None:
        return []
    with torch.inference_mode():
        scores = module.network(example(module))
        return [name for name in names if name not in (MAIN, TIES) and predictor.answer(scores, name).ndim == 1]


def export_error(error: Exception, kind: str) -> MlsysError:
    """Return an error with one line for what torch's exporters raise."""
    text = str(error).partition("## Exception summary")[2] or str(error)  # torch's ONNX exporter tells the cause there
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return MlsysError(f"the network cannot be exported to {kind}: {lines[0] if lines else type(error).__name__}")
