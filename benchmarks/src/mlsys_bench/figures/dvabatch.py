"""DVABatch's tables: input, operator and load diversity, single requests, servers, the most that joining gives."""

from __future__ import annotations

from typing import Any

from mlsys_bench.dvabatch.lengths import GLUE_LIKE
from mlsys_bench.figures.results import best, load, number, processor, table

_POLICY = "Policy I, cost-aware"
MODELS = {
    "unet": "U-Net",
    "linknet": "LinkNet",
    "vgg19-weights": "VGG-19, weights",
    "vgg19": "VGG-19",
    "resnet152": "ResNet-152",
}


def encoder(*names: str) -> str:
    """Return requests a second with all requests waiting, then average latencies by load, for each policy."""
    rows = []
    cases = list(next(iter(load(names[0])["encoder_peak_rps"].values())))
    for name in names:
        results = load(name)
        for lengths, peaks in results["encoder_peak_rps"].items():
            values = [peaks[case] for case in cases]
            rows.append([processor(name), f"{lengths}, peak (req/s)", *_cells(values, lowest=False)])
        for key, found in results.items():
            if key.startswith("encoder_latency"):
                lengths, _, part = key.removeprefix("encoder_latency_").partition("_at_")
                share, _, whose = part.partition("_of_")
                values = [found[case]["mean_s"] * 1e3 for case in cases]
                title = f"{lengths}, {share} of {whose.partition(',')[0]}'s peak (ms)"
                rows.append([processor(name), title, *_cells(values)])
    return table(["machine", "lengths like", *(case.removesuffix(", cost-aware") for case in cases)], rows)


def _cells(values: list[float], *, lowest: bool = True) -> list[str]:
    return best([f"{value:.1f}" for value in values], values, lowest=lowest)


def gains(*names: str) -> str:
    """Return what Policy I and the token-packed policy gain on the baselines."""
    columns = ["machine", "lengths like", "policy", "peak over DelayBatch", "over the best static size", "packed, too"]
    rows = []
    for name in names:
        results = load(name)
        for lengths, peaks in results["encoder_peak_rps"].items():
            statics = {case: value for case, value in peaks.items() if case.startswith("at most")}
            packed = [value for case, value in statics.items() if case.endswith("packed")]  # older files have none
            static = max(value for case, value in statics.items() if not case.endswith("packed"))
            found = results.get(f"encoder_latency_{lengths}_at_0.6_of_{_POLICY}")  # None: only peaks were measured
            for case in (_POLICY, "token-packed"):
                averages = [f"{found[case]['mean_s'] / found[base]['mean_s'] - 1:.0%}" if found else ""
                            for base in _BASELINES]  # fmt: skip
                ratios = [f"{peaks[case] / base:.2f}x" for base in (peaks["DelayBatch"], static)]
                ratios.append(f"{peaks[case] / max(packed):.2f}x" if packed and case == "token-packed" else "")
                rows.append([processor(name), lengths, case.removesuffix(", cost-aware"), *ratios, *averages])
    return table([*columns, "average at 0.6, to ZeroBatch", "to DelayBatch"], rows)


_BASELINES = ("ZeroBatch", "DelayBatch")


def lengths() -> str:
    """Return the samplers of texts' lengths beside the published means; no measurement."""
    rows = []
    for name, of in GLUE_LIKE.items():
        assert of.published is not None
        drawn = of.sample(20_000)
        rows.append(
            [
                name,
                f"{of.published.mean_text_nbytes:.0f}",
                f"{of.published.mean_tokens:.1f}",
                f"{sum(drawn) / len(drawn):.1f}",
                number(of.median),
                f"{of.sigma:.2f}",
                f"{of.least} to {of.most}",
            ]
        )
    columns = ["like", "published mean, bytes", "in tokens", "sampler's mean", "median", "sigma", "ends"]
    return table(columns, rows)


