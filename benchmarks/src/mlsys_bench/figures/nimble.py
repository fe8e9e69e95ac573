"""Nimble's tables: nets against peers, and training steps."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

from mlsys_bench.figures.results import load, number, processor, table

_CASES = ("eager", "torch.compile", "AOTInductor", "ONNX Runtime", "OpenVINO", "Nimble, one stream", "Nimble")
_NETS = {
    "resnet20-cifar": "ResNet-20, 32 x 32",
    "mobilenet-v2": "MobileNetV2, 32 x 32",
    "efficientnet-b0": "EfficientNet-B0, 32 x 32",
    "transformer": "transformer, 4 layers of 128, 64 tokens",
    "vit-small": "ViT-S/16, 224 x 224, batch 8",
    "gpt2-small": "GPT-2 small, 64 tokens, batch 8",
}


def nets(name: str) -> str:
    """Return the median milliseconds of each net under each case that was timed, and the geometric means."""
    found = load(name)["nets"]
    timed = [case for case in _CASES if any(_is_timed(net, case) for net in found.values())]
    rows = [
        [
            title,
            *(_milliseconds(net, case) for case in timed),
            f"**{net['over_best_peer']:.2f}x**",
            f"{net['over_eager']:.1f}x",
            f"{net['cases']['Nimble']['prepare_s']:.1f}",
        ]
        for title, net in found.items()
    ]
    means = [geometric_mean(net[key] for net in found.values()) for key in ("over_best_peer", "over_eager")]
    rows.append(["geometric mean", *("" for _ in timed), f"**{means[0]:.2f}x**", f"{means[1]:.2f}x", ""])
    return table(["net", *timed, "over the best peer", "over eager", "prepare, s"], rows)


def _is_timed(net: dict[str, Any], case: str) -> bool:
    return bool(net["cases"].get(case, {}).get("status") == "timed")


def _milliseconds(net: dict[str, Any], case: str) -> str:
    return number(net["cases"][case]["median_s"] * 1e3) if _is_timed(net, case) else "-"


def training(*names: str) -> str:
    """Return the milliseconds of a training step, by net, machine and threads."""
    columns = ["net", "machine", "threads", "eager", "eager, channels last", "torch.compile", "Nimble"]
    rows = sorted((row for name in names for row in _steps(name)), key=lambda row: list(_NETS).index(row[0]))
    titled = [[_NETS[row[0]], *row[1:]] for row in rows]
    return table([*columns, "over eager", "over torch.compile", "gradients: eager", "Nimble"], titled)


def _steps(name: str) -> Iterator[list[str]]:
    record = load(name)
    for net in dict.fromkeys(row["net"] for row in record["rows"]):
        rows = {row["case"]: row for row in record["rows"] if row["net"] == net}
        ms = {case: row["median_ms"] for case, row in rows.items()}
        yield [
            net,
            processor(name),
            str(record["threads"]),
            *(number(ms[case]) if case in ms else "-" for case in ("eager", "eager, channels last", "torch.compile")),
            f"**{number(ms['Nimble'])}**",
            f"{ms['eager'] / ms['Nimble']:.2f}x",
            f"{ms['torch.compile'] / ms['Nimble']:.2f}x",
            *(f"{rows[case]['difference']:.1e}".replace("e-0", "e-") for case in ("eager", "Nimble")),
        ]


def memory(name: str) -> str:
    """Return the resident MiB of prepared models by net and contestant."""
    titles = {"nimble": "Nimble", "nimble, loaded": "Nimble, loaded from its file", "onnxruntime": "ONNX Runtime"}
    keys = ("weights", "beyond_imports", "beyond_module", "after_delete", "peak")
    rows = [
        [row["net"], titles[row["contestant"]], *(number(row[key]) for key in keys), row["ratio"]]
        for row in load(name)["rows"]
    ]
    columns = ["weights", "kept", "kept beside torch's module", "left after del", "peak", "kept, to ONNX Runtime"]
    return table(["net", "", *columns], rows)


def weights(name: str) -> str:
    """Return the milliseconds of a call by the way changed weights are noticed, and each way's share of it."""
    found = load(name)["rows"]
    kinds = [kind for kind in ("versions", "pages", "samples", "bytes") if f"least_{kind}_ms" in found[0]]
    rows = []
    for row in found:
        ms = {kind: row[f"least_{kind}_ms"] for kind in kinds}
        over = (f"{100 * (ms[kind] / ms['versions'] - 1):.0f} %" for kind in kinds[1:])
        rows.append([row["net"].rpartition(":")[2], *(number(value) for value in ms.values()), *over])
    return table(["net", *kinds, *(f"{kind}, more" for kind in kinds[1:])], rows)


def gpu(name: str) -> str:
    """Return a row for each case of each race on a GPU: median milliseconds, and how many times slower than Nimble."""
    rows: list[list[str]] = []
    for race in load(name)["races"]:
        ours = race["outcomes"]["Nimble"]["median_s"]
        for case, outcome in race["outcomes"].items():
            ratio = f"{outcome['median_s'] / ours:.2f}x"
            rows.append([race["net"], case, number(1e3 * outcome["median_s"]), ratio, outcome["note"]])
    return table(["net, batch 1", "case", "ms", "over Nimble", "memory"], rows)
