"""DVABatch's tables: speed over the strongest opponent, and texts to vectors beside other libraries."""

from __future__ import annotations

from collections.abc import Iterator

from mlsys_bench.figures.results import Ratio, load, over_best, ratios, table

_MODELS = {
    "unet": "U-Net",
    "linknet": "LinkNet",
    "vgg19-weights": "VGG-19, weights",
    "vgg19": "VGG-19",
    "resnet152": "ResNet-152",
}
_BASELINES = ("ZeroBatch", "DelayBatch", "at most")


def opening(*names: str) -> str:
    """Return DVABatch's speed over its strongest opponent: peaks, average latencies, servers.

    Of a suite's vision nets and sets of lengths, each load has one row: that with the lowest ratio. Wires likewise.
    """
    kinds = {"encoder": _encoder, "vision": _vision, "over": _over_http, "front": _front, "clients": _front}
    return ratios(row for name in names for row in kinds[name.split("-")[1]](name))


def _against_baselines(speeds: dict[str, float], ours: str) -> tuple[float, str]:
    return over_best(speeds, ours, peers=[case for case in speeds if case.startswith(_BASELINES)])


def _encoder(name: str) -> Iterator[Ratio]:
    worst: dict[str, Ratio] = {}
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
            command = f"mlsys bench dvabatch part=encoder lengths={lengths}"
            row = Ratio(ratio, f"texts like {lengths}, {what}", peer, name, command)
            worst[what] = min(row, worst.get(what, row))
    yield from worst.values()


def _vision(name: str) -> Iterator[Ratio]:
    worst: dict[str, Ratio] = {}
    for key, found in load(name).items():
        model, _, part = key.partition("_at_")
        if model in _MODELS and part:
            ratio, peer = _against_baselines({case: 1 / run["mean_s"] for case, run in found.items()}, "DVABatch")
            what = f"{_MODELS[model]}, average at {float(part):.0%} load"
            row = Ratio(ratio, what, peer, name, "mlsys bench dvabatch part=vision")
            worst[part] = min(row, worst.get(part, row))
    yield from worst.values()


def _over_http(name: str) -> Iterator[Ratio]:
    record = load(name)
    means = {row["server"]: row["mean_ms"] for row in record["rows"]}
    ours, peer, rate = means.pop("DVABatch"), min(means, key=lambda server: means[server]), record["settings"]["rate"]
    what, command = f"over HTTP, average at {rate:.0f} requests/s", f"mlsys bench dvabatch-over-http rate={rate:.0f}"
    yield Ratio(means[peer] / ours, what, peer, name, command)


def _front(name: str) -> Iterator[Ratio]:
    """Yield the lowest ratio to Triton's requests a second over wires and clients, for a model in batches and not."""
    peer = "Triton" if name.startswith("front-clients") else "PyTriton"  # the other file's Triton is PyTriton's
    command = "mlsys bench core-oip-front" + (" clients=8,64,256" if peer == "Triton" else "")
    for model, what in (("batched", "in batches"), ("unbatched", "one at a time")):
        rates: dict[tuple[str, int], dict[str, float]] = {}
        for row in load(name)["rows"]:
            if row["model"] == model:
                rates.setdefault((row["wire"], row.get("clients", 16)), {})[row["server"]] = row["requests_per_s"]
        ratio, wire, clients = min((found["dvabatch"] / found["triton"], *case) for case, found in rates.items())
        title = f"model of 2 ms {what}, {wire}, {clients} clients, requests/s"
        yield Ratio(ratio, title, peer, name, command)


def embeddings(name: str) -> str:
    """Return each library's embeddings a second and latencies beside ours, by lengths; losses first."""
    rows = []
    for lengths, found in load(name).items():
        if not isinstance(found, dict) or "DVABatch" not in found:
            continue
        for library, row in found.items():
            form = "DVABatch, int8" if library.endswith(", int8") and library != "DVABatch, int8" else "DVABatch"
            ours = found[form]["per_s"]  # int8 beside int8
            cells = [f"{row['processor_ms_a_text']:.1f}", f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}"]
            at = f"{row['rate_per_s']:.0f}/s"
            ratio = "" if library == "DVABatch" else f"{ours / row['per_s']:.2f}x"
            agrees = [f"{row['least_cosine']:.7f}", f"{row['nearest_kept']:.1%}"]
            rows.append((ours / row["per_s"], [lengths, library, f"{row['per_s']:.1f}", ratio, *cells, at, *agrees]))
    columns = [
        "lengths like",
        "",
        "embeddings/s",
        "DVABatch is",
        "CPU ms a text",
        "p50 ms",
        "p99 ms",
        "at",
        "least cosine",
        "nearest 10 kept",
    ]
    return table(columns, [cells for _, cells in sorted(rows, key=lambda row: (row[1][0], row[0]))])
