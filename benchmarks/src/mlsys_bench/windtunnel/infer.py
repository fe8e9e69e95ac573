"""The suite ``windtunnel-infer``: exact inference, WindTunnel against its sources and its peers.

Models and rows come from :mod:`.workloads`, cases from :mod:`.cases`.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.config import settings
from mlsys_core.models import find_entry
from mlsys_core.profiling.turns import take_turns
from mlsys_core.report import Section, Table

from mlsys_bench.harness.machine import Load, LoadMeter
from mlsys_bench.harness.race import Case, Outcome, Outcomes, admit, fastest, speed_up, timed
from mlsys_bench.harness.text import status_of, times, times_table, untimed
from mlsys_bench.windtunnel.cases import MAKERS, REFERENCE, Maker, Runner, Subject
from mlsys_bench.windtunnel.workloads import Workload, workloads

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

_OF_TABLES, _OF_COLUMNS = ("WindTunnel", "WindTunnel ONNX"), ("WindTunnel columns",)
_STANDING = {  # the fastest of the former against the fastest of the latter, which take the same containers
    "source": (_OF_TABLES, (REFERENCE, "source, 1 thread", "LightGBM booster")),
    "ONNX Runtime": ((*_OF_TABLES, *_OF_COLUMNS), ("ONNX Runtime",)),
    "Hummingbird": (_OF_TABLES, ("Hummingbird torch", "Hummingbird jit")),
    "treelite": (_OF_TABLES, ("treelite GTIL", "tl2cgen")),
}

Races = Mapping[str, Mapping[int, Outcomes]]  # by model, then by rows a call


def report(races: Races, *, num_threads: int, rounds: int, tolerance: float, load: Load) -> Section:
    """Return WindTunnel's standing, then a table and a figure for each number of rows, and all figures as data."""
    batches = list(next(iter(races.values())))
    by_batch = {batch: {model: outcomes[batch] for model, outcomes in races.items()} for batch in batches}
    body: list[str | Table] = [
        f"Seconds a call of predict_proba on rows that the model has not seen, threads of each: {num_threads}; medians "
        f"of {rounds} rounds in turns. Timed only if probabilities agree within {tolerance:g}. Rows are in each "
        "engine's own dtype and container before the clock starts.",
        str(load),
        _standing(races, batches),
    ]
    for batch, models in by_batch.items():
        body.append(times_table(models, "model", f"Median milliseconds of a call, {_rows(batch)}"))
    told = {model: _without_left_out(outcomes) for model, outcomes in by_batch[batches[0]].items()}
    body += untimed(told)
    status = status_of(told, "WindTunnel", ("differs", "does not run"))
    data = {
        "num_threads": num_threads,
        "rounds": rounds,
        "tolerance": tolerance,
        "load_average": load.load_average,
        "share_of_others": load.share_of_others,
        "models": {model: dict(_records(outcomes)) for model, outcomes in races.items()},
    }
    return Section("WindTunnel: exact inference", body, status=status, data=data)


def _without_left_out(outcomes: Outcomes) -> dict[str, Outcome]:
    """Return the outcomes with the hint how to install peers, less those that do not apply."""
    hint = "; pip install -r benchmarks/peers/windtunnel/requirements.txt"
    return {
        name: replace(one, note=one.note + hint) if one.status == "not installed" else one
        for name, one in outcomes.items()
        if one.status != "left out"
    }


def _standing(races: Races, batches: Sequence[int]) -> Table:
    """Return the table of WindTunnel's speed-up over each rival, each side by its fastest case."""
    rows = [
        [model, *(times(_lead(found[batch], *sides)) for sides in _STANDING.values() for batch in batches)]
        for model, found in races.items()
    ]
    columns = ["model", *(f"{rival} {batch:,}" for rival in _STANDING for batch in batches)]
    return Table(columns, rows, "How many times faster our best is than the best of each rival, by rows a call")


def _lead(outcomes: Outcomes, own: tuple[str, ...], rivals: tuple[str, ...]) -> float | None:
    best, rival = (outcomes.get(fastest(outcomes, names) or "") for names in (own, rivals))
    return speed_up(best, rival)


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch:,} rows"


