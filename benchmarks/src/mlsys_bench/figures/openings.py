"""Tables that open the benchmark pages: what, against whom, ratio, machine; the rows where we lose first."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from mlsys_bench.figures import dvabatch as of_dvabatch
from mlsys_bench.figures import orca as of_orca
from mlsys_bench.figures import windtunnel as of_windtunnel
from mlsys_bench.figures.results import load, processor, table

_Row = tuple[float, str, str, str, str]  # ratio, what, against, result file, command
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


def public(name: str) -> str:
    """Return how many points members are above a tuned LightGBM and above peers, over the seeds that both have."""
    rows = []
    for data, contestants in load(name)["results"].items():
        ours = contestants["members"]["seeds"]
        score = "R2" if data in ("california", "movielens-100k") else "AUC"
        for each, facts in contestants.items():
            if each in ("members", "fine-tuned"):
                continue
            points = 100 * mean(ours[seed]["score"] - found["score"] for seed, found in facts["seeds"].items())
            against = "LightGBM, tuned" if each == "tuned" else each
            rows.append((points, f"test {score}, {data}, members", against, len(facts["seeds"])))
    columns = ["what", "against", "points above", "seeds", "machine", "command"]
    command = "`mlsys bench windtunnel-public first_seed=5`"
    cells = [
        [what, against, f"**{points:.2f}**", str(n), processor(name), command]
        for points, what, against, n in sorted(rows)
    ]
    return table(columns, cells)


def batchmaker(*names: str) -> str:
    """Return BatchMaker's speed over its strongest opponent: peaks, tails, words, trees and streams."""
    kinds = {"lstm": _lstm, "quick": _paper, "large": _large, "words": _words, "trees": _trees, "voice": _voice}
    return _ratios([row for name in names for row in kinds[name.split("-")[1]](name)])


def _lstm(name: str) -> Iterator[_Row]:
    """Yield the peak and the tail of the hidden size, and of the load below the peak, with the lowest ratio."""
    command, peaks, tails = "mlsys batchmaker bench --quick --figures 7 --hidden {}", list[_Row](), list[_Row]()
    for title, figures in load(name).items():
        (figure,) = figures.values()
        size = title.partition(",")[0]
        shown = command.format(size.removeprefix("h = "))
        ratio, peer = _over_best(figure["peaks_rps"])
        peaks.append((ratio, f"LSTM, {size}, peak", peer, name, shown))
        for index, part in enumerate(figure["loads"]):
            if part < 1:
                ratio, peer = _over_best({case: 1 / runs[index]["p90_s"] for case, runs in figure["runs"].items()})
                tails.append((ratio, f"LSTM, {size}, p90 at {part:.0%} load", peer, name, shown))
    yield from (min(peaks), min(tails))


def _over_best(speeds: dict[str, float], ours: str = "cellular, chunk") -> tuple[float, str]:
    """Return our speed over that of the quickest case that is not cellular, and that case."""
    others = {case: speed for case, speed in speeds.items() if not case.startswith("cellular")}
    peer = max(others, key=lambda case: others[case])
    return speeds[ours] / others[peer], peer


def _paper(name: str) -> Iterator[_Row]:
    for title, figure in load(name).items():
        if title.startswith(("Figure 11", "Figure 13")):
            ours = "cellular 64,64" if "13" in title else "cellular, chunk"
            ratio, peer = _over_best(figure["peaks_rps"], ours)
            number = title.partition(":")[0].removeprefix("Figure ")
            command = f"mlsys batchmaker bench --quick --figures {number}"
            yield ratio, title.partition(": ")[2] + ", peak", peer, name, command


def _large(name: str) -> Iterator[_Row]:
    """Yield the peak of each figure at the paper's hidden size."""
    for title, figure in load(name).items():
        ours = "cellular 64,64" if "13" in title else "cellular, chunk"
        ratio, peer = _over_best(figure["peaks_rps"], ours)
        number = title.partition(":")[0].removeprefix("Figure ")
        command = f"mlsys batchmaker bench --figures {number} --hidden 1024"
        yield ratio, title.partition(": ")[2] + ", h = 1024, peak", peer, name, command


def _words(name: str) -> Iterator[_Row]:
    ratio, peer = _over_best({case: median(runs) for case, runs in load(name)["words_per_s"].items()}, "cellular")
    yield ratio, "words of g2p-en, at once", peer, name, "mlsys bench batchmaker-words"


