"""A training step, forward and backward, by eager PyTorch, torch.compile and Nimble: milliseconds, and gradients first.

    python benchmarks/nimble/training.py [--net resnet20-cifar ...] [--threads 2] [--seconds 20] [--json FILE]

Every contestant gets its own copy of the net and the same batch. Before anything is timed, the gradients of a step are
compared with those of a step in float64, and with eager's own distance from it; for that comparison activations with
kinks are smooth ones, since in single precision a few of a million units come to lie on the other side of a kink, in
eager no less than elsewhere, and each changes gradients by more than all rounding does. Contestants then take turns;
the figure is the median over all turns. Optimisers are left out: they are the same for all. On a machine that others
use as well, ``--threads 1 --clock processor`` counts the process's own time only.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mlsys_core.environment import describe_environment
from mlsys_core.profiling.turns import take_turns
from mlsys_nimble import Nimble
from mlsys_nimble.nets.registry import net as net_of
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-5  # of the largest gradient; or three times as far from float64 as eager is
CLASSES = 10
CONTESTANTS = ("eager", "eager, channels last", "torch.compile", "Nimble")


class Transformer(nn.Module):
    """A small encoder over 64 tokens: four layers of width 128."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[N, 64]`` of int64 to ``[N, 10]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


def _image_net(name: str, size: int) -> Callable[[int], tuple[nn.Module, Tensor]]:
    def make(batch: int) -> tuple[nn.Module, Tensor]:
        module = net_of(name).module
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 0.1
        return module, torch.randn(batch, 3, size, size)

    return make


NETS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "resnet20-cifar": _image_net("resnet20-cifar", 32),
    "mobilenet-v2": _image_net("mobilenet-v2", 32),
    "efficientnet-b0": _image_net("efficientnet-b0", 32),
    "transformer": lambda batch: (Transformer(), torch.randint(0, 1000, (batch, 64))),
}


@dataclass(frozen=True)
class Row:
    """One contestant on one net."""

    net: str
    contestant: str
    batch: int
    difference: float  # of the gradients from float64's, relative to the largest
    median_ms: float
    best_ms: float


def step_of(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a training step without its optimiser."""

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        functional.cross_entropy(call(x), target).backward()

    return step


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters, in float64."""
    return [parameter.grad.double() for parameter in module.parameters() if parameter.grad is not None]


def difference(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest difference over the largest gradient."""
    largest = max(gradient.abs().max().item() for gradient in exact)
    return max((a - b).abs().max().item() for a, b in zip(ours, exact, strict=True)) / largest


def smooth(module: nn.Module) -> nn.Module:
    """Replace activations that have kinks by SiLU, in place, and return the module."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU | nn.ReLU6):
            setattr(module, name, nn.SiLU())
        else:
            smooth(child)
        if isinstance(child, nn.TransformerEncoderLayer):
            child.activation, child.activation_relu_or_gelu = functional.silu, 0
    return module


def contestants(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, tuple[nn.Module, Callable[[], None]]]:
    """Return each contestant's own copy of the module, and a step of it."""
    found: dict[str, tuple[nn.Module, Callable[[], None]]] = {}
    for name in CONTESTANTS:
        own, data = copy.deepcopy(module), x
        call: Callable[[Tensor], Tensor] = own
        if name == "eager, channels last":
            if x.dim() != 4:
                continue
            own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            data = x.contiguous(memory_format=torch.channels_last)
        elif name == "torch.compile":
            call = torch.compile(own)
        elif name == "Nimble":
            call = Nimble(own).prepare(x, training=True)
        found[name] = own, step_of(call, own, data, target)
    return found


def compare(name: str, module: nn.Module, x: Tensor, target: Tensor) -> dict[str, float]:
    """Return the distance of each contestant's gradients from float64's.

    Raises:
        SystemExit: further than :data:`TOLERANCE`, and than three times eager's.
    """
    exact = copy.deepcopy(module).double()
    step_of(exact, exact, x.double() if x.is_floating_point() else x, target)()
    found: dict[str, float] = {}
    for contestant, (own, step) in contestants(module, x, target).items():
        step()
        found[contestant] = difference(gradients(own), gradients(exact))
        if found[contestant] > max(TOLERANCE, 3 * found["eager"]):
            raise SystemExit(f"{name}: {contestant}'s gradients differ from float64's by {found[contestant]:.1e}")
    return found


def race(name: str, *, batch: int, seconds: float, clock: Callable[[], float]) -> list[Row]:
    """Measure all contestants on one net."""
    torch.manual_seed(0)
    module, x = NETS[name](batch)
    module.train().requires_grad_(True)
    target = torch.randint(0, CLASSES, (batch,))
    found = compare(name, smooth(copy.deepcopy(module)), x, target)
    steps = {contestant: step for contestant, (_, step) in contestants(module, x, target).items()}
    for step in steps.values():
        step()
    turns = take_turns(steps, budget_s=seconds, turn_s=0.5, clock=clock)
    samples = {name: [each for turn in own for each in turn] for name, own in turns.items()}
    return [Row(name, key, batch, found[key], median(times) * 1e3, min(times) * 1e3) for key, times in samples.items()]


def earlier(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rows of other nets that were written before under the same conditions."""
    if not arguments.json.exists():
        return []
    found = json.loads(arguments.json.read_text(encoding="utf-8"))
    if (found["threads"], found["clock"]) != (arguments.threads, arguments.clock):
        return []
    return [row for row in found["rows"] if row["net"] not in arguments.net]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", nargs="*", default=list(NETS), choices=list(NETS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of turns for each net")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--json", type=Path, help="rows of other nets in it stay, if threads and clock are the same")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.clock == "processor" and arguments.threads > 1:
        parser.error("several threads that wait use processor time too: --clock processor wants --threads 1")
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    rows: list[Row] = []
    print(f"{'net':16} {'contestant':22} {'difference':>10} {'median ms':>10} {'best ms':>9} {'over eager':>11}")
    for name in arguments.net:
        made = race(name, batch=arguments.batch, seconds=arguments.seconds, clock=clock)
        for row in made:
            over = f"{made[0].median_ms / row.median_ms:10.2f}x"
            times = f"{row.median_ms:10.2f} {row.best_ms:9.2f} {over}"
            print(f"{row.net:16} {row.contestant:22} {row.difference:10.1e} {times}", flush=True)
        rows += made
    if arguments.json:
        found = {
            "environment": describe_environment(),
            "threads": arguments.threads,
            "clock": arguments.clock,
            "rows": [*earlier(arguments), *(asdict(r) for r in rows)],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
