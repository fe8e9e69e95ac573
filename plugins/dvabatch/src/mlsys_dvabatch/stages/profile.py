"""Profiles of a staged model: T[stage][batch size], measured and on disk, diversities, and the number of stages (7.1).

A stored one says how quiet the machine was when it was measured.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.device import Device
from mlsys_core.loop import ServeRequest, SimulatedExecutor, simulate
from mlsys_core.profiling import ProfileCache, ProfileKey, ProfileTable, UnitProfile, measure
from mlsys_core.profiling.machine_load import LOADED_SHARE, LoadMeter
from mlsys_core.workload import Poisson
from mlsys_dvabatch.scheduling.costs import PackedCosts, StageCosts, TableCosts, least_request_s, unit_name
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy
from mlsys_dvabatch.scheduling.policies.registry import Diversities
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler, simulated_output, task_s
from mlsys_dvabatch.stages.model import StageModel
from mlsys_dvabatch.stages.slicing.partition import even_cuts
from mlsys_dvabatch.stages.slicing.program import Program

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
SHARERS = (1, 2, 4, 16)  # requests that share the units of a packed batch: of more, attention is next to nothing
TRIES = (1, 2, 3, 4, 6, 8, 12, 20)  # numbers of stages tried: the paper's eight
LOAD, OVERHEAD_S, NUM_REQUESTS = 0.9, 100e-6, 600  # of a try: part of the peak, seconds of a task beside its stages
MOST_UNITS = 512  # units of a packed batch by default
_WIDE_SPREAD = 0.5  # relative spread of repeats, above which the machine was busy
_OTHERS, _SPREAD = "share of others", "median spread"  # names of notes
Progress = Callable[[int, int], None]


def profile_stages(
    model: StageModel,
    request: Callable[[int], Any],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    lengths: Sequence[int] = (1,),
    repeats: int = 3,
    keep: Callable[[Sequence[float]], float] = statistics.median,
    clock: Callable[[], float] | None = None,
    progress: Progress | None = None,
    device: Device | None = None,
    is_packed: bool = False,
    longest: int | None = None,
) -> TableCosts:
    """Measure every stage at every batch size and length.

    Args:
        model: The staged model.
        request: a payload of a given length.
        batch_sizes: rising.
        lengths: rising; where inputs have one shape, (1,).
        repeats: timed passes.
        keep: seconds of all passes -> those to keep.
        clock: seconds; None: wall time. ``time.thread_time`` counts this thread's processor time alone.
        progress: called as ``progress(done, total)``.
        device: Device of the model's weights; None: host memory.
        is_packed: the model packs its requests: ``lengths`` are the units of a whole batch, which its requests share.
        longest: packed: units of the longest request; so many more share a larger batch. None: no bound.
    """
    inputs: dict[tuple[str, int], tuple[int, Any]] = {}
    with torch.inference_mode():
        for length in lengths:
            for num in batch_sizes:
                units_of = _shares(length, num, longest or length) if is_packed else [length] * num
                requests = [ServeRequest(str(at), request(units), length=units) for at, units in enumerate(units_of)]
                values = model.collate(requests, length)
                for stage in range(model.num_stages):
                    inputs[unit_name(stage, length), num] = stage, values
                    values = model.run(stage, values)

        def run(unit: str, num: int) -> None:
            stage, values = inputs[unit, num]
            model.run(stage, values)
            if device is not None and device.torch_name != "cpu":
                device.synchronize()

        units = [unit_name(stage, length) for stage in range(model.num_stages) for length in lengths]
        timing = {} if clock is None else {"clock": clock}
        table = measure(
            units, list(batch_sizes), run=run, warmup=1, repeats=repeats, progress=progress, keep=keep, **timing
        )
    return (PackedCosts if is_packed else TableCosts)(table, model.num_stages, tuple(lengths))


def packed_units(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the units at which packed batches are measured: those of single requests, and of a full batch."""
    return (*lengths, *([MOST_UNITS] if lengths[-1] < MOST_UNITS else ()))


