"""The suite ``nimble-dynamic``: one preparation for a range of sizes, beside peers with dynamic axes."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.report import Section, Table
from mlsys_nimble.module import Nimble
from mlsys_nimble.nets.blocks import Net
from torch.utils._pytree import tree_leaves

from mlsys_bench.harness.race import Case, Outcome, Outcomes, fastest, race, speed_up
from mlsys_bench.harness.text import geometric_mean, milliseconds, status_of, times, untimed
from mlsys_bench.nimble import EAGER, EAGER_TIMES, OURS, PEERS, TOLERANCE, runtimes
from mlsys_bench.nimble.papers import load_model
from mlsys_bench.nimble.races import exact_results, race_each, race_settings, relative_difference
from mlsys_bench.nimble.zoo_nets import let_torchvision_load

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

CREPE = "mlsys_bench.nimble.zoo_nets:crepe"  # frames of 64 ms of sound
SECONDS, QUICK_SECONDS = 12.0, 2.0  # of turns for each size


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes of one dimension, the same one of all inputs."""

    dim: int
    least: int
    most: int
    sizes: tuple[int, ...]  # raced; the middle one is the example's
    quick: tuple[int, ...]


RANGES = {
    "minilm-l6": Range(1, 1, 512, (1, 7, 32, 64, 100, 128, 256, 333, 512), (7, 64, 128)),
    CREPE: Range(0, 1, 1024, (1, 3, 10, 50, 100, 300, 1000), (1, 10, 50)),
}
QUICK = ("minilm-l6",)


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net at several sizes of its range.

    Args:
        context: The suite's context.
        nets: Names of :data:`RANGES`; none: all, or :data:`QUICK`.
        peers: As for the suite ``nimble``.
        trust_code: As for the suite ``nimble``.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net has no range; nothing has run.
        MlsysError: a race ended without outcomes.
    """
    if unknown := sorted(set(nets) - set(RANGES)):
        raise InvalidInputError(f"{unknown[0]} has no range of sizes; there are {', '.join(RANGES)}")
    settings = race_settings(context, nets or (QUICK if context.is_quick else tuple(RANGES)), peers, trust_code)
    budget_s = QUICK_SECONDS if context.is_quick else SECONDS
    races: dict[str, Outcomes] = {}
    loads: dict[str, str] = {}
    for name, record in race_each(context, "nimble-dynamic", f"{__name__}:race_net", settings, budget_s=budget_s):
        if isinstance(record, MlsysError):
            raise record
        loads[name] = record["load"]
        for size, outcomes in record["found"].items():
            races[f"{name}, {size}"] = {case: Outcome(**fields) for case, fields in outcomes.items()}
    return report(races, context.num_threads, loads)


def race_net(
    model: str, num_threads: int, budget_s: float, is_quick: bool, cache_dir: str, trust_code: bool
) -> dict[str, Any]:
    """Race on one net in this process; return the outcomes' fields by size."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    let_torchvision_load()  # transformers imports it where it is installed
    net, span = load_model(model, trust_code=trust_code), RANGES[model]
    sizes = span.quick if is_quick else span.sizes
    ready = _Contestants(net.module, at_size(net.inputs, span, sizes[len(sizes) // 2]), span, num_threads, cache_dir)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for size in sizes:
            inputs = at_size(net.inputs, span, size)
            outcomes = race(
                {name: partial(ready.case, name, inputs) for name in ready.makers},
                difference=relative_difference,
                expected=exact_results(Net(net.module, inputs)),
                tolerance=TOLERANCE,
                slack=EAGER_TIMES,
                turn_s=0.1,
                budget_s=budget_s,
                say=lambda step, size=size: print(f"{model}, {size}: {step}", flush=True),  # type: ignore[misc]
            )
            found[str(size)] = {name: asdict(outcome) for name, outcome in outcomes.items()}
    return found


def at_size(inputs: tuple[torch.Tensor, ...], span: Range, size: int) -> tuple[torch.Tensor, ...]:
    """Return inputs of another size, elements repeated or left out."""
    return tuple(x.index_select(span.dim, torch.arange(size) % x.shape[span.dim]).contiguous() for x in inputs)


class _Contestants:
    """Functions of inputs of any size, each made when its first case is."""

    def __init__(
        self, module: torch.nn.Module, example: tuple[torch.Tensor, ...], span: Range, num_threads: int, cache_dir: str
    ) -> None:
        self._module, self._example, self._span, self._num_threads = module, example, span, num_threads
        self._path, self._is_exported = Path(cache_dir) / f"dynamic-{os.getpid()}.onnx", False
        self._made: dict[str, Callable[..., Any]] = {}
        self.makers: Mapping[str, Callable[[], Callable[..., Any]]] = {
            EAGER: lambda: module,
            "torch.compile": self._compiled,
            "ONNX Runtime": self._onnx_runtime,
            "OpenVINO": self._openvino,
            OURS: self._nimble,
        }

    def case(self, name: str, inputs: tuple[torch.Tensor, ...]) -> Case:
        """Return a contestant's case for these inputs."""
        if name not in self._made:
            self._made[name] = self.makers[name]()
        call = self._made[name]
        return Case(lambda: call(*inputs), tree_leaves)

    def _nimble(self) -> Callable[..., Any]:
        size = ("size", self._span.least, self._span.most)
        dynamic = {number: {self._span.dim: size} for number in range(len(self._example))}
        return Nimble(self._module).prepare(self._example, dynamic=dynamic, num_threads=self._num_threads)

    def _compiled(self) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.compile(copy.deepcopy(self._module), dynamic=True, options={"freezing": True})
        return made

    def _onnx(self) -> str:
        if self._is_exported:
            return str(self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = torch.export.Dim("size", min=self._span.least, max=self._span.most)
        shapes = tuple({self._span.dim: size} for _ in self._example)
        program = torch.onnx.export(self._module, self._example, dynamo=True, dynamic_shapes=shapes, verbose=False)
        assert program is not None
        program.save(str(self._path), external_data=False)
        self._is_exported = True
        return str(self._path)

    def _onnx_runtime(self) -> Callable[..., Any]:
        return runtimes.onnx_runtime(self._onnx(), self._num_threads)

    def _openvino(self) -> Callable[..., Any]:
        package = importlib.import_module("openvino")
        return runtimes.openvino(package.Core().read_model(self._onnx()), self._num_threads)


def report(races: Mapping[str, Outcomes], num_threads: int, loads: Mapping[str, str]) -> Section:
    """Return a table with the losses first, and all figures as data."""

    def over(outcomes: Outcomes) -> float | None:
        return speed_up(outcomes.get(OURS), outcomes.get(fastest(outcomes, PEERS) or ""))

    rows = []
    for name in sorted(races, key=lambda name: over(races[name]) or 0.0):
        outcomes = races[name]
        peer = fastest(outcomes, PEERS)
        net, _, size = name.rpartition(", ")
        medians = [milliseconds(outcomes.get(case)) for case in (peer or "", OURS)]
        rows.append([net, size, peer or "-", *medians, times(over(outcomes))])
    columns = ["net", "size", "best peer", "its ms", "Nimble", "over peer"]
    mean = geometric_mean([over(outcomes) for outcomes in races.values()])
    body: list[Any] = [Table(columns, rows, "Milliseconds a call, losses first")]
    body += [f"{times(mean)} the best peer's speed, geometric mean over all sizes.", *untimed(races)]
    data = {name: {case: one.to_json() for case, one in outcomes.items()} for name, outcomes in races.items()}
    found = {
        "num_threads": num_threads,
        "loads": dict(loads),
        "races": data,
        "over_best_peer": mean,
    }
    return Section("Nimble at many sizes", body, status=status_of(races, OURS), data=found)
