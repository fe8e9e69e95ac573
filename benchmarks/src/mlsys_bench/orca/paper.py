"""The ORCA paper's evaluation (section 6.2, dissertation 4.5.2): throughput against median latency, two schedulings.

Both back ends share this: the traces, the cases, and the ratio of throughput at equal latency. The real engine
(:mod:`.paper_engine`) and the paper's cluster (:mod:`.paper_simulated`) each give a :class:`Curve` per case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LoadPoint

from mlsys_bench.orca.serve import Workload
from mlsys_bench.workload.lengths import ORCA_OUTPUTS, ORCA_PROMPTS, Uniform

PAPERS_RATIO = 36.9  # 6.81 over 0.185 req/s, 175B on 16 GPUs
PAPERS_LATENCY_S = 0.190  # the median normalised latency it was read at
PAPERS_SLOWDOWN = 1.47  # FasterTransformer's iterations over Orca's on the 175B model, at most (Figure 4.7c)
ALONE = (128, 32)  # input and output tokens whose normalised execution time, doubled, gave that latency (Figure 4.7c)


@dataclass(frozen=True, slots=True)
class Case:
    """A scheduling under a maximum batch size."""

    policy: str  # "orca" or "request-level", the scheduling of FasterTransformer below a batching server
    max_batch_size: int
    microbatch_size: int | None = None  # request-level alone; None: the whole batch

    @property
    def label(self) -> str:
        """Label as in the paper: orca(max_bs), request-level(max_bs, mbs); the paper's name for the latter is ft."""
        if self.policy == "orca":
            return f"orca({self.max_batch_size})"
        return f"request-level({self.max_batch_size}, {self.microbatch_size or self.max_batch_size})"

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the policy."""
        return {} if self.microbatch_size is None else {"microbatch_size": self.microbatch_size}


@dataclass(frozen=True, slots=True)
class Curve:
    """A case's runs, from light to heavy load."""

    case: Case
    points: tuple[LoadPoint, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The best of each scheduling at one latency."""

    latency_s: float  # median normalised latency
    orca: tuple[str, float] | None  # label and requests per second; None: no run is below that latency
    request_level: tuple[str, float] | None

    @property
    def ratio(self) -> float | None:
        """Orca's throughput over the baseline's; None if one has none."""
        if self.orca is None or self.request_level is None:
            return None
        return self.orca[1] / self.request_level[1]


def paper_workload(*, scale: float, num_requests: int) -> Workload:
    """Return the paper's requests with lengths times ``scale``, at least one token each.

    Raises:
        InvalidInputError: ``scale`` is not above 0.

    Example:
        >>> paper_workload(scale=0.125, num_requests=2).prompts
        Uniform(low=4, high=64)
    """
    if not 0 < scale < math.inf:
        raise InvalidInputError(f"the scale of the lengths is {scale}: it must be above 0, and 1 is the paper's")
    prompts, outputs = (
        Uniform(scaled(lengths.low, scale), scaled(lengths.high, scale)) for lengths in (ORCA_PROMPTS, ORCA_OUTPUTS)
    )
    return Workload(prompts=prompts, outputs=outputs, num_requests=num_requests)


def scaled(length: int, scale: float) -> int:
    """Return ``length * scale`` tokens, at least one."""
    return max(1, round(length * scale))


def throughput_at(points: Sequence[LoadPoint], latency_s: float) -> float | None:
    """Return the requests per second at which the median normalised latency reaches ``latency_s``.

    Between two runs the curve is a straight line.

    The highest such throughput; a curve that stays below ends with its highest.

    Returns:
        None if every run is above ``latency_s``.
    """
    ordered = sorted(points, key=lambda point: point.offered_rps or point.throughput_rps)
    best = None
    for index, point in enumerate(ordered):
        if _latency_s(point) > latency_s:
            continue
        reached = point.throughput_rps
        if index + 1 < len(ordered) and _latency_s(ordered[index + 1]) > latency_s:
            after = ordered[index + 1]
            share = (latency_s - _latency_s(point)) / (_latency_s(after) - _latency_s(point))
            reached += share * (after.throughput_rps - point.throughput_rps)
        best = reached if best is None else max(best, reached)
    return best


def crossing(curves: Sequence[Curve], latency_s: float, *, baseline_slowdown: float = 1.0) -> Crossing:
    """Return the best throughput of either scheduling at ``latency_s``.

    Args:
        curves: Curves of the cases.
        latency_s: Median normalised latency, seconds per token.
        baseline_slowdown: As if every iteration of the request-level ones had taken this many times as long: all of
            their times stretch, so their throughput is read at a latency as many times lower, and divided by it.
    """
    best: dict[bool, tuple[str, float]] = {}
    for curve in curves:
        is_orca = curve.case.policy == "orca"
        slowdown = 1.0 if is_orca else baseline_slowdown
        reached = throughput_at(curve.points, latency_s / slowdown)
        if reached is not None and (is_orca not in best or reached / slowdown > best[is_orca][1]):
            best[is_orca] = curve.case.label, reached / slowdown
    return Crossing(latency_s, best.get(True), best.get(False))


def _latency_s(point: LoadPoint) -> float:
    assert point.normalized_latency is not None
    return point.normalized_latency.p50
