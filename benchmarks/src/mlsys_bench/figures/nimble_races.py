"""Nimble's tables of nets that nobody tuned for, of many sizes, of int8 and of bf16: losses first."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean
from typing import Any

from mlsys_bench.figures.results import load, number, table
from mlsys_bench.nimble.summary import OURS, OURS_TRUSTING, PEERS


def zoo(*names: str) -> str:
    """Return each net in each company beside its best peer, from several files of the suite, and the means."""
    found = {net: companies for name in names for net, companies in load(name)["nets"].items()}
    races = [(net, company, race) for net, companies in found.items() for company, race in companies.items()]
    races.sort(key=lambda race: race[2]["over_best_peer"] or 0.0)
    rows = [
        [net, company, *_peer(race["cases"]), _milliseconds(race["cases"].get(OURS)), *_cells(race)]
        for net, company, race in races
    ]
    for company in dict.fromkeys(company for _, company, _ in races):
        own = [race for _, where, race in races if where == company and race["over_best_peer"]]
        means = [geometric_mean(column) for column in zip(*map(_ratios, own), strict=True)]
        rows.append([f"geometric mean of {len(own)}", company, "", "", "", *(f"**{mean:.2f}x**" for mean in means), ""])
    columns = ["net", "company", "best peer", "its ms (least)", "Nimble's", "over", "by medians", "by the least"]
    return table([*columns, "check"], rows)


def sizes(name: str) -> str:
    """Return each net at each size beside its best peer and beside a preparation for this size alone."""
    record = load(name)
    rows = []
    for title, cases in record["races"].items():
        net, _, size = title.rpartition(", ")
        peer = _best_peer(cases)
        ours, alone = (cases[case]["median_s"] for case in (OURS, "Nimble, this size alone"))
        ratios = [(cases[peer]["median_s"] / ours), alone / ours]
        ms = [number(1e3 * cases[peer]["median_s"]), number(1e3 * ours), number(1e3 * alone)]
        new_ms = f"{1e3 * record['new_size_s'][net][size]:.2f}"
        rows.append((ratios, [net.rpartition(":")[2], size, peer, *ms, *(f"{ratio:.2f}x" for ratio in ratios), new_ms]))
    rows.sort(key=lambda row: row[0][0])
    means = [geometric_mean(ratios[column] for ratios, _ in rows) for column in (0, 1)]
    lines = [line for _, line in rows]
    lines.append(["geometric mean", "", "", "", "", "", *(f"**{mean:.2f}x**" for mean in means), ""])
    columns = ["net", "size", "best peer", "its ms", "Nimble", "this size alone", "over the peer", "over alone"]
    return table([*columns, "a new size, ms"], lines)


def int8(name: str) -> str:
    """Return each quantised form of Nimble's beside the fastest int8 peer, with accuracy against own float32."""
    rows = []
    for net, race in load(name)["nets"].items():
        peer = race["best_peer"]
        for form, over in race["over_best_peer"].items():
            pair = [race["cases"][case] for case in (peer, form)]
            gain = race["cases"]["Nimble, float32"]["median_s"] / pair[1]["median_s"]
            ratios = [f"**{over:.2f}x**", f"{gain:.2f}x"]
            ms = [number(1e3 * case["median_s"]) for case in pair]
            errors = [f"{case['accuracy'][key]:.3f}" for key in ("mean_error", "top1") for case in pair]
            rows.append((over, [net, form.rpartition(", ")[2], peer, *ms, *ratios, *errors]))
    rows.sort(key=lambda row: row[0])
    columns = ["net", "Nimble's", "best peer", "its ms", "Nimble", "over the peer", "over own float32"]
    errors = [f"{what}: {whose}" for what in ("mean error", "top-1") for whose in ("peer", "Nimble")]
    return table([*columns, *errors], [line for _, line in rows])


def bf16(name: str) -> str:
    """Return each net's contestants in bf16, with mean errors against eager float32 beside their milliseconds."""
    nets = load(name)["nets"]
    forms = list(
        dict.fromkeys(case for race in nets.values() for case in race["cases"] if not case.endswith("float32"))
    )
    forms.sort(key=lambda form: not form.startswith(OURS))
    rows = []
    for net, race in nets.items():
        over = max(ratio for ratio in race["over_best_peer"].values() if ratio)
        cases = race["cases"]
        floats = [number(1e3 * cases[f"{whose}, float32"]["median_s"]) for whose in (OURS, "OpenVINO", "ONNX Runtime")]
        cells = [_with_error(cases.get(form)) for form in forms]
        rows.append((over, [net.rpartition(":")[2], race["best_peer"], f"**{over:.2f}x**", *cells, " / ".join(floats)]))
    rows.sort(key=lambda row: row[0])
    lines = [line for _, line in rows]
    mean = geometric_mean(over for over, _ in rows)
    lines.append(["geometric mean", "", f"**{mean:.2f}x**", *("" for _ in forms), ""])
    return table(["net", "best peer", "over it", *forms, "float32: Nimble / OpenVINO / ONNX Runtime"], lines)


def _with_error(case: Mapping[str, Any] | None) -> str:
    if case is None or not case.get("median_s"):
        return case["status"] if case else "-"
    return f"{number(1e3 * case['median_s'])} ({case['accuracy']['mean_error']:.4f})"


def _best_peer(cases: Mapping[str, Any]) -> str:
    return min((name for name in PEERS if name in cases and cases[name].get("median_s")), key=_median(cases))


def _median(cases: Mapping[str, Any]) -> Any:
    return lambda name: cases[name]["median_s"]


def _peer(cases: Mapping[str, Any]) -> list[str]:
    if not any(cases.get(name, {}).get("median_s") for name in PEERS):
        return ["-", "-"]
    peer = _best_peer(cases)
    return [peer, _milliseconds(cases[peer])]


def _milliseconds(case: Mapping[str, Any] | None) -> str:
    if case is None or not case.get("median_s"):
        return case["note"] or case["status"] if case else "-"
    return f"{number(1e3 * case['median_s'])} ({number(1e3 * case['least_s'])})"


def _check(cases: Mapping[str, Any]) -> str:
    """Return the least time that comparing weights adds to a call's, over a call that trusts versions."""
    ours, trusting = (cases.get(name, {}).get("least_s") for name in (OURS, OURS_TRUSTING))
    return f"{ours / trusting - 1:+.0%}" if ours and trusting else "-"


def _cells(race: Mapping[str, Any]) -> list[str]:
    if not race["over_best_peer"]:
        return ["-", "-", "-", "-"]
    over, by_medians, by_least = _ratios(race)
    return [f"**{over:.2f}x**", f"{by_medians:.2f}x", f"{by_least:.2f}x", _check(race["cases"])]


def _ratios(race: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the best peer's time over ours: within rounds, of all medians, and of the least times."""
    cases = race["cases"]
    by_medians = cases[_best_peer(cases)]["median_s"] / cases[OURS]["median_s"]
    return race["over_best_peer"], by_medians, race["least_over_best_peer"]