def vision(*names: str) -> str:
    """Return the average latency of vision nets by load and policy."""
    cases = ["ZeroBatch", "DelayBatch", "best static", "split only", "LazyBatch", "DVABatch, literal", "DVABatch"]
    rows = []
    for name in names:
        for key, found in load(name).items():
            model, _, part = key.partition("_at_")
            if model in MODELS and part:
                ms = {case.replace(_static(found), "best static"): run["mean_s"] * 1e3 for case, run in found.items()}
                ratios = [f"{ms['DVABatch'] / ms[base]:.2f}x" for base in ("ZeroBatch", "best static")]
                cells = [f"{ms[case]:.1f}" for case in cases]
                rows.append([processor(name), f"{MODELS[model]} {part}", *cells, *ratios])
    return table(["machine", "model, load", *cases, "to ZeroBatch", "to best static"], rows)


def _static(found: dict[str, Any]) -> str:
    return next(case for case in found if case.startswith("at most"))


def closed_loop(*names: str) -> str:
    """Return the milliseconds of one request at a time."""
    rows = []
    for name in names:
        results = load(name)
        for clock in ("processor", "wall"):
            seconds = results[f"closed_loop_{clock}_s"]
            cells = [f"{seconds[case] * 1e3:.2f}" for case in ("ZeroBatch", "DVABatch")]
            rows.append([processor(name), f"{clock} time, ms", *cells])
    return table(["machine", "", "ZeroBatch", "DVABatch"], rows)


