"""BatchMaker's tables: speed over the strongest opponent, and live voices."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from mlsys_bench.figures.results import Ratio, load, number, over_best, ratios, table


def opening(*names: str) -> str:
    """Return BatchMaker's speed over its strongest opponent: peaks, tails, words, trees and streams."""
    kinds = {"lstm": _lstm, "quick": _paper, "large": _large, "words": _words, "trees": _trees, "voice": _voice}
    return ratios(row for name in names for row in kinds[name.split("-")[1]](name))


def _lstm(name: str) -> Iterator[Ratio]:
    """Yield the peak and the tail of the hidden size, and of the load below the peak, with the lowest ratio."""
    command, peaks, tails = "mlsys bench batchmaker figures=7 hidden={} --quick", list[Ratio](), list[Ratio]()
    for title, figures in load(name).items():
        (figure,) = figures.values()
        size = title.partition(",")[0]
        shown = command.format(size.removeprefix("h = "))
        ratio, peer = _over_opponents(figure["peaks_rps"])
        peaks.append(Ratio(ratio, f"LSTM, {size}, peak", peer, name, shown))
        for index, part in enumerate(figure["loads"]):
            if part < 1:
                ratio, peer = _over_opponents({case: 1 / runs[index]["p90_s"] for case, runs in figure["runs"].items()})
                tails.append(Ratio(ratio, f"LSTM, {size}, p90 at {part:.0%} load", peer, name, shown))
    yield from (min(peaks), min(tails))


def _over_opponents(speeds: dict[str, float], ours: str = "cellular, chunk") -> tuple[float, str]:
    """Return our speed over that of the fastest case that is not cellular, and that case."""
    return over_best(speeds, ours, peers=[case for case in speeds if not case.startswith("cellular")])


def _paper(name: str) -> Iterator[Ratio]:
    for title, figure in load(name).items():
        if title.startswith(("Figure 11", "Figure 13")):
            ours = "cellular 64,64" if "13" in title else "cellular, chunk"
            ratio, peer = _over_opponents(figure["peaks_rps"], ours)
            number = title.partition(":")[0].removeprefix("Figure ")
            command = f"mlsys bench batchmaker figures={number} --quick"
            yield Ratio(ratio, title.partition(": ")[2] + ", peak", peer, name, command)


def _large(name: str) -> Iterator[Ratio]:
    """Yield the peak of each figure at the paper's hidden size."""
    for title, figure in load(name).items():
        ours = "cellular 64,64" if "13" in title else "cellular, chunk"
        ratio, peer = _over_opponents(figure["peaks_rps"], ours)
        number = title.partition(":")[0].removeprefix("Figure ")
        command = f"mlsys bench batchmaker figures={number} hidden=1024"
        yield Ratio(ratio, title.partition(": ")[2] + ", h = 1024, peak", peer, name, command)


def _words(name: str) -> Iterator[Ratio]:
    ratio, peer = _over_opponents({case: median(runs) for case, runs in load(name)["words_per_s"].items()}, "cellular")
    yield Ratio(ratio, "words of g2p-en, at once", peer, name, "mlsys bench batchmaker-words")


def _trees(name: str) -> Iterator[Ratio]:
    for title, found in load(name)["cases"].items():
        ratio, peer = _over_opponents(found["median"], "cellular")
        yield Ratio(ratio, f"{title}, at once", peer, name, "mlsys bench batchmaker-trees trees=FILE")


def _voice(name: str) -> Iterator[Ratio]:
    held = dict(load(name)["streams_held"])
    ours, peer = held.pop("streams"), max(held, key=lambda case: held[case])
    yield Ratio(ours / held[peer], "live voices held", peer, name, "mlsys bench batchmaker-voice")


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
