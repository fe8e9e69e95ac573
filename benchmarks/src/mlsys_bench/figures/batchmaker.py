"""BatchMaker's tables: loads of LSTM requests, steps, words and trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from mlsys_bench.figures.results import best, load, number, processor, table

_LOADS = ("0.3", "0.5", "0.7", "0.9")


def lstm(name: str) -> str:
    """Return the peak of each case, and its median and 90th percentile by load."""
    rows = []
    for title, figures in load(name).items():
        (figure,) = figures.values()
        peaks = list(figure["peaks_rps"].values())
        cells = best([number(peak) for peak in peaks], peaks, lowest=False)
        for index, (case, runs) in enumerate(figure["runs"].items()):
            size = title.partition(",")[0] if index == 0 else ""
            rows.append([size, case, cells[index], *(_latency(_at(figure, runs, part)) for part in _LOADS)])
    return table(["", "case", "peak (requests/s)", "p50, p90 at 30% (ms)", "at 50%", "at 70%", "at 90%"], rows)


def _at(figure: Mapping[str, Any], runs: list[dict[str, float]], part: str) -> dict[str, float]:
    index: int = figure["loads"].index(float(part))
    return runs[index]


def _latency(run: Mapping[str, float]) -> str:
    return f"{number(run['p50_s'] * 1e3, 2)}, {number(run['p90_s'] * 1e3, 2)}"


def ratios(*names: str) -> str:
    """Return how far ``chunk`` is ahead of bucketing, by machine and hidden size."""
    columns = ["machine", "", "against", "peak", "p90 lower at 30%", "at 50%", "at 70%", "at 90%"]
    return table(columns, (row for name in names for row in _ratio_rows(name)))


def _ratio_rows(name: str) -> Iterator[list[str]]:
    for title, figures in load(name).items():
        (figure,) = figures.values()
        for against in ("bucketed", "bucketed, nn.LSTM", "unpadded"):
            ours, theirs = figure["runs"]["cellular, chunk"], figure["runs"][against]
            gains = (1 - _at(figure, ours, part)["p90_s"] / _at(figure, theirs, part)["p90_s"] for part in _LOADS)
            peak = figure["peaks_rps"]["cellular, chunk"] / figure["peaks_rps"][against]
            yield [
                processor(name),
                title.partition(",")[0],
                against,
                f"{peak:.2f}x",
                *(f"{gain:.0%}" for gain in gains),
            ]


def peaks(name: str) -> str:
    """Return the peak of every case in every figure of the paper, and its 90th percentile at 70 % load."""
    rows = []
    for title, figure in load(name).items():
        if "peaks_rps" in figure:
            values = list(figure["peaks_rps"].values())
            cells = best([number(value) for value in values], values, lowest=False)
            for index, (case, runs) in enumerate(figure["runs"].items()):
                tail = number(_at(figure, runs, "0.7")["p90_s"] * 1e3, 2)
                rows.append([title if index == 0 else "", case, cells[index], tail])
    return table(["figure", "case", "peak (requests/s)", "p90 at 70% (ms)"], rows)


def loops(name: str) -> str:
    """Return the time of an LSTM step by rows, and the loops' speed in their recurrent product."""
    record = load(name)
    flops = 8 * record["hidden"] ** 2  # of a row: the state's half of the product, as the input's is a table
    rows = [
        [
            rows,
            number(step["loops_s"] * 1e6),
            number(flops * int(rows) / step["loops_s"] / 1e9),
            number(step["nn_lstm_s"] * 1e6),
        ]
        for rows, step in record["steps"].items()
    ]
    return table(["rows", "loops, us", "GFLOP/s", "nn.LSTM, us"], rows)


def words(name: str) -> str:
    """Return words a second at once, and the 90th percentile by load."""
    record = load(name)
    columns = ["case", "at once (words/s)", *(f"p90 at {float(part):.0%} (ms)" for part in record["latency_s"])]
    cases = list(record["words_per_s"])
    speeds = [median(record["words_per_s"][case]) for case in cases]
    tails = [[part[case]["p90"] * 1e3 for case in cases] for part in record["latency_s"].values()]
    cells = [best([number(speed) for speed in speeds], speeds, lowest=False)]
    cells += [best([number(value, 2) for value in column], column) for column in tails]
    return table(columns, ([case, *row] for case, row in zip(cases, zip(*cells, strict=True), strict=True)))


def voice(name: str) -> str:
    """Return frames a second, the live streams that each case holds, and latencies at one number of them."""
    record = load(name)
    columns = ["case", "frames/s", "streams held", "ours over", f"p50, p99 at {record['streams']:,} (ms)"]
    columns.append("on real threads (ms)")
    held = record["streams_held"]
    rows = []
    for case, runs in record["peak_frames_per_s"].items():
        found = record["virtual"][case]
        ratio = "" if case == "streams" else f"{held.get('streams', 0) / max(1, held.get(case, 0)):.1f}x"
        times = "too many" if found["is_lost"] else ", ".join(number(found[p] * 1e3, 2) for p in ("p50_s", "p99_s"))
        real = ", ".join(number(record["real"][case][p] * 1e3, 2) for p in ("p50_s", "p99_s"))
        rows.append([case, number(median(runs[1:])), f"{held.get(case, 0):,}", ratio, times, real])
    return table(columns, rows)


def trees(*names: str) -> str:
    """Return trees a second, at once, and ours over each peer."""
    rows = []
    for name in names:
        for title, found in load(name)["cases"].items():
            ours = found["median"]["cellular"]
            cells = [
                f"{number(found['median'][case])} ({ours / found['median'][case]:.2f}x)"
                if case in found["median"]
                else ""
                for case in ("DyNet", "per height", "ideal")
            ]
            rows.append([processor(name), title, number(ours), *cells])
    return table(["machine", "", "cellular, trees/s", "DyNet", "per height", "ideal graph"], rows)


def workers(*names: str) -> str:
    """Return requests a second of one worker and two, their gain, and that of the loops alone on two threads."""
    rows = []
    for name in names:
        results = load(name)
        for model, found in results["models"].items():
            one, two = (median(found[count]["rps"]) for count in ("1", "2"))
            waits = [f"{found[count]['idle_s'] * 1e3:.2f}" for count in ("1", "2")]
            title = f"{model}, h = {results['hidden']}"
            rates = [number(one), number(two), f"{two / one:.2f}x", f"{results['loops_gain']:.2f}x"]
            rows.append([processor(name), title, *rates, *waits])
    columns = ["machine", "model", "one worker, requests/s", "two", "gain", "the loops alone, two threads"]
    return table([*columns, "wait between rounds, one worker, ms", "two"], rows)