def _records(by_batch: Mapping[int, Outcomes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, first in next(iter(by_batch.values())).items():
        yield (
            name,
            {
                "status": first.status,
                "note": first.note,
                "max_difference": first.difference,
                "median_s": {str(batch): found[name].median_s for batch, found in by_batch.items() if first.turns_s},
                "speed_up": {
                    str(batch): speed_up(found[name], found[REFERENCE])
                    for batch, found in by_batch.items()
                    if first.turns_s
                },
            },
        )


TOLERANCE = 1e-5  # float32 engines are allowed their rounding; float64 ones are below 1e-12
# One compiles C for minutes, torch's exporter takes seconds a model, and the third has a faster backend.
LEFT_OUT_OF_QUICK = {"tl2cgen", "WindTunnel ONNX", "Hummingbird torch"}


def run(context: BenchContext) -> Section:
    """Run the suite: batches of 1 and 10,000 rows, or 1 and 2,000 with fewer rounds when quick."""
    batches = (1, 2_000 if context.is_quick else 10_000)
    rounds, turn_s = (3, 0.01) if context.is_quick else (7, 0.03)
    makers = {name: make for name, make in MAKERS.items() if not (context.is_quick and name in LEFT_OUT_OF_QUICK)}
    races: dict[str, dict[int, Outcomes]] = {}
    with LoadMeter() as meter, _threads(context.num_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.console.print("fitting the models ...")
        adult = None if context.is_quick else _adult()
        for workload in workloads(batches[-1], num_threads=context.num_threads, adult=adult):
            context.console.print(f"{workload.name} ...")
            races[workload.name] = race_on(
                workload, makers, context.num_threads, batches=batches, rounds=rounds, turn_s=turn_s
            )
    return report(races, num_threads=context.num_threads, rounds=rounds, tolerance=TOLERANCE, load=meter.load)


def race_on(
    workload: Workload,
    makers: dict[str, Maker],
    num_threads: int,
    *,
    batches: tuple[int, ...],
    rounds: int,
    turn_s: float,
) -> dict[int, Outcomes]:
    """Race on one model: all rows are compared, then batches of them timed; return outcomes by rows a call."""
    runners: dict[str, Runner] = {}

    def ready(name: str, make: Maker, folder: Path) -> Case:
        runner = runners[name] = make(Subject(workload, num_threads, folder))
        rows = runner.prepare(workload.table)
        return Case(lambda: runner.answer(rows), runner.finish, runner.note)

    expected = workload.source.predict_proba(workload.table)[:, -1]
    with tempfile.TemporaryDirectory() as folder:
        bound = {name: partial(ready, name, make, Path(folder)) for name, make in makers.items()}
        admitted, cases = admit(bound, difference=difference, expected=expected, tolerance=TOLERANCE)
        calls = {
            f"{batch} {name}": partial(runners[name].answer, runners[name].prepare(workload.table[:batch]))
            for name in cases
            for batch in batches
        }
        turns = take_turns(calls, turn_s=turn_s, num_rounds=rounds)
    return {
        batch: {
            name: timed(outcome, turns[f"{batch} {name}"]) if name in cases else outcome
            for name, outcome in admitted.items()
        }
        for batch in batches
    }


def difference(result: Any, expected: Any) -> float:
    """Return the largest difference of the last class's probabilities; not a number is infinitely far."""
    got = np.asarray(result, np.float64).reshape(len(expected), -1)[:, -1]
    found = float(np.abs(got - expected).max())
    return float("inf") if np.isnan(found) else found


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Set one number of threads for torch, OpenMP and BLAS within the context; restore the former ones after it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with importlib.import_module("threadpoolctl").threadpool_limits(num_threads):  # it has no types
            yield
    finally:
        torch.set_num_threads(before)


def _adult() -> Path | None:
    """Return the path of the census table, or None where it or a reader of its format is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return None
    return find_entry("adult").source.locate(settings().cache_dir)
