"""Tables that open the benchmark pages: what, against whom, ratio, machine; the rows where we lose first."""

from __future__ import annotations

from statistics import mean, median

from mlsys_bench.figures import orca as of_orca
from mlsys_bench.figures import windtunnel as of_windtunnel
from mlsys_bench.figures.results import load, processor, table

_COLUMNS = ["what", "against", "ratio", "machine", "command"]
_PEERS = ("torch.compile", "AOTInductor", "ONNX Runtime", "OpenVINO")


def nimble(*names: str) -> str:
    """Return each net's speed over its best peer's."""
    rows = []
    for name in names:
        for net, found in load(name)["nets"].items():
            timed = {peer: found["cases"].get(peer, {}) for peer in _PEERS}
            seconds = {peer: case["median_s"] for peer, case in timed.items() if case.get("status") == "timed"}
            peer = min(seconds, key=lambda peer: seconds[peer])
            rows.append((found["over_best_peer"], f"{net}, a call", peer, name, f"mlsys nimble bench --nets {net}"))
    return _ratios(rows)


def orca(*names: str) -> str:
    """Return the tokens a second over the best peer's, all requests at once."""
    rows = []
    for name in names:
        results = load(name)
        options, runs = results["options"], of_orca.by_case(results["runs"])
        speeds = {case: median(run["throughput_tokens_per_s"] for run in group) for case, group in runs.items()}
        ours = speeds.pop("mlsys orca")
        peer = max(speeds, key=lambda case: speeds[case])
        what = of_orca.MODELS[options["model"]] + f", {options['dtype']}"
        what += ", in process" if options["in_process"] else ", HTTP"
        what += ", busy machine" if options["loaded"] else ""
        command = "mlsys bench orca-peers"
        command += f" model={options['model']}" if options["model"] != "llama" else ""
        command += f" dtype={options['dtype']}" if options["dtype"] != "bf16" else ""
        command += " in_process=true" if options["in_process"] else ""
        command += " loaded=true" if options["loaded"] else ""
        rows.append((ours / speeds[peer], what, peer, name, command))
    return _ratios(rows)


def windtunnel(name: str, data: str = "flights-3m") -> str:
    """Return how many points of the test score WindTunnel is above each model, over the seeds that both have."""
    found = of_windtunnel.held_out_scores(name, data)
    ours = found["WindTunnel"]
    command = "mlsys windtunnel bench nearby --columns pre4"
    rows = []
    for model, theirs in found.items():
        if model != "WindTunnel":
            points = 100 * mean(score - theirs[seed] for seed, score in ours.items() if seed in theirs)
            rows.append((points, model))
    columns = ["what", "against", "points above", "machine", "command"]
    lines = [
        ["test AUC, 300,000 flights", model, f"**{points:.2f}**", processor(name), f"`{command}`"]
        for points, model in sorted(rows)
    ]
    return table(columns, lines)


def _ratios(rows: list[tuple[float, str, str, str, str]]) -> str:
    lines = [
        [what, peer, f"**{ratio:.2f}x**", processor(name), f"`{command}`"]
        for ratio, what, peer, name, command in sorted(rows)
    ]
    return table(_COLUMNS, lines)
