"""The dissertation's tables 5.2 to 5.6 beside ours: its data sets, and what it found above what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mlsys_bench.figures.results import load, table
from mlsys_bench.figures.windtunnel import Key, Scores, fits_of, points_above

_SETS = (  # table 5.2; millions of records and of categories to the digits that it has
    ("Flight", "21.6M", "", 2, 6, "694", "", 0.204),
    ("Avazu", "40.4M", "", 0, 23, "8.93M", "", 0.170),
    ("Criteo", "45.8M", "", 13, 26, "30.8M", "", 0.256),
)
_PRES = ("pre1", "pre2", "pre3")
_PIPES = ("pipe1", "pipe2", "pipe3")
_MODELS = {"pipe1": "logistic regression", "pipe2": "LightGBM", "pipe3": "factorisation machine"}
_FLIGHT = {  # test AUC of table 5.3 by Pre1, Pre2, Pre3
    ("pipe1", "source"): (0.6783, 0.6847, 0.7126),
    ("pipe2", "source"): (0.7358, 0.7427, 0.7507),
    ("pipe3", "source"): (0.7519, 0.7547, 0.7467),
    ("pipe1", "windtunnel"): (0.6913, 0.6910, 0.7244),
    ("pipe2", "windtunnel"): (0.7790, 0.7897, 0.7960),
    ("pipe3", "windtunnel"): (0.7829, 0.7906, 0.7989),
    ("-", "deepgbm"): (0.7793, 0.7695, 0.7726),
}
_CRITEO = {  # tables 5.4 and 5.5 by Pre2, Pre3
    ("pipe2", "source"): (0.7781, 0.7925),
    ("pipe2", "gbdt2nn"): (0.7962, 0.7998),
    ("pipe2", "windtunnel"): (0.8053, 0.8041),
    ("pipe2", "cold"): (0.7983, 0.7990),
    ("pipe3", "windtunnel"): (0.8058, 0.8048),
    ("pipe3", "cold"): (0.7966, 0.7975),
}
_SHARES = ("1", "0.1", "0.01")
_LEVELS = {  # table 5.6 by share of the training records
    "source": (0.7781, 0.7777, 0.7657),
    "L2": (0.7924, 0.7874, 0.7685),
    "L3": (0.8051, 0.7912, 0.7699),
    "windtunnel": (0.8053, 0.7906, 0.7691),
}


class _Claim(NamedTuple):
    """One model above another, on the same columns and records."""

    table: str
    words: str
    upper: Key  # the fits here that correspond
    lower: Key
    points: float  # that the dissertation has


def sets(name: str) -> str:
    """Return records, columns and categories of the data sets, after those of the dissertation."""
    theirs = [
        [f"{data}, the dissertation's", *(str(value) for value in facts), f"{positive:.1%}"]
        for data, *facts, positive in _SETS
    ]
    ours = [
        [
            data,
            *(f"{facts[each]:,}" for each in ("records", "train", "numbers", "categories", "unique", "kept")),
            "" if facts["positive"] is None else f"{facts['positive']:.1%}",
        ]
        for data, facts in load(name).items()
    ]
    columns = ["data", "records", "training records", "columns of numbers", "of categories", "categories in training"]
    return table([*columns, "of 25 rows or more", "positive"], theirs + ours)


def claims(*names: str) -> str:
    """Return what the dissertation has above what, in points, beside the same here; what is lowest here first.

    Args:
        names: Journals of flights-3m with one setting; of fits that two have, those with more seeds count.
    """
    found: dict[Key, Scores] = {}
    for name in names:
        for key, fit in fits_of(name).items():
            found[key] = max(found.get(key, {}), fit.test, key=len)
    rows: list[tuple[float, list[str]]] = []
    missing = []
    for claim in _claims():
        upper, lower = found.get(claim.upper, {}), found.get(claim.lower, {})
        seeds = [seed for seed in upper if seed in lower]
        cells = [claim.table, claim.words, f"{claim.points:+.2f}", points_above(upper, lower), str(len(seeds))]
        if seeds:
            rows.append((sum(upper[seed] - lower[seed] for seed in seeds) / len(seeds), cells))
        else:
            missing.append([*cells[:3], "not run", "0"])
    ordered = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    return table(["table", "what above what", "dissertation, points", "here, points", "seeds"], ordered + missing)


def _claims() -> Iterator[_Claim]:
    for index, pre in enumerate(_PRES):
        for pipe in _PIPES:
            yield _claim("5.3", "source", "windtunnel", pre, pipe, _FLIGHT, index)
        for pipe in _PIPES[1:]:  # the dissertation's pipeline with logistic regression is below DeepGBM
            theirs = {**_FLIGHT, (pipe, "deepgbm"): _FLIGHT["-", "deepgbm"]}
            claim = _claim("5.3", "deepgbm", "windtunnel", pre, pipe, theirs, index)
            yield claim._replace(lower=claim.lower._replace(pipe="-"))
    for index, pre in enumerate(_PRES[1:]):
        yield _claim("5.4", "source", "gbdt2nn", pre, "pipe2", _CRITEO, index)
        yield _claim("5.4", "gbdt2nn", "windtunnel", pre, "pipe2", _CRITEO, index)
        for pipe in _PIPES[1:]:
            yield _claim("5.5", "cold", "windtunnel", pre, pipe, _CRITEO, index)
    for index, share in enumerate(_SHARES):
        levels = {("pipe2", level): scores for level, scores in _LEVELS.items()}
        for level in ("L2", "L3", "windtunnel"):
            yield _claim("5.6", "source", level, "pre2", "pipe2", levels, index, share)


_WORDS = {
    "source": "source",
    "deepgbm": "DeepGBM",
    "gbdt2nn": "GBDT2NN",
    "cold": "cold start",
    "windtunnel": "WindTunnel",
    "L2": "L2",
    "L3": "L3",
}


def _claim(
    number: str,
    lower: str,
    upper: str,
    pre: str,
    pipe: str,
    theirs: Mapping[tuple[str, str], tuple[float, ...]],
    index: int,
    share: str = "1",
) -> _Claim:
    words = f"{_WORDS[upper]} above {_WORDS[lower]}: {pre.title()}, {_MODELS[pipe]}"
    words += "" if number != "5.6" else f", {float(share):.0%} of the rows"
    above, below = (Key("flights-3m", pre, pipe, model, share) for model in (upper, lower))
    return _Claim(number, words, above, below, 100 * (theirs[pipe, upper][index] - theirs[pipe, lower][index]))
