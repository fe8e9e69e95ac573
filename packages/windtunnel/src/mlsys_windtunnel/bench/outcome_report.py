"""The report of a race: who was how much faster than the source and than whom, and why some were not timed."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.report import Figure, Section, Table

if TYPE_CHECKING:
    from mlsys_windtunnel.bench.race import Outcome

REFERENCE = "source"
_OF_TABLES, _OF_COLUMNS = ("WindTunnel", "WindTunnel ONNX"), ("WindTunnel columns",)
_STANDING = {  # the fastest of the former against the fastest of the latter, which take the same containers
    "source": (_OF_TABLES, (REFERENCE, "source, 1 thread", "LightGBM booster")),
    "ONNX Runtime": ((*_OF_TABLES, *_OF_COLUMNS), ("ONNX Runtime",)),
    "Hummingbird": (_OF_TABLES, ("Hummingbird torch", "Hummingbird jit")),
    "treelite": (_OF_TABLES, ("treelite GTIL", "tl2cgen")),
}
_DRAWN = (*_OF_TABLES, *_OF_COLUMNS, "ONNX Runtime", "Hummingbird jit", "treelite GTIL", "tl2cgen")
_LOADED = (
    " The machine had other work: read the ratios, not the times. With several threads, engines that wait for all of "
    "theirs (OpenMP) lose whole time slices of the scheduler, which swells the ratios too."
)
_REQUIREMENTS = "benchmarks/peers/windtunnel/requirements.txt"

Outcomes = Mapping[str, Mapping[str, "Outcome"]]  # by model, then by contestant


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions under which a race was run."""

    num_threads: int  # of each contestant
    rounds: int
    tolerance: float  # of probabilities, to be timed
    load_average: tuple[float, float]  # of one minute, before and after
    share_of_others: float | None  # of the machine's time, 0 to 1

    @property
    def cores(self) -> int:
        """Number of the machine's cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def is_loaded(self) -> bool:
        """True where others took part of the processor time that the contestants wanted."""
        if self.share_of_others is None:
            return max(self.load_average) > self.cores + 0.5
        return self.share_of_others > 0.1


def report(outcomes: Outcomes, *, batches: Sequence[int], conditions: Conditions) -> Section:
    """Make the page's section: where WindTunnel stands, then a table for each model and a figure for each batch size.

    Args:
        outcomes: By model, then by contestant.
        batches: Rows a call.
        conditions: Under which they were measured.
    """
    body: list[str | Table | Figure] = [*_method(conditions), _standing(outcomes, batches)]
    body += [_table(model, of_model, batches) for model, of_model in outcomes.items()]
    for batch in batches:
        caption = f"Speed-up over the source, {_rows(batch)} a call; missing: not timed, see the table"
        body.append(Figure(_figure(outcomes, batch), caption=caption))
    body += _notes(outcomes)
    is_wrong = any(
        outcome.status != "timed" and outcome.status not in ("not installed", "does not apply")
        for of_model in outcomes.values()
        for name, outcome in of_model.items()
        if name.startswith(("source", "WindTunnel"))
    )
    data = {
        **asdict(conditions),
        "is_loaded": conditions.is_loaded,
        "models": {
            model: {name: _record(outcome, of_model[REFERENCE]) for name, outcome in of_model.items()}
            for model, of_model in outcomes.items()
        },
    }
    return Section("WindTunnel: exact inference", body, status="failed" if is_wrong else "ok", data=data)


def speed_up(outcome: Outcome, base: Outcome, batch: int) -> float | None:
    """Return the speed-up over ``base``: the median over rounds of the ratio within a round; None if not timed."""
    if outcome.samples_s is None or base.samples_s is None:
        return None
    pairs = zip(base.samples_s[batch], outcome.samples_s[batch], strict=True)
    return statistics.median(base_s / own_s for base_s, own_s in pairs)


def _method(conditions: Conditions) -> Iterator[str]:
    yield (
        f"Seconds a call of predict_proba on rows that the model has not seen, threads of each: "
        f"{conditions.num_threads}; medians of {conditions.rounds} rounds in which contestants take turns. x is the "
        "median of the source's time over the contestant's in one round: above 1 is faster than the source. "
        f"Timed only if probabilities agree within {conditions.tolerance:g}. Rows are in each engine's own dtype and "
        "container before the clock starts."
    )
    first, last = conditions.load_average
    load = f"Load average {first:.1f} before and {last:.1f} after on {conditions.cores} cores"
    if conditions.share_of_others is not None:
        load += f"; other processes used {conditions.share_of_others:.0%} of the machine"
    yield load + "." + (_LOADED if conditions.is_loaded else "")


def _standing(outcomes: Outcomes, batches: Sequence[int]) -> Table:
    """Make the table of WindTunnel's speed-up over each rival, each side by its fastest contestant."""
    rows = [
        [model, *(_ratio(_lead(of_model, *sides, batch)) for sides in _STANDING.values() for batch in batches)]
        for model, of_model in outcomes.items()
    ]
    columns = ["model", *(f"{rival} {batch:,}" for rival in _STANDING for batch in batches)]
    caption = "How many times faster WindTunnel's best is than the best of each rival, at so many rows a call"
    return Table(columns, rows, caption=caption)