def _shares(units: int, num: int, longest: int) -> list[int]:
    """Return the units of ``num`` requests that share them evenly.

    Fewer where they would have less than two each, more where they would have over ``longest``.
    """
    num = max(min(num, units // 2), -(-units // longest))
    return [units // num + (at < units % num) for at in range(num)]


def boundary_nbytes(model: StageModel, request: Callable[[int], Any], *, num: int, length: int = 1) -> list[int]:
    """Return the bytes that each stage but the last hands on for ``num`` requests: a buffer pair's size (section 6).

    Args:
        model: The staged model; it is run once.
        request: a payload of a given length.
        num: requests of the batch.
        length: Units of each request.
    """
    found = []
    with torch.inference_mode():
        values = model.collate([ServeRequest(str(n), request(length), length=length) for n in range(num)], length)
        for stage in range(model.num_stages - 1):
            values = model.run(stage, values)
            found.append(values.nbytes)
    return found


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """Cost of each operator of a program, and the preferred sizes and slicing that follow from it."""

    batch_sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]  # [operator][batch size]

    @property
    def preferred(self) -> list[int]:
        """Preferred batch size of each operator: the smallest with nine tenths of its best throughput."""
        table = ProfileTable(
            tuple(
                UnitProfile(str(number), self.batch_sizes, tuple(max(value, 1e-9) for value in times))
                for number, times in enumerate(self.seconds)
            )
        )
        return [table.knee(str(number)) for number in range(len(self.seconds))]

    def prefers_differently(self, *, share: float = 0.05, ratio: float = 4.0) -> bool:
        """Return whether groups of operators, each with ``share`` of the time, prefer sizes ``ratio`` apart.

        This is the paper's operator diversity.
        """
        total = sum(times[-1] for times in self.seconds)
        shares: dict[int, float] = {}
        for preferred, times in zip(self.preferred, self.seconds, strict=True):
            shares[preferred] = shares.get(preferred, 0.0) + times[-1] / total
        large = [preferred for preferred, part in shares.items() if part >= share]
        return bool(large) and max(large) >= ratio * min(large)

    def costs(self, cuts: Sequence[int]) -> TableCosts:
        """Return the costs of the stages that ``cuts`` make, as sums over their operators."""
        bounds = [0, *cuts, len(self.seconds)]
        units = [
            UnitProfile(
                unit_name(stage, 1),
                self.batch_sizes,
                tuple(max(1e-9, sum(column)) for column in zip(*self.seconds[begin:end], strict=True)),
            )
            for stage, (begin, end) in enumerate(pairwise(bounds))
        ]
        return TableCosts(ProfileTable(tuple(units)), len(units))


def profile_operators(
    program: Program, *, batch_sizes: Sequence[int] = BATCH_SIZES, progress: Progress | None = None
) -> OperatorProfile:
    """Time every operator at every batch size."""
    columns = []
    for number, num in enumerate(batch_sizes):
        columns.append(program.timed(num, repeats=2))
        if progress is not None:
            progress(number + 1, len(batch_sizes))
    return OperatorProfile(tuple(batch_sizes), tuple(zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True)
class Try:
    """One number of stages, tried."""

    num_stages: int
    mean_s: float  # average latency


def choose_num_stages(
    program: Program, profile: OperatorProfile, *, max_batch_size: int = 64, progress: Progress | None = None
) -> tuple[int, list[Try]]:
    """Return the number of stages with the lowest average latency, of at most eight, and all that were tried.

    Each is simulated on the profile at :data:`LOAD` of the peak with Policies II and III; every task costs
    :data:`OVERHEAD_S` on top, which is what makes many stages bad (Figure 20).
    """
    allowed = program.allowed_cuts
    middle = profile.batch_sizes.index(4) if 4 in profile.batch_sizes else 0
    times = [row[middle] for row in profile.seconds]
    tries = []
    candidates = [num for num in TRIES if num <= len(allowed) + 1]
    for done, num_stages in enumerate(candidates, 1):
        costs = profile.costs(even_cuts(times, allowed, num_stages))
        tries.append(Try(num_stages, _simulated_mean_s(costs, max_batch_size)))
        if progress is not None:
            progress(done, len(candidates))
    return min(tries, key=lambda each: each.mean_s).num_stages, tries


def _simulated_mean_s(costs: StageCosts, max_batch_size: int) -> float:
    """Simulate Policies II and III on one device and return the average latency in seconds."""
    times = Poisson(LOAD / least_request_s(costs, max_batch_size)).times(NUM_REQUESTS, np.random.default_rng(0))
    workers = [
        SimulatedExecutor(lambda task: task_s(costs, task) + OVERHEAD_S, simulated_output)
        for _ in range(costs.num_stages)
    ]
    scheduler = DvaScheduler(LoadOperatorPolicy(), costs, max_batch_size=max_batch_size, concurrency=1)
    run = simulate(scheduler, workers, ((float(at), ServeRequest(str(n), None)) for n, at in enumerate(times)))
    return sum(served.latency_s for served in run.requests) / len(run.requests)


def diversities_of(*, has_lengths: bool, profile: OperatorProfile | None) -> Diversities:
    """Return the known diversities of a model (section 7.1)."""
    return Diversities(input=has_lengths, operator=profile is not None and profile.prefers_differently())


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """Costs of a model, and how quiet the machine was when they were measured."""

    costs: TableCosts
    share_of_others: float | None = None  # share of processor time that others used meanwhile; None: unknown
    spread: float | None = None  # (slowest - fastest) / median of the repeats, the median of all entries

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing tells that the machine had other work."""
        return (self.share_of_others or 0) <= LOADED_SHARE and (self.spread or 0) <= _WIDE_SPREAD

    def describe(self) -> str:
        """Return a sentence on how the costs came about."""
        if self.share_of_others is None or self.spread is None:
            text = "Costs measured, with nothing known of other work on the machine"
        else:
            text = f"Costs measured while other processes used {self.share_of_others:.0%} of the machine"
            text += f"; repeats differed by {self.spread:.0%}"
        return text + ("." if self.is_quiet else "; to measure again: mlsys cache clear dvabatch-profiles.")


def stored_costs(
    cache_dir: Path,
    name: str,
    model: StageModel,
    lengths: Sequence[int],
    measure_costs: Callable[[], TableCosts],
    *,
    device: Device | None = None,
    is_packed: bool = False,
) -> StoredProfile:
    """Return the profile of ``model``, from disk if this machine has measured it with these versions and threads."""
    from mlsys_core.environment import describe_environment

    environment = describe_environment()
    content = f"{name}, {model.num_stages} stages, lengths {list(lengths)}, {_shape_digest(model)}"
    where = f"cpu {environment.get('cpu', '')}: {torch.get_num_threads()} threads"
    if device is not None and device.kind != "cpu":
        where = f"{device.name} beside {where}"
    key = ProfileKey.of(where, {"torch": str(torch.__version__)}, content)
    cache = ProfileCache(cache_dir / "dvabatch-profiles")
    notes = cache.notes(key)

    def measured() -> ProfileTable:
        with LoadMeter() as meter:
            table = measure_costs().table
        spread = statistics.median(each for unit in table.units for each in unit.spread or (0.0,))
        notes.clear()
        notes[_SPREAD] = spread
        if (share := meter.load.share_of_others) is not None:
            notes[_OTHERS] = share
        return table

    table = cache.get_or_measure(key, measured, notes=notes)
    costs = (PackedCosts if is_packed else TableCosts)(table, model.num_stages, tuple(lengths))
    return StoredProfile(costs, share_of_others=notes.get(_OTHERS), spread=notes.get(_SPREAD))


def _shape_digest(model: StageModel) -> str:
    cuts = getattr(model, "cuts", ())
    state = getattr(getattr(model, "program", None), "module", model)
    shapes = (
        [(name, tuple(value.shape)) for name, value in state.state_dict().items()]
        if hasattr(state, "state_dict")
        else []
    )
    return hashlib.sha256(repr((cuts, shapes)).encode()).hexdigest()[:16]
