"""Distance of results from a net's in float64: eager PyTorch's, and Nimble's by its largest Winograd tile.

The largest difference over the largest value. Weights are random, and deep nets with random weights amplify rounding:
eager's own distance says how much.

    mlsys bench nimble-exactness nets=resnet50,bert-base
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mlsys_core.report import Section, Table
from mlsys_nimble import Nimble
from mlsys_nimble.nets.resolve import load_model

from mlsys_bench.nimble.nets import exact_results, relative_difference

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

NETS = ("resnet20-cifar", "resnet50", "inception-v3", "darts")
TILES = (0, 2, 4)


def run(context: BenchContext, *, nets: tuple[str, ...] = NETS) -> Section:
    """Compare; ``nets`` are named as ``mlsys nimble explain`` takes them."""
    figures: dict[str, dict[str, float]] = {}
    for name in nets[:1] if context.is_quick else nets:
        net = load_model(name)
        with torch.no_grad():
            expected = exact_results(net)
            found = {"eager": relative_difference([net.module(*net.inputs)], expected)}
            for tile in TILES:
                replayed = Nimble(net.module).prepare(net.inputs, winograd=tile)(*net.inputs)
                found[f"winograd {tile}"] = relative_difference([replayed], expected)
        figures[name] = found
    columns = ["net", "eager", *(f"winograd {tile}" for tile in TILES)]
    rows = [[name, *(f"{each:.1e}" for each in found.values())] for name, found in figures.items()]
    return Section("Nimble: distance from float64", [Table(columns, rows)], data={"nets": figures})