def stepping(name: str) -> str:
    """Return the highest rates within the QoS target while the load rises, least gains first; "+": all rates were."""
    rows = []
    for model, found in load(name)["stepping"].items():
        cases, last = list(found["cases"].values()), found["rates_rps"][-1]
        cells = [f"{one['highest_rps']:.1f}{'+' * (one['highest_rps'] >= last)}" for one in cases]
        gain = cases[1]["highest_rps"] / cases[0]["highest_rps"]
        title = MODELS.get(model, model.replace("all-minilm-l6-v2", "MiniLM"))
        rows.append((gain, [title, f"{found['qos_s'] * 1e3:.0f}", *cells, f"{gain:.2f}x"]))
    columns = ["", "QoS target, ms", "DelayBatch, requests/s", "DVABatch, requests/s", "gain"]
    return table(columns, [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def ideal(name: str) -> str:
    """Return the average latency of whole batches, and the lowest that any joining reaches, in milliseconds."""
    rows = [
        [
            str(row["load"]),
            *(f"{row[key]:.1f}" for key in ("whole_ms", "joined_ms")),
            f"{1 - row['joined_ms'] / row['whole_ms']:.1%}",
            *(f"{row[key]:.1f}" for key in ("zero_ms", "dvabatch_ms")),
        ]
        for row in load(name)["rows"]
    ]
    return table(["load", "whole batches", "best joining", "gain", "ZeroBatch", "DVABatch"], rows)


def ideal_of_nets(name: str) -> str:
    """Return what DVABatch gains over the best whole batches, and the most that joining and splitting could."""
    rows = [
        [
            MODELS.get(row["model"], row["model"]),
            str(row["load"]),
            *(f"{row[key]:.1f}" for key in ("zero_ms", "whole_ms", "joined_ms")),
            f"{min(row['dvabatch_ms'], row['dvabatch_splits_ms']):.1f}",
            f"{row['joined_ms'] / row['whole_ms'] - 1:.0%}",
            f"{min(row['dvabatch_ms'], row['dvabatch_splits_ms']) / row['whole_ms'] - 1:.0%}",
            f"{row['split_peak']:.2f}x",
        ]
        for row in load(name)["rows"]
    ]
    columns = ["model", "load", "ZeroBatch", "best whole batches", "best joining", "DVABatch", "joining could give"]
    return table([*columns, "DVABatch gives", "peak, sizes by stage"], rows)


def over_http(*names: str) -> str:
    """Return mean, median and 99th percentile of each server, in milliseconds, by requests a second."""
    servers = [row["server"] for row in load(names[0])["rows"]]
    rows = []
    for name in names:
        record = load(name)
        cells = ["/".join(f"{row[key]:.0f}" for key in ("mean_ms", "p50_ms", "p99_ms")) for row in record["rows"]]
        cells = best(cells, [row["mean_ms"] for row in record["rows"]])
        rows.append([processor(name), number(record["settings"]["rate"]), *cells])
    return table(["machine", "requests/s", *servers], rows)


def fronts(name: str) -> str:
    """Return each server's rate, latencies and processor time, by model and wire."""
    rows = [
        [
            {"batched": "up to 16", "unbatched": "one at a time"}[row["model"]],
            {"binary": "REST, binary", "json": "REST, JSON", "grpc": "gRPC", "stream": "gRPC stream"}[row["wire"]],
            row["server"],
            number(row["requests_per_s"]),
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            number(row["server_cpu_us"]),
        ]
        for row in load(name)["rows"]
    ]
    return table(["batches", "wire", "server", "req/s", "p50 ms", "p99 ms", "CPU us/req"], rows)


def exits(name: str) -> str:
    """Return accuracy, exits and times of models with early exits, by rule and threshold; the slower rows first."""
    rows = []
    for subject in load(name)["subjects"]:
        whole = subject["rows"][0]["processor_ms"]  # nobody leaves early
        for row in sorted(subject["rows"], key=lambda each: -each["processor_ms"]):
            rule = f"{row['rule']} {row['at_least']:g}" if row["at_least"] < 1 else "no early exit"
            rows.append(
                [
                    subject["name"].partition(",")[0],
                    rule,
                    f"{row['accuracy']:.1%}",
                    " / ".join(f"{share:.0%}" for share in row["exits"]),
                    f"{row['processor_ms']:.2f}",
                    f"{whole / row['processor_ms']:.2f}x",
                    f"{row['median_ms']:.1f}",
                    f"{row['p99_ms']:.1f}",
                ]
            )
    columns = [
        "model",
        "leaves at",
        "accuracy",
        "left at head 1 / 2 / 3",
        "processor ms",
        "speed",
        "median ms",
        "p99 ms",
    ]
    return table(columns, rows)


def embeddings(name: str) -> str:
    """Return each library's embeddings a second and latencies beside ours, by lengths; losses first."""
    rows = []
    has_kept = False  # of files written since int8 is a contestant
    for lengths, found in load(name).items():
        if not isinstance(found, dict) or "DVABatch" not in found:
            continue
        has_kept = "nearest_kept" in found["DVABatch"]
        for library, row in found.items():
            form = "DVABatch, int8" if library.endswith(", int8") and library != "DVABatch, int8" else "DVABatch"
            ours = found[form]["per_s"]  # int8 beside int8
            cells = [f"{row['processor_ms_a_text']:.1f}", f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}"]
            at = f"{row['rate_per_s']:.0f}/s"
            ratio = "" if library == "DVABatch" else f"{ours / row['per_s']:.2f}x"
            agrees = [f"{row['least_cosine']:.7f}", *([f"{row['nearest_kept']:.1%}"] if has_kept else [])]
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
        *(["nearest 10 kept"] if has_kept else []),
    ]
    return table(columns, [cells for _, cells in sorted(rows, key=lambda row: (row[1][0], row[0]))])


def instances(name: str) -> str:
    """Return each server's rate beside that of one process, latencies and processor time, by model; losses first."""
    found = load(name)["rows"]
    rates = {(row["model"], row["server"]): row["requests_per_s"] for row in found}
    rows = [
        (
            row["requests_per_s"] / rates[row["model"], "one process"],
            [row["model"], row["server"], number(row["requests_per_s"])],
            [
                f"{row['p50_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                number(row["front_cpu_us"]),
                number(row["workers_cpu_us"]),
            ],
        )
        for row in found
    ]
    lines = [[*left, f"{ratio:.2f}x", *right] for ratio, left, right in sorted(rows, key=lambda row: row[0])]
    columns = ["model", "server", "req/s", "to one process", "p50 ms", "p99 ms", "front us/req", "workers us/req"]
    return table(columns, lines)
