"""Serve a module with DVABatch and BatchMaker; an answer must be what the module gives that request."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mlsys_batchmaker.cells.cell import Cell, dtype_name, make_cell
from mlsys_batchmaker.engine import Engine as CellEngine
from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.model import Model, Payload
from mlsys_batchmaker.models.model import Tensor as Declared
from mlsys_batchmaker.plan import CellGraph
from mlsys_batchmaker.plan.spec import Port
from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_core.loop import Collector, ServeRequest
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.scheduling.policies.operator import OperatorPolicy
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from torch import Tensor, nn

from tests.oracles.isolation.catalogue import Case
from tests.oracles.tally import Tally

RELATIVE = 1e-3  # of the largest number of an answer: what other batch sizes may round
NUM_REQUESTS = 24


def judge(tally: Tally, case: Case, executor: str, serve: Any) -> None:
    """Serve ``case`` and count: all answers equal, refused at load, wrong, or an unexpected exception."""
    name = f"{case.name} by {executor}"
    try:
        answers = serve(case)
    except MlsysError as error:
        tally.add("refused", name, " ".join(str(error).split()[:4]))
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        tally.add("raw", name, f"{type(error).__name__}: {str(error)[:200]}")
    else:
        wrong = [what for what in map(_fault, case.requests(NUM_REQUESTS), answers, [case] * NUM_REQUESTS) if what]
        detail = f"{len(wrong)} of {NUM_REQUESTS} answers differ, first {wrong[0]}" if wrong else ""
        tally.add("wrong" if wrong else "equal", name, detail)


def _fault(request: tuple[Tensor, ...], answer: Any, case: Case) -> str | None:
    try:
        expected = [value[0].numpy() for value in case.alone(request)]
    except Exception as error:  # noqa: BLE001 - torch's own
        return f"torch has no answer to it alone: {str(error)[:80]}"
    if isinstance(answer, BaseException):
        is_finite = all(np.isfinite(value).all() for value in expected if value.dtype.kind == "f")
        return f"{answer}" if is_finite or not isinstance(answer, ServingError) else None
    got = answer if isinstance(answer, tuple) else (answer,)
    if len(got) != len(expected):
        return f"{len(got)} arrays for {len(expected)}"
    for own, other in zip(got, expected, strict=True):
        allowed = RELATIVE * max(1e-3, _largest(other)) if other.dtype.kind == "f" else 0
        if own.shape != other.shape or not np.allclose(own, other, rtol=0, atol=allowed, equal_nan=True):
            return (
                f"by {float(np.abs(np.asarray(own, float) - other).max()):.3g}" if own.shape == other.shape else "shape"
            )
    return None


def _largest(values: Any) -> float:
    """Return the largest magnitude of the finite values."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


def by_stages(case: Case) -> list[Any]:
    """Export with a dynamic first dimension, cut, and serve with a policy that differs from case to case."""
    batch = torch.export.Dim("batch", min=1)
    several = tuple(torch.cat([value[:1]] * 3) for value in case.inputs)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(case.module, several, dynamic_shapes=tuple({0: batch} for _ in several))
    except Exception as error:  # torch's own: there is no such program to serve
        raise InvalidInputError(f"torch exports it for one batch size only: {type(error).__name__}") from error
    program = program_of(exported, tuple(value[:1] for value in case.inputs))
    cuts = program.allowed_cuts
    model = SlicedModel(program, cuts[:: max(1, len(cuts) // 2)][:2])
    costs = parse_stages(",".join(["1+1"] * model.num_stages))
    policies: list[Any] = [Policy(), OperatorPolicy(), LoadPolicy(), ZeroBatch(max_batch_size=64)]
    collector = Collector[Any, Any]()
    with Engine(model, costs, policies[len(case.name) % 4], listener=collector, num_threads=1) as engine:
        for number, request in enumerate(case.requests(NUM_REQUESTS)):
            payload = tuple(value[0].numpy() for value in request)
            model.check(payload)
            engine.loop.submit(ServeRequest(str(number), payload), str(number))
        engine.loop.drain()
    ended = [collector.finished[str(number)] for number in range(NUM_REQUESTS)]
    return [each.result if each.error is None else each.error for each in ended]


class _Held(nn.Module):
    """A module as a cell; it is no submodule, so it keeps its mode."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        object.__setattr__(self, "_held", case.module)
        self._inputs = [_port(f"x{number}", value) for number, value in enumerate(case.inputs)]
        outputs = case.alone(tuple(torch.cat([value[:1]] * 3) for value in case.inputs))
        if not all(isinstance(value, Tensor) and value.ndim and len(value) == 3 for value in outputs):
            raise InvalidInputError("its outputs have no row for each request")
        self._outputs = [_port(f"y{number}", value) for number, value in enumerate(outputs)]

    def ports(self) -> tuple[list[Port], list[Port]]:
        """Return those of the example."""
        return self._inputs, self._outputs

    def forward(self, *inputs: Tensor) -> Any:
        """Run the module."""
        held: Any = self.__dict__["_held"]
        return held(*inputs)


def _port(name: str, value: Tensor) -> Port:
    high = None if value.is_floating_point() or value.dtype is torch.bool else int(value.max()) + 1
    return Port(name, dtype_name(value.dtype), tuple(value.shape[1:]), high or None)


class _One:
    """An architecture of one cell a request."""

    name = "one"

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.inputs = tuple(Declared(port.name, "float32", port.shape) for port in cell.spec.inputs)
        self.outputs = tuple(Declared(port.name, "float32", port.shape) for port in cell.spec.outputs)

    def unfold(self, request: Payload, graph: CellGraph) -> None:
        graph.result(graph.add("cell", dict(request)))

    def finish(self, request: Payload, values: Sequence[Any]) -> Payload:
        return {port.name: np.asarray(value) for port, value in zip(self.cell.spec.outputs, values[0], strict=True)}

    def example(self) -> Payload:
        return {
            port.name: value[0].numpy() for port, value in zip(self.cell.spec.inputs, self.cell.example(1), strict=True)
        }

    def config(self) -> Mapping[str, Any]:
        return {}


def by_cells(case: Case) -> list[Any]:
    """Make it a cell and serve it, one cell a request."""
    try:
        held = _Held(case)
    except (IndexError, RuntimeError, ValueError) as error:
        raise InvalidInputError(f"torch refuses three requests: {error}") from error
    cell = make_cell("cell", held, results=[port.name for port in held._outputs])
    with CellEngine(Model("module", [cell], _One(cell)), EngineConfig(compiler="eager")) as engine:
        futures = []
        for request in case.requests(NUM_REQUESTS):
            inputs = {port.name: value[0].numpy() for port, value in zip(cell.spec.inputs, request, strict=True)}
            futures.append(engine.submit(inputs))
        answers: list[Any] = []
        for future in futures:
            error = future.exception()
            answers.append(tuple(future.result().outputs.values()) if error is None else error)
    return answers
