"""``mlsys bench windtunnel-infer``: exact inference, WindTunnel against its sources and its peers.

Models and rows come from :mod:`.workloads`, contestants from :mod:`.contestants`; :mod:`.race` compares and times;
here the outcomes become a report.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Figure, Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

    from mlsys_windtunnel.bench.race import Outcome
    from mlsys_windtunnel.bench.workloads import Workload

TOLERANCE = 1e-5  # float32 engines are allowed their rounding; float64 ones are below 1e-12
LEFT_OUT_OF_QUICK = {"tl2cgen", "Hummingbird torch"}  # one compiles C for minutes, the other has a faster backend
_DRAWN = ("source", "WindTunnel", "WindTunnel ONNX", "ONNX Runtime", "Hummingbird jit", "treelite GTIL", "tl2cgen")
_LOADED = (
    ": the machine had other work. Read the ratios, not the times; with several threads, engines that wait for all of "
    "theirs (OpenMP) lose whole time slices of the scheduler, which swells the ratios too."
)
_REQUIREMENTS = "benchmarks/peers/windtunnel/requirements.txt"


def run(context: BenchContext) -> Section:
    """The suite: batches of 1 and 10,000 rows, or 1 and 2,000 with fewer rounds when quick."""
    from mlsys_windtunnel.bench.workloads import workloads

    batches = (1, 2_000 if context.is_quick else 10_000)
    rounds, turn_s = (3, 0.01) if context.is_quick else (7, 0.03)
    loads = [os.getloadavg()[0]]
    outcomes: dict[str, dict[str, Outcome]] = {}
    with _threads(context.num_threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.console.print("fitting the models ...")
        for workload in workloads(
            batches[-1], num_threads=context.num_threads, adult=None if context.is_quick else _adult()
        ):
            context.console.print(f"{workload.name} ...")
            outcomes[workload.name] = race_on(workload, context, batches=batches, rounds=rounds, turn_s=turn_s)
    loads.append(os.getloadavg()[0])
    return report(outcomes, batches=batches, rounds=rounds, num_threads=context.num_threads, loads=loads)


def race_on(
    workload: Workload, context: BenchContext, *, batches: tuple[int, ...], rounds: int, turn_s: float
) -> dict[str, Outcome]:
    """All contestants on one model."""
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


def report(
    outcomes: Mapping[str, Mapping[str, Outcome]],
    *,
    batches: Sequence[int],
    rounds: int,
    num_threads: int,
    loads: Sequence[float],
) -> Section:
    """The page's section: a table and a figure for each batch size, and why some were not timed.

    Args:
        outcomes: By model, then by contestant.
        batches: Rows a call.
        rounds: Of turns.
        num_threads: Of each contestant.
        loads: The machine's load average of one minute before and after.
    """
    from mlsys_windtunnel.bench.contestants import REFERENCE

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_loaded = max(loads) > cores + 0.5
    method = (
        f"Seconds a call of predict_proba on rows that the model has not seen, threads of each: {num_threads}; medians "
        "of "
        f"{rounds} rounds in which the contestants take turns; x is the source's median over the contestant's, so "
        f"above 1 is faster than the source. Timed only if probabilities agree within {TOLERANCE:g}. Rows are in each "
        "engine's own dtype and container before the clock starts."
    )
    load = f"Load average {loads[0]:.1f} before and {loads[-1]:.1f} after on {cores} cores" + (
        _LOADED if is_loaded else "."
    )
    body: list[str | Table | Figure] = [method, load]
    body += [_table(model, of_model, batches, REFERENCE) for model, of_model in outcomes.items()]
    for batch in batches:
        body.append(
            Figure(
                _figure(outcomes, batch, REFERENCE),
                caption=f"Speed-up over the source, {_rows(batch)} a call; missing: not timed, see the table",
            )
        )
    body += _notes(outcomes)
    is_wrong = any(
        outcome.status != "timed" and outcome.status not in ("not installed", "does not apply")
        for of_model in outcomes.values()
        for name, outcome in of_model.items()
        if name.startswith(("source", "WindTunnel"))
    )
    data = {
        "num_threads": num_threads,
        "rounds": rounds,
        "tolerance": TOLERANCE,
        "load_average": list(loads),
        "is_loaded": is_loaded,
        "models": {
            model: {name: _record(outcome) for name, outcome in of_model.items()}
            for model, of_model in outcomes.items()
        },
    }
    return Section("WindTunnel: exact inference", body, status="failed" if is_wrong else "ok", data=data)


def _table(model: str, of_model: Mapping[str, Outcome], batches: Sequence[int], reference: str) -> Table:
    columns = ["contestant", *(text for batch in batches for text in (_rows(batch), "x")), "difference", ""]
    base = of_model[reference]
    rows = []
    for name, outcome in of_model.items():
        if outcome.status == "does not apply":
            continue
        times = [text for batch in batches for text in _times(outcome.median_s(batch), base.median_s(batch))]
        difference = "-" if outcome.difference is None else f"{outcome.difference:.1e}"
        rows.append([name, *times, difference, outcome.note if outcome.status == "timed" else outcome.status])
    return Table(columns, rows, caption=model)


def _times(own_s: float | None, base_s: float | None) -> tuple[str, str]:
    """A time, and how many times faster than the source that is."""
    if own_s is None or base_s is None:
        return "-", "-"
    ratio = base_s / own_s
    return _duration(own_s), f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch:,} rows"


def _duration(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> _duration(0.000123), _duration(0.0456)
        ('123 us', '45.6 ms')
    """
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def _figure(outcomes: Mapping[str, Mapping[str, Outcome]], batch: int, reference: str) -> str:
    from mlsys_core import plot

    took_part = {name for of_model in outcomes.values() for name, outcome in of_model.items() if outcome.samples_s}
    drawn = [name for name in _DRAWN if name in took_part]
    groups = {
        model.replace(", ", "\n"): {
            name: of_model[name].median_s(batch) if name in of_model else None for name in drawn
        }
        for model, of_model in outcomes.items()
        if of_model[reference].samples_s
    }
    return plot.to_svg(plot.bars(groups, baseline=reference)) if groups else "<svg xmlns='http://www.w3.org/2000/svg'/>"


