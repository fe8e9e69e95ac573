"""The suite ``nimble``: nets of chapter 3, each raced in a process of its own, with a peers' interpreter or ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.device import device_kind
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.report import Section, Table

from mlsys_bench.harness.race import Outcome, Outcomes, fastest, race, speed_up
from mlsys_bench.harness.text import geometric_mean, milliseconds, status_of, times, times_table, untimed
from mlsys_bench.nimble import EAGER, EAGER_TIMES, OURS, OURS_SINGLE, PEERS, TOLERANCE
from mlsys_bench.nimble.cases import MAKERS, SLOW_TO_PREPARE, left_out_of_quick
from mlsys_bench.nimble.gpu import run_on_gpu
from mlsys_bench.nimble.races import exact_results, race_each, race_settings, relative_difference, subject_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

NETS = (
    *("six-branch", "mlp", "gru", "resnet20-cifar", "darts", "nasnet-mobile", "mobilenet-v2"),
    *("efficientnet-b0", "inception-v3", "resnet50", "minilm-l6", "bert-base"),
)
QUICK_NETS = ("six-branch", "mlp", "gru", "resnet20-cifar", "mobilenet-v2")
SECONDS, QUICK_SECONDS = 60.0, 8.0  # of turns for each net


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net and report.

    On a CUDA device: the nets of figures 3.8 and 3.9 and table 3.1, with what torch itself has.

    Args:
        context: The suite's context.
        nets: Nets as :func:`mlsys_bench.nimble.papers.load_model` takes them; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: An environment's folder or its Python; None: ``.peers/nimble`` if it is there, else this interpreter.
        trust_code: Let ``.pt2`` files run code that they hold.

    Raises:
        InvalidInputError: ``peers`` has no Python, or a net is not there; nothing has run.
        MlsysError: a race ended without outcomes; the message is its last words.
    """
    if device_kind(context.device).name != "cpu":
        if peers is not None:
            raise InvalidInputError(f"on {context.device} the peers are torch's own: leave out --peers")
        return run_on_gpu(context, nets)
    settings = race_settings(context, nets or (QUICK_NETS if context.is_quick else NETS), peers, trust_code)
    races: dict[str, Outcomes] = {}
    budget_s = QUICK_SECONDS if context.is_quick else SECONDS
    for name, record in race_each(context, "nimble", f"{__name__}:race_net", settings, budget_s=budget_s):
        if isinstance(record, MlsysError):
            raise record
        races[name] = {case: Outcome(**fields) for case, fields in record["found"].items()}
    return report(races, num_threads=context.num_threads)


def race_net(model: str, budget_s: float, is_quick: bool, **setup: Any) -> dict[str, dict[str, Any]]:
    """Race all cases on one net in this process; return the fields of the outcomes by case."""
    subject = subject_of(model, **setup)
    with torch.no_grad():
        outcomes = race(
            {
                name: partial(left_out_of_quick if is_quick and name in SLOW_TO_PREPARE else make, subject)
                for name, make in MAKERS.items()
            },
            difference=relative_difference,
            expected=exact_results(subject.net),
            tolerance=TOLERANCE,
            slack=EAGER_TIMES,  # some nets make more of rounding than others
            turn_s=0.1,
            budget_s=budget_s,
            say=lambda step: print(f"{model}: {step}", flush=True),
        )
    return {name: asdict(outcome) for name, outcome in outcomes.items()}


def report(races: Mapping[str, Outcomes], *, num_threads: int) -> Section:
    """Return the tables, and everything as data."""
    body: list[str | Table] = [_table(races), times_table(races, "median ms"), _verdict(races)]
    body += untimed(races)
    return Section("Nimble", body, status=status_of(races, OURS), data=_data(races, num_threads))


def ratios(outcomes: Outcomes) -> tuple[float | None, float | None]:
    """Return how many times faster Nimble is than the best peer, and than eager."""
    peer = fastest(outcomes, PEERS)
    ours = outcomes.get(OURS)
    return speed_up(ours, outcomes.get(peer or "")), speed_up(ours, outcomes.get(EAGER))


def _table(races: Mapping[str, Outcomes]) -> Table:
    """Return a table narrow enough for a terminal; all times are in the next one."""
    rows = []
    for net, outcomes in races.items():
        own = [milliseconds(outcomes.get(name)) for name in (OURS_SINGLE, OURS)]
        over = map(times, ratios(outcomes))
        rows.append([net, milliseconds(outcomes.get(EAGER)), fastest(outcomes, PEERS) or "-", *own, *over])
    columns = ["net", "eager", "best peer", "1 stream", "Nimble", "over peer", "over eager"]
    return Table(columns, rows, "Median milliseconds a call, and how many times faster Nimble is")


def _verdict(races: Mapping[str, Outcomes]) -> str:
    over_peer, over_eager = (geometric_mean(column) for column in zip(*map(ratios, races.values()), strict=True))
    return (
        f"Nimble, geometric means: {times(over_peer)} the best peer's speed, {times(over_eager)} eager's; ratios are "
        f"medians over rounds. Results were compared with float64's first (off by at most {TOLERANCE:g} of the largest "
        f"value, or {EAGER_TIMES:g} times what eager is); a case that differs is not timed."
    )


def _data(races: Mapping[str, Outcomes], num_threads: int) -> dict[str, object]:
    nets: dict[str, Any] = {}
    for net, outcomes in races.items():
        over_peer, over_eager = ratios(outcomes)
        nets[net] = {
            "cases": {name: one.to_json() for name, one in outcomes.items()},
            "best_peer": fastest(outcomes, PEERS),
            "over_best_peer": over_peer,
            "over_eager": over_eager,
        }
    return {"num_threads": num_threads, "tolerance": TOLERANCE, "nets": nets}
