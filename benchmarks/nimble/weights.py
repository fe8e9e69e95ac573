"""Measure the cost per call of noticing that the model changed (docs/adr/0015): by bytes, and by versions.

Both live in one process and take turns. The fastest of all calls shows the cost of the check on a quiet machine.

    python benchmarks/nimble/weights.py [NET ...]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from mlsys_nimble import Nimble
from mlsys_nimble.nets.resolve import load_model

ROUNDS, CALLS = 40, 10


def main() -> None:
    """Print milliseconds of a call by net and option."""
    torch.set_num_threads(1)
    print("| net | least, versions | least, bytes | median, versions | median, bytes |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in sys.argv[1:] or ["mlp", "resnet20-cifar", "resnet50"]:
        net, inputs = load_model(name)
        models = [Nimble(net).prepare(inputs, weights=kind, num_threads=1) for kind in ("versions", "bytes")]
        samples: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for model, times in zip(models, samples, strict=True):
                model(*inputs)
                for _ in range(CALLS):
                    begin = time.perf_counter()
                    model(*inputs)
                    times.append((time.perf_counter() - begin) * 1e3)
        figures = [*map(min, samples), *map(statistics.median, samples)]
        print(f"| {name} | " + " | ".join(f"{figure:.4g}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
