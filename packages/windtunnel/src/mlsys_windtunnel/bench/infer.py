"""``mlsys bench windtunnel-infer``: exact inference, WindTunnel against its sources and its peers.

Models and rows come from :mod:`.workloads`, contestants from :mod:`.contestants`; :mod:`.race` compares and times;
:mod:`.outcome_report` makes a report of the outcomes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_windtunnel.bench.machine import cpu_times, share_of_others
from mlsys_windtunnel.bench.outcome_report import Conditions, report

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

    from mlsys_windtunnel.bench.race import Outcome
    from mlsys_windtunnel.bench.workloads import Workload

TOLERANCE = 1e-5  # float32 engines are allowed their rounding; float64 ones are below 1e-12
# One compiles C for minutes, torch's exporter takes seconds a model, and the third has a faster backend.
LEFT_OUT_OF_QUICK = {"tl2cgen", "WindTunnel ONNX", "Hummingbird torch"}


def run(context: BenchContext) -> Section:
    """Run the suite: batches of 1 and 10,000 rows, or 1 and 2,000 with fewer rounds when quick."""
    from mlsys_windtunnel.bench.workloads import workloads

    batches = (1, 2_000 if context.is_quick else 10_000)
    rounds, turn_s = (3, 0.01) if context.is_quick else (7, 0.03)
    before, load_before = cpu_times(), os.getloadavg()[0]
    outcomes: dict[str, dict[str, Outcome]] = {}
    with _threads(context.num_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.console.print("fitting the models ...")
        for workload in workloads(
            batches[-1], num_threads=context.num_threads, adult=None if context.is_quick else _adult()
        ):
            context.console.print(f"{workload.name} ...")
            outcomes[workload.name] = race_on(workload, context, batches=batches, rounds=rounds, turn_s=turn_s)
    conditions = Conditions(
        num_threads=context.num_threads,
        rounds=rounds,
        tolerance=TOLERANCE,
        load_average=(load_before, os.getloadavg()[0]),
        share_of_others=share_of_others(before, cpu_times()),
    )
    return report(outcomes, batches=batches, conditions=conditions)


def race_on(
    workload: Workload, context: BenchContext, *, batches: tuple[int, ...], rounds: int, turn_s: float
) -> dict[str, Outcome]:
    """Run all contestants on one model."""
    from mlsys_windtunnel.bench.contestants import MAKERS, Bout
    from mlsys_windtunnel.bench.race import race

    makers = {name: make for name, make in MAKERS.items() if not (context.is_quick and name in LEFT_OUT_OF_QUICK)}
    expected = workload.source.predict_proba(workload.table)[:, -1]
    with tempfile.TemporaryDirectory() as folder:
        builders = {
            name: partial(make, Bout(workload, context.num_threads, Path(folder))) for name, make in makers.items()
        }
        return race(
            builders, workload.table, expected, batches=batches, rounds=rounds, turn_s=turn_s, tolerance=TOLERANCE
        )


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
