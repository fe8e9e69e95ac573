"""Distance of results from a net's in float64: eager PyTorch's, and Nimble's by its largest Winograd tile.

The largest difference over the largest value. Weights are random, and deep nets with random weights amplify rounding:
eager's own distance says how much.

    python benchmarks/nimble/exactness.py
    python benchmarks/nimble/exactness.py resnet50 bert-base
"""

from __future__ import annotations

import argparse

import torch
from mlsys_bench.nimble.nets import exact_results, relative_difference
from mlsys_nimble import Nimble
from mlsys_nimble.nets.resolve import load_model

NETS = ("resnet20-cifar", "resnet50", "inception-v3", "darts")
TILES = (0, 2, 4)


def main() -> None:
    """Print a line for each net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=NETS, help="as mlsys nimble explain takes them")
    print(f"{'net':16} {'eager':>9}" + "".join(f" {f'winograd {tile}':>11}" for tile in TILES))
    for name in parser.parse_args().nets:
        net = load_model(name)
        with torch.no_grad():
            expected = exact_results(net)
            found = [relative_difference([net.module(*net.inputs)], expected)]
            for tile in TILES:
                replayed = Nimble(net.module).prepare(net.inputs, winograd=tile)(*net.inputs)
                found.append(relative_difference([replayed], expected))
        print(f"{name:16} {found[0]:9.1e}" + "".join(f" {each:11.1e}" for each in found[1:]), flush=True)


if __name__ == "__main__":
    main()