def _trees(name: str) -> Iterator[_Row]:
    for title, found in load(name)["cases"].items():
        ratio, peer = _over_best(found["median"], "cellular")
        yield ratio, f"{title}, at once", peer, name, "mlsys bench batchmaker-trees trees=FILE"


def _voice(name: str) -> Iterator[_Row]:
    held = dict(load(name)["streams_held"])
    ours, peer = held.pop("streams"), max(held, key=lambda case: held[case])
    yield ours / held[peer], "live voices held", peer, name, "mlsys bench batchmaker-voice"


def dvabatch(*names: str) -> str:
    """Return DVABatch's speed over its strongest opponent: peaks, average latencies, servers.

    Of a suite's vision nets and sets of lengths, each load has one row: that with the lowest ratio. Wires likewise.
    """
    kinds = {"encoder": _encoder, "vision": _vision, "over": _over_http, "front": _front}
    return _ratios([row for name in names for row in kinds[name.split("-")[1]](name)])


_BASELINES = ("ZeroBatch", "DelayBatch", "at most")


def _against_baselines(speeds: dict[str, float], ours: str) -> tuple[float, str]:
    others = {case: speed for case, speed in speeds.items() if case.startswith(_BASELINES)}
    peer = max(others, key=lambda case: others[case])
    return speeds[ours] / others[peer], peer


def _encoder(name: str) -> Iterator[_Row]:
    worst: dict[str, _Row] = {}
    for key, found in load(name).items():
        cases: dict[str, tuple[str, dict[str, float]]] = {}  # by what is measured: lengths, and speeds by case
        if key == "encoder_peak_rps":
            cases = {lengths: ("peak", peaks) for lengths, peaks in found.items()}
        elif key.startswith("encoder_latency") and "Policy" in key:
            lengths, _, part = key.removeprefix("encoder_latency_").partition("_at_")
            means = {case: 1 / run["mean_s"] for case, run in found.items()}
            cases = {lengths: (f"average at {float(part.partition('_')[0]):.0%} load", means)}
        for lengths, (what, speeds) in cases.items():
            ratio, peer = _against_baselines(speeds, "token-packed")
            command = f"mlsys dvabatch bench --part encoder --lengths {lengths}"
            row = (ratio, f"texts like {lengths}, {what}", peer, name, command)
            worst[what] = min(row, worst.get(what, row))
    yield from worst.values()


def _vision(name: str) -> Iterator[_Row]:
    worst: dict[str, _Row] = {}
    for key, found in load(name).items():
        model, _, part = key.partition("_at_")
        if model in of_dvabatch.MODELS and part:
            ratio, peer = _against_baselines({case: 1 / run["mean_s"] for case, run in found.items()}, "DVABatch")
            what = f"{of_dvabatch.MODELS[model]}, average at {float(part):.0%} load"
            row = (ratio, what, peer, name, "mlsys dvabatch bench --part vision")
            worst[part] = min(row, worst.get(part, row))
    yield from worst.values()


def _over_http(name: str) -> Iterator[_Row]:
    record = load(name)
    means = {row["server"]: row["mean_ms"] for row in record["rows"]}
    ours, peer, rate = means.pop("DVABatch"), min(means, key=lambda server: means[server]), record["settings"]["rate"]
    what, command = f"over HTTP, average at {rate:.0f} requests/s", f"mlsys bench dvabatch-over-http rate={rate:.0f}"
    yield means[peer] / ours, what, peer, name, command


def _front(name: str) -> Iterator[_Row]:
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for row in load(name)["rows"]:
        rates.setdefault((row["model"], row["wire"]), {})[row["server"]] = row["requests_per_s"]
    for model, what in (("batched", "in batches"), ("unbatched", "one at a time")):
        ratio = min(found["dvabatch"] / found["triton"] for (whose, _), found in rates.items() if whose == model)
        yield ratio, f"model of 2 ms {what}, requests/s", "Triton", name, "mlsys bench core-oip-front"


def _ratios(rows: list[_Row]) -> str:
    lines = [
        [what, peer, f"**{ratio:.2f}x**", processor(name), f"`{command}`"]
        for ratio, what, peer, name, command in sorted(rows)
    ]
    return table(_COLUMNS, lines)