def _notes(outcomes: Mapping[str, Mapping[str, Outcome]]) -> Iterator[str]:
    """One line for each way in which a contestant was not timed."""
    models: dict[tuple[str, str], list[str]] = {}
    for model, of_model in outcomes.items():
        for name, outcome in of_model.items():
            if outcome.status not in ("timed", "does not apply"):
                models.setdefault((name, f"{outcome.status}: {outcome.note}"), []).append(model)
    for (name, reason), where in models.items():
        hint = f"; pip install -r {_REQUIREMENTS}" if reason.startswith("not installed") else ""
        yield f"{name}, {reason}{hint} ({'; '.join(where)})"


def _record(outcome: Outcome) -> dict[str, Any]:
    batches = outcome.samples_s or {}
    return {
        "status": outcome.status,
        "note": outcome.note,
        "max_difference": outcome.difference,
        "median_s": {str(batch): outcome.median_s(batch) for batch in batches},
        "samples_s": {str(batch): list(samples) for batch, samples in batches.items()},
    }


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """The same number for torch, OpenMP and BLAS within the context; the former ones come back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with importlib.import_module("threadpoolctl").threadpool_limits(num_threads):  # it has no types
            yield
    finally:
        torch.set_num_threads(before)


def _adult() -> Path | None:
    """The census table, where it and a reader of its format are installed."""
    from mlsys_core.config import settings
    from mlsys_core.models import find_entry

    if importlib.util.find_spec("pyarrow") is None:
        return None
    return find_entry("adult").source.locate(settings().cache_dir)
