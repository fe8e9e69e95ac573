"""Nimble's tables: speed over the best peer of each suite, and the table of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlsys_bench.figures.results import Ratio, load, number, over_best, ratios, table
from mlsys_bench.nimble import OURS, PEERS


def opening(*names: str) -> str:
    """Return Nimble's speed over its best peer: nets, zoo, sizes, int8, bf16 and training steps."""
    kinds = {"zoo": _zoo, "dynamic": _sizes, "int8": _int8, "bf16": _bf16, "training": _training}
    return ratios(row for name in names for row in kinds.get(name.split("-")[1], _nets)(name))


def _nets(name: str) -> Iterator[Ratio]:
    for net, found in load(name)["nets"].items():
        peer = _best_peer(found["cases"])
        yield Ratio(found["over_best_peer"], f"{net}, a call", peer, name, f"mlsys bench nimble nets={net}")


def _zoo(name: str) -> Iterator[Ratio]:
    """Yield the geometric mean over all nets in each company, and the net with the lowest ratio."""
    results, command = load(name), "mlsys bench nimble-zoo --quick"
    for company, means in results["means"].items():
        races = [(race["over_best_peer"], net) for net, found in results["nets"].items()
                 if (race := found.get(company)) and race["over_best_peer"]]  # fmt: skip
        ratio, net = min(races)
        peer = _best_peer(results["nets"][net][company]["cases"])
        title = f"mean of {len(races)} nets that nobody tuned for, {company}"
        yield Ratio(means["over_best_peer"], title, "the best peer of each", name, command)
        yield Ratio(ratio, f"{net}, the lowest of these, {company}", peer, name, command)


def _sizes(name: str) -> Iterator[Ratio]:
    """Yield the size with the lowest ratio of each net."""
    worst: dict[str, Ratio] = {}
    for title, cases in load(name)["races"].items():
        net, _, size = title.rpartition(", ")
        peer = _best_peer(cases)
        shown, command = net.rpartition(":")[2], f"mlsys bench nimble-dynamic nets={net}"
        what = f"{shown} at size {size}, prepared for a range"
        row = Ratio(cases[peer]["median_s"] / cases[OURS]["median_s"], what, peer, name, command)
        worst[net] = min(row, worst.get(net, row))
    yield from worst.values()


def _int8(name: str) -> Iterator[Ratio]:
    return _forms(name, "mlsys bench nimble-int8", "in int8")


def _bf16(name: str) -> Iterator[Ratio]:
    return _forms(name, "mlsys bench nimble-bf16", "in bf16")


def _forms(name: str, command: str, what: str) -> Iterator[Ratio]:
    for net, race in load(name)["nets"].items():
        ratio = max(over for over in race["over_best_peer"].values() if over)
        yield Ratio(ratio, f"{net.rpartition(':')[2]}, {what}", race["best_peer"], name, command)


def _training(name: str) -> Iterator[Ratio]:
    record = load(name)
    for net in dict.fromkeys(row["net"] for row in record["rows"]):
        speeds = {row["case"]: 1 / row["median_ms"] for row in record["rows"] if row["net"] == net}
        ratio, peer = over_best(speeds, "Nimble", peers=[case for case in speeds if case != "Nimble"])
        batch = next(row["batch"] for row in record["rows"] if row["net"] == net)
        command = f"mlsys bench nimble-training nets={net} batch={batch} --threads {record['threads']}"
        yield Ratio(ratio, f"{net}, a training step", peer, name, command)


def _best_peer(cases: dict[str, Any]) -> str:
    timed = [peer for peer in PEERS if peer != "eager" and cases.get(peer, {}).get("median_s")]
    return min(timed, key=lambda peer: cases[peer]["median_s"])


def gpu(name: str) -> str:
    """Return a row for each case of each race on a GPU: median milliseconds, and how many times slower than Nimble."""
    rows: list[list[str]] = []
    for race in load(name)["races"]:
        ours = race["outcomes"]["Nimble"]["median_s"]
        for case, outcome in race["outcomes"].items():
            ratio = f"{outcome['median_s'] / ours:.2f}x"
            rows.append([race["net"], case, number(1e3 * outcome["median_s"]), ratio, outcome["note"]])
    return table(["net, batch 1", "case", "ms", "over Nimble", "memory"], rows)
