"""The suite ``windtunnel-infer``: exact inference, WindTunnel against its sources and its peers.

Models and rows come from :mod:`.workloads`, cases from :mod:`.cases`; :mod:`.infer_report` makes the report.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.profiling.turns import take_turns

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.race import Case, admit, timed
from mlsys_bench.windtunnel.infer_report import report

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

    from mlsys_bench.harness.race import Outcomes
    from mlsys_bench.windtunnel.cases import Maker, Runner
    from mlsys_bench.windtunnel.workloads import Workload

TOLERANCE = 1e-5  # float32 engines are allowed their rounding; float64 ones are below 1e-12
# One compiles C for minutes, torch's exporter takes seconds a model, and the third has a faster backend.
LEFT_OUT_OF_QUICK = {"tl2cgen", "WindTunnel ONNX", "Hummingbird torch"}


def run(context: BenchContext) -> Section:
    """Run the suite: batches of 1 and 10,000 rows, or 1 and 2,000 with fewer rounds when quick."""
    from mlsys_bench.windtunnel.cases import MAKERS
    from mlsys_bench.windtunnel.workloads import workloads

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
    from mlsys_bench.windtunnel.cases import Subject

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
    import numpy as np

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
    from mlsys_core.config import settings
    from mlsys_core.models import find_entry

    if importlib.util.find_spec("pyarrow") is None:
        return None
    return find_entry("adult").source.locate(settings().cache_dir)
