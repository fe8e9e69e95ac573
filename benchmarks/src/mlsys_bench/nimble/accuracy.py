"""Races of forms of a net that lose accuracy: errors beside speed, and their report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_bench.harness.race import Outcomes, fastest, speed_up
from mlsys_bench.harness.text import geometric_mean, milliseconds, status_of, times, untimed
from mlsys_bench.nimble.summary import OURS

if TYPE_CHECKING:
    from mlsys_core.report import Section
    from torch import Tensor

FLOAT = "float32"
BF16, AUTOCAST, WEIGHTS, PAIRS = "bf16", "autocast", "bf16 weights", "bf16 pairs"
TORCH, COMPILED = "eager", "torch.compile"


@dataclass(frozen=True, slots=True)
class Forms:
    """Names of the cases that such a race compares."""

    what: str  # "in int8"
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    beside: str  # results that errors are measured from


def errors(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> dict[str, float]:
    """Return how far int8's first results are from float's.

    ``max_error`` is over the largest value, ``mean_error`` over the mean absolute value; ``top1`` is the share of rows
    whose largest entry is the same.
    """
    import torch

    got, wanted = (
        torch.stack([torch.as_tensor(each[0]).double() for each in side]) for side in zip(*pairs, strict=True)
    )
    off = (got - wanted).abs()
    return {
        "max_error": float(off.max() / wanted.abs().max()),
        "mean_error": float(off.mean() / wanted.abs().mean()),
        "top1": float((got.argmax(-1) == wanted.argmax(-1)).double().mean()),
    }


def distance(results: Sequence[Any], expected: Sequence[Tensor]) -> float:
    """Return the root mean square of the differences over the expected values', the largest of all results."""
    import torch

    found = [torch.as_tensor(result).double() for result in results]
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    return max(float((a - b).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True))


def ratios(outcomes: Outcomes, forms: Forms) -> dict[str, float | None]:
    """Return the time of the fastest peer's form over ours, by our form."""
    peer = outcomes.get(fastest(outcomes, forms.peers) or "")
    return {form: speed_up(outcomes[form], peer) for form in forms.ours if form in outcomes}


def report_of(
    forms: Forms,
    races: Mapping[str, Outcomes],
    accuracy: Mapping[str, Mapping[str, Any]],
    num_threads: int,
    loads: Mapping[str, str],
) -> Section:
    """Return the races with the losses first, each case's accuracy, and all figures as data."""
    from mlsys_core.report import Section, Table

    over = {(net, form): ratio for net, outcomes in races.items() for form, ratio in ratios(outcomes, forms).items()}
    rows = []
    for net, form in sorted(over, key=lambda key: over[key] or 0.0):
        outcomes = races[net]
        peer = fastest(outcomes, forms.peers)
        ms = [milliseconds(outcomes.get(name)) for name in (peer or "", form)]
        gain = speed_up(outcomes.get(form), outcomes.get(f"{OURS}, {FLOAT}"))
        rows.append([net, form, peer or "-", *ms, times(over[net, form]), times(gain)])
    columns = ["net", "Nimble's form", "best peer", "its ms", "Nimble's", "over", "over own float32"]
    errors_of = [
        [net, case, milliseconds(outcomes[case]), *(f"{found[key]:.3g}" for key in ("max_error", "mean_error", "top1"))]
        for net, outcomes in races.items()
        for case, found in accuracy[net].items()
    ]
    mean = geometric_mean(
        max((ratio for ratio in ratios(one, forms).values() if ratio), default=None) for one in races.values()
    )
    body: list[Any] = [
        Table(columns, rows, f"Median milliseconds a call {forms.what}, losses first"),
        Table(["net", "case", "ms", "max error", "mean error", "top-1"], errors_of, f"Beside {forms.beside}"),
        f"{times(mean)} the best peer's speed {forms.what} by the faster form of each net, geometric mean.",
        *(f"During the race on {net}: {load}" for net, load in loads.items()),
        *untimed(races),
    ]
    nets = {
        net: {
            "cases": {case: {**one.to_json(), "accuracy": accuracy[net].get(case)} for case, one in outcomes.items()},
            "best_peer": fastest(outcomes, forms.peers),
            "over_best_peer": ratios(outcomes, forms),
        }
        for net, outcomes in races.items()
    }
    data = {"num_threads": num_threads, "loads": dict(loads), "over_best_peer": mean, "nets": nets}
    status = status_of(races, OURS, ("differs", "does not run"))
    return Section(f"Nimble {forms.what}", body, status=status, data=data)
