"""Orca's tables: serving beside peers, the paper's comparison, and the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from mlsys_bench.figures.results import Ratio, load, number, over_best, ratios, table

_OURS = "mlsys orca"
_MODELS = {"llama": "Llama 135M", "gpt2": "GPT-2 124M"}


def opening(*names: str) -> str:
    """Return Orca's speed over the best peer: all requests at once, arrivals, one GGUF file, the paper's baseline."""
    kinds = {"peers-offline": _offline, "peers-online": _online}
    others = {"gguf": _gguf, "paper": _paper}
    found = []
    for name in names:
        _, first, second, *_ = name.split("-")
        found += list((kinds.get(f"{first}-{second}") or others[first])(name))
    return ratios(found)


def _offline(name: str) -> Iterator[Ratio]:
    """Yield the ratio of tokens a second, all requests at once."""
    results = load(name)
    runs = _by_case(results["runs"])
    speeds = {case: median(run["throughput_tokens_per_s"] for run in group) for case, group in runs.items()}
    ratio, peer = over_best(speeds, _OURS, peers=[case for case in speeds if not case.startswith(_OURS)])
    what, command = _titles(results["options"])
    yield Ratio(ratio, f"{what}, at once", peer, name, command)


def _online(name: str) -> Iterator[Ratio]:
    """Yield the rate at which the 99th percentile of the time to the first token compares worst."""
    results, found = load(name), []
    what, command = _titles(results["options"])
    rates = ",".join(f"{rate:g}" for rate in results["options"]["rates"])
    for traffic in dict.fromkeys(run["traffic"] for run in results["runs"]):
        runs = _by_case([run for run in results["runs"] if run["traffic"] == traffic])
        speeds = {case: 1 / median(run["ttft"]["p99"] for run in group) for case, group in runs.items()}
        ratio, peer = over_best(speeds, _OURS, peers=[case for case in speeds if not case.startswith(_OURS)])
        found.append(Ratio(ratio, f"{what}, TTFT p99 at {traffic}", peer, name, f"{command} rates={rates}"))
    yield min(found)


def _titles(options: dict[str, Any]) -> tuple[str, str]:
    """Return what was run in words, and the command."""
    what = _MODELS[options["model"]] + f", {options['dtype']}"
    what += ", in process" if options["in_process"] else ", HTTP"
    what += ", busy machine" if options["loaded"] else ""
    command = "mlsys bench orca-peers"
    command += f" model={options['model']}" if options["model"] != "llama" else ""
    command += f" dtype={options['dtype']}" if options["dtype"] != "bf16" else ""
    command += " in_process=true" if options["in_process"] else ""
    return what, command + (" loaded=true" if options["loaded"] else "")


def _gguf(name: str) -> Iterator[Ratio]:
    """Yield the ratio of one stream's tokens a second, and the lowest of the other loads'."""
    results = load(name)
    ours, *peers = results["rows"]
    command, found = f"mlsys bench orca-gguf model=.peers/models/{results['model']}", []
    keys = {"stream": "one stream", "streams": "8 streams", "many_streams": "32 streams", "prompt": "a prompt of 512"}
    for key, what in keys.items():
        speeds = {row["server"]: row[key] for row in (ours, *peers)}
        ratio, peer = over_best(speeds, ours["server"], peers=[row["server"] for row in peers])
        found.append(Ratio(ratio, f"{results['model']}, {what}", peer, name, command))
    yield from (found[0], min(found[1:]))


def _paper(name: str) -> Iterator[Ratio]:
    """Yield the throughput at equal latency over request-level scheduling's."""
    where, option = ("175B on 16 A100", "backend=simulated") if "simulated" in name else ("SmolLM2-135M", "dtype=bf16")
    for case, crossing in load(name)["crossings"].items():
        what = f"the paper's comparison, {where}; latency: {case}"
        yield Ratio(crossing["ratio"], what, "request-level scheduling", name, f"mlsys bench orca-paper {option}")


def _by_case(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {case: [run for run in runs if run["case"] == case] for case in (run["case"] for run in runs)}


def gpu(name: str) -> str:
    """Return a row for each kernel and iteration on a GPU: milliseconds beside torch's operators, losses first."""
    columns = ["what", "shape", "ms", "torch's operators, ms", "torch's over ours", "keys gathered beforehand, ms"]
    rows = [
        [
            row["what"],
            row["shape"],
            number(row["ours_ms"]),
            number(row["torch_ms"]),
            f"{row['torch_ms'] / row['ours_ms']:.2f}x",
            "" if row["padded_ms"] is None else number(row["padded_ms"]),
        ]
        for row in sorted(load(name)["rows"], key=lambda row: row["torch_ms"] / row["ours_ms"])
    ]
    return table(columns, rows)
