"""The report: a table for each of the dissertation's, figures, and which cells are missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.experiments.plan import Result, Row, Setting, results_of, rows_of
from mlsys_bench.windtunnel.experiments.run import best_of, counter

TITLES = {
    "5.3": "source pipelines and WindTunnel (table 5.3)",
    "5.4": "scope of translation: the source, trees alone (GBDT2NN), the whole pipeline (table 5.4)",
    "5.5": "cold and warm start, each with its best rate (table 5.5)",
    "5.6": "levels and shares of the training rows (table 5.6)",
    "nearby": "columns that count training rows nearby",
    "outside": "models that are no translation",
    "ratings": "factorisations on MovieLens-100k",
}


def report(
    tables: Sequence[str],
    datasets: Sequence[str],
    seeds: Sequence[int],
    finished: Mapping[str, Result],
    setting: Setting,
    *,
    absent: Mapping[str, str],
) -> Section:
    """Make all tables of the finished cells.

    Args:
        tables: See :func:`~.plan.rows_of`.
        datasets: Likewise.
        seeds: Over which means and standard errors are taken; those not yet run are left out, and counted.
        finished: The journal.
        setting: Setting of the run.
        absent: Models whose package is not installed.
    """
    body: list[str | Table] = [*_method(setting, seeds)]
    rows = {table: rows_of(table, datasets) for table in tables}
    done = {row: results_of(row, seeds, finished, counter(setting)) for part in rows.values() for row in part}
    body += [_table(table, part, done, len(seeds)) for table, part in rows.items() if part]
    for model, package in absent.items():
        body.append(f"{model} is not installed (pip install {package}): its cells were not run.")
    missing = sum(len(seeds) - len(results) for results in done.values())
    if missing:
        body.append(f"{missing} of {len(done) * len(seeds)} cells (rows times seeds) have not been run.")
    data = {
        "setting": asdict(setting),
        "seeds": list(seeds),
        "rows": [
            asdict(row) | {"mean": mean, "standard_error": error, "seeds_run": sorted(results)}
            for row, results in done.items()
            if results
            for mean, error in [best_of(results)]
        ],
        "cells": [asdict(result) for results in done.values() for result in results.values()],
    }
    return Section("WindTunnel: the experiments of section 5.4", body, data=json.loads(json.dumps(data)))


def _method(setting: Setting, seeds: Sequence[int]) -> Iterator[str]:
    sizes = setting.sizes
    counts = ", ".join(
        f"{'all' if size is None else f'{size:,}'} {name}"
        for name, size in (("training", sizes.train), ("validation", sizes.valid), ("test", sizes.test))
    )
    yield (
        f"AUC on test rows (the root of the mean squared error for ratings), mean and standard error over up to "
        f"{len(seeds)} seeds. flights-3m: {counts} rows; whether a flight is late is predicted from what is known at "
        f"take-off. Everybody gets the same rows, up to three candidates of options of which the first seed's "
        f"validation chooses, and networks {setting.epochs} epochs. Sources have {setting.num_trees} trees."
    )


def _table(table: str, rows: Sequence[Row], done: Mapping[Row, Mapping[int, Result]], num_seeds: int) -> Table:
    lines = []
    for row in rows:
        results = done[row]
        change = _change(row, rows, done)
        lines.append([row.dataset, row.pre, row.pipe, row.model, f"{row.fraction:.0%}", *_score(results), change])
    columns = ["data", "columns", "model", "row", "rows", "test", "s.e.", "seeds", "over source"]
    caption = f"Of {num_seeds} seeds: {TITLES[table]}"
    return Table(columns, lines, caption=caption)


def _score(results: Mapping[int, Result]) -> list[str]:
    if not results:
        return ["not run", "", "0"]
    mean, error = best_of(results)
    return [f"{mean:.4f}", "" if error is None else f"{error:.4f}", str(len(results))]


def _change(row: Row, rows: Sequence[Row], done: Mapping[Row, Mapping[int, Result]]) -> str:
    """Return the mean difference from the source with the same seeds, and the number of seeds below it."""
    base = next(
        (
            done[other]
            for other in rows
            if other.model == "source" and _setting(other) == _setting(row) and other != row
        ),
        {},
    )
    pairs = [(result.test, base[seed].test) for seed, result in done[row].items() if seed in base]
    if not pairs:
        return ""
    sign = -1 if row.dataset == "movielens-100k" else 1
    below = sum(sign * own < sign * other for own, other in pairs)
    mean = sum(own - other for own, other in pairs) / len(pairs)
    return f"{mean:+.4f}" + (f", worse on {below}" if below else "")


def _setting(row: Row) -> tuple[str, str, str, float]:
    return row.dataset, row.pre, row.pipe, row.fraction
