"""The report of exact inference: how much faster than the source and each rival, and why some were not timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlsys_core.report import Figure, Section, Table

from mlsys_bench.harness.machine import Load
from mlsys_bench.harness.race import Outcome, Outcomes, fastest, speed_up
from mlsys_bench.harness.text import status_of, times, times_table, untimed

REFERENCE = "source"
_OF_TABLES, _OF_COLUMNS = ("WindTunnel", "WindTunnel ONNX"), ("WindTunnel columns",)
_STANDING = {  # the fastest of the former against the fastest of the latter, which take the same containers
    "source": (_OF_TABLES, (REFERENCE, "source, 1 thread", "LightGBM booster")),
    "ONNX Runtime": ((*_OF_TABLES, *_OF_COLUMNS), ("ONNX Runtime",)),
    "Hummingbird": (_OF_TABLES, ("Hummingbird torch", "Hummingbird jit")),
    "treelite": (_OF_TABLES, ("treelite GTIL", "tl2cgen")),
}
_DRAWN = (*_OF_TABLES, *_OF_COLUMNS, "ONNX Runtime", "Hummingbird jit", "treelite GTIL", "tl2cgen")

Races = Mapping[str, Mapping[int, Outcomes]]  # by model, then by rows a call


def report(races: Races, *, num_threads: int, rounds: int, tolerance: float, load: Load) -> Section:
    """Return WindTunnel's standing, then a table and a figure for each number of rows, and all figures as data."""
    batches = list(next(iter(races.values())))
    by_batch = {batch: {model: outcomes[batch] for model, outcomes in races.items()} for batch in batches}
    body: list[str | Table | Figure] = [
        f"Seconds a call of predict_proba on rows that the model has not seen, threads of each: {num_threads}; medians "
        f"of {rounds} rounds in turns. Timed only if probabilities agree within {tolerance:g}. Rows are in each "
        "engine's own dtype and container before the clock starts.",
        str(load),
        _standing(races, batches),
    ]
    for batch, models in by_batch.items():
        body.append(times_table(models, "model", f"Median milliseconds of a call, {_rows(batch)}"))
        body.append(Figure(_figure(models), f"Speed-up over the source, {_rows(batch)} a call"))
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


def _figure(models: Mapping[str, Outcomes]) -> str:
    from mlsys_core import plot

    from mlsys_bench.harness import plots

    took_part = {name for outcomes in models.values() for name, one in outcomes.items() if one.turns_s}
    drawn = [name for name in (REFERENCE, *_DRAWN) if name in took_part]
    groups = {
        model.replace(", ", "\n"): {name: outcomes[name].median_s if name in outcomes else None for name in drawn}
        for model, outcomes in models.items()
        if outcomes[REFERENCE].turns_s
    }
    return (
        plot.to_svg(plots.bars(groups, baseline=REFERENCE)) if groups else "<svg xmlns='http://www.w3.org/2000/svg'/>"
    )


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
