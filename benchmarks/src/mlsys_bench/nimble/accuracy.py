"""Races of forms of a net that lose accuracy: errors beside speed, and their report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from mlsys_core.errors import MlsysError
from mlsys_core.profiling.turns import take_turns
from mlsys_core.report import Section, Table
from mlsys_nimble.nets.blocks import Net
from torch import Tensor

from mlsys_bench.harness.race import Case, Outcome, Outcomes, admit, fastest, speed_up, timed
from mlsys_bench.harness.text import geometric_mean, milliseconds, status_of, times, untimed
from mlsys_bench.nimble import OURS
from mlsys_bench.nimble.cases import Subject
from mlsys_bench.nimble.races import exact_results, race_each, race_settings

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

FLOAT = "float32"
SECONDS, QUICK_SECONDS = 40.0, 8.0  # of turns for each net
QUICK_NETS = ("mobilenet-v2", "minilm-l6")
NUM_HELD_OUT = 16  # inputs; a quarter in quick runs
FLOAT_TOLERANCE, TOLERANCE = 1e-3, 0.5  # root mean square from float64's results over theirs; others: no other net

Inputs: TypeAlias = tuple[Tensor, ...]
Function: TypeAlias = Callable[..., Sequence[Any]]  # of a net's inputs; gives its results as a flat list
Accuracy: TypeAlias = dict[str, dict[str, Any]]  # by case


@dataclass(frozen=True, slots=True)
class Forms:
    """Names of the cases that such a race compares; those of float32 end with :data:`FLOAT`."""

    suite: str
    what: str  # "in int8"
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    beside: str  # results that errors are measured from


def race_forms(
    context: BenchContext, forms: Forms, function: str, nets: tuple[str, ...], peers: str | None, trust_code: bool
) -> Section:
    """Race on each net and report; results are written after each net. A run that was cut goes on.

    Args:
        context: The suite's context.
        forms: The cases.
        function: ``module:function`` that races on one net and returns what :func:`race_net` does.
        nets: As for the suite ``nimble``.
        peers: As for the suite ``nimble``.
        trust_code: As for the suite ``nimble``.

    Raises:
        InvalidInputError: ``peers`` has no Python, a net is not there, or the journal is of another setting.
    """
    from mlsys_core.bench import write_results  # not at the top: the peers' environment has no pluggy

    settings = race_settings(context, nets, peers, trust_code)
    budget_s = QUICK_SECONDS if context.is_quick else SECONDS
    races: dict[str, Outcomes] = {}
    accuracy: dict[str, Accuracy] = {}
    loads: dict[str, str] = {}
    for name, record in race_each(context, forms.suite, function, settings, budget_s=budget_s):
        if isinstance(record, MlsysError):
            races[name], accuracy[name] = {forms.ours[0]: Outcome("does not run", str(record))}, {}
            continue
        found = record["found"]
        races[name] = {case: Outcome(**fields) for case, fields in found["outcomes"].items()}
        accuracy[name], loads[name] = found["accuracy"], record["load"]
        write_results(forms.suite, report(forms, races, accuracy, context.num_threads, loads), context)
    return report(forms, races, accuracy, context.num_threads, loads)


def race_net(
    model: str,
    subject: Subject,
    names: Sequence[str],
    make: Callable[[str], Function],
    *,
    measure: Callable[[Mapping[str, Function], Sequence[str]], Accuracy],
    budget_s: float,
) -> dict[str, dict[str, Any]]:
    """Race on one net in this process; return by case the fields of the ``outcomes`` and the ``accuracy``.

    Args:
        model: The net's name.
        subject: The net.
        names: The cases.
        make: Makes the function of a case's name.
        measure: Measures the cases of the given names, which are not float32, among all functions.
        budget_s: Seconds of turns.
    """
    functions: dict[str, Function] = {}
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, Case] = {}

    def maker(name: str) -> Callable[[], Case]:
        def ready_case() -> Case:
            function = functions[name] = make(name)
            return Case(lambda: function(*subject.net.inputs), list)

        return ready_case

    with torch.no_grad():
        expected = exact_results(subject.net)
        for tolerance, is_float in ((FLOAT_TOLERANCE, True), (TOLERANCE, False)):
            found, own = admit(
                {name: maker(name) for name in names if name.endswith(FLOAT) == is_float},
                difference=distance,
                expected=expected,
                tolerance=tolerance,
                say=lambda step: print(f"{model}: {step}", flush=True),
            )
            outcomes, ready = outcomes | found, ready | own
        print(f"{model}: accuracy", flush=True)
        accuracy = measure(functions, [name for name in ready if not name.endswith(FLOAT)])
        print(f"{model}: {len(ready)} cases in turns", flush=True)
        turns = take_turns({name: case.call for name, case in ready.items()}, turn_s=0.1, budget_s=budget_s)
    outcomes |= {name: timed(outcomes[name], own_turns) for name, own_turns in turns.items()}
    return {"outcomes": {name: asdict(one) for name, one in outcomes.items()}, "accuracy": accuracy}


def drawn(net: Net, count: int, seed: int) -> list[Inputs]:
    """Return inputs like the example's: normal numbers, or ids below the largest one; masks of ones stay."""
    draw = torch.Generator().manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=draw)
        most = int(x.max())
        return x if bool((x == most).all()) else torch.randint(0, most + 1, x.shape, generator=draw, dtype=x.dtype)

    return [tuple(like(x) for x in net.inputs) for _ in range(count)]


def errors(pairs: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> dict[str, float]:
    """Return how far a form's first results are from float's.

    ``max_error`` is over the largest value, ``mean_error`` over the mean absolute value; ``top1`` is the share of rows
    whose largest entry is the same.
    """
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
    found = [torch.as_tensor(result).double() for result in results]
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    return max(float((a - b).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True))


def ratios(outcomes: Outcomes, forms: Forms) -> dict[str, float | None]:
    """Return the time of the fastest peer's form over ours, by our form."""
    peer = outcomes.get(fastest(outcomes, forms.peers) or "")
    return {form: speed_up(outcomes[form], peer) for form in forms.ours if form in outcomes}


def report(
    forms: Forms,
    races: Mapping[str, Outcomes],
    accuracy: Mapping[str, Mapping[str, Any]],
    num_threads: int,
    loads: Mapping[str, str],
) -> Section:
    """Return the races with the losses first, each case's accuracy, and all figures as data."""
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