def _lead(of_model: Mapping[str, Outcome], own: Sequence[str], rivals: Sequence[str], batch: int) -> float | None:
    best, rival = (_fastest(of_model, names, batch) for names in (own, rivals))
    return None if best is None or rival is None else speed_up(best, rival, batch)


def _fastest(of_model: Mapping[str, Outcome], names: Sequence[str], batch: int) -> Outcome | None:
    timed = [of_model[name] for name in names if name in of_model and of_model[name].samples_s]
    return min(timed, key=lambda outcome: outcome.median_s(batch) or 0.0, default=None)


def _table(model: str, of_model: Mapping[str, Outcome], batches: Sequence[int]) -> Table:
    columns = ["contestant", *(text for batch in batches for text in (_rows(batch), "x")), "difference", ""]
    base = of_model[REFERENCE]
    rows = []
    for name, outcome in of_model.items():
        if outcome.status == "does not apply":
            continue
        times = [
            text
            for batch in batches
            for text in (_duration(outcome.median_s(batch)), _ratio(speed_up(outcome, base, batch)))
        ]
        difference = "-" if outcome.difference is None else f"{outcome.difference:.1e}"
        rows.append([name, *times, difference, outcome.note if outcome.status == "timed" else outcome.status])
    return Table(columns, rows, caption=model)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch:,} rows"


def _duration(seconds: float | None) -> str:
    """Format a duration with three digits and a unit.

    Example:
        >>> _duration(0.000123), _duration(0.0456)
        ('123 us', '45.6 ms')
    """
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def _figure(outcomes: Outcomes, batch: int) -> str:
    from mlsys_core import plot

    took_part = {name for of_model in outcomes.values() for name, outcome in of_model.items() if outcome.samples_s}
    drawn = [name for name in (REFERENCE, *_DRAWN) if name in took_part]
    groups = {
        model.replace(", ", "\n"): {
            name: of_model[name].median_s(batch) if name in of_model else None for name in drawn
        }
        for model, of_model in outcomes.items()
        if of_model[REFERENCE].samples_s
    }
    return plot.to_svg(plot.bars(groups, baseline=REFERENCE)) if groups else "<svg xmlns='http://www.w3.org/2000/svg'/>"


def _notes(outcomes: Outcomes) -> Iterator[str]:
    """Yield one line for each way in which a contestant was not timed."""
    models: dict[tuple[str, str], list[str]] = {}
    for model, of_model in outcomes.items():
        for name, outcome in of_model.items():
            if outcome.status not in ("timed", "does not apply"):
                models.setdefault((name, f"{outcome.status}: {outcome.note}"), []).append(model)
    for (name, reason), where in models.items():
        hint = f"; pip install -r {_REQUIREMENTS}" if reason.startswith("not installed") else ""
        yield f"{name}, {reason}{hint} ({'; '.join(where)})"


def _record(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    batches = outcome.samples_s or {}
    return {
        "status": outcome.status,
        "note": outcome.note,
        "max_difference": outcome.difference,
        "median_s": {str(batch): outcome.median_s(batch) for batch in batches},
        "speed_up": {str(batch): speed_up(outcome, base, batch) for batch in batches},
        "samples_s": {str(batch): list(samples) for batch, samples in batches.items()},
    }
