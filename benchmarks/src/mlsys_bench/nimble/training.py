"""A training step, forward and backward, by eager PyTorch, torch.compile and Nimble: milliseconds, and gradients first.

    mlsys bench nimble-training nets=resnet20-cifar seconds=20 --threads 2
    mlsys bench nimble-training nets=vit-small,gpt2-small batch=8 --threads 2

Each net that is done is a line of ``nimble-training.jsonl`` in the context's folder, until all are done: a run that was
cut goes on.

Every case gets its own copy of the net and the same batch. Before anything is timed, the gradients of a step are
compared with those of a step in float64, and with eager's own distance from it; for that comparison activations with
kinks are smooth ones, since in single precision a few of a million units come to lie on the other side of a kink, in
eager no less than elsewhere, and each changes gradients by more than all rounding does. Cases then take turns;
the figure is the median over all turns. Optimisers are left out: they are the same for all. On a machine that others
use as well, ``--threads 1 clock=processor`` counts the process's own time only.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.profiling.turns import take_turns
from mlsys_nimble import Nimble
from torch import Tensor, nn
from torch.nn import functional

from mlsys_bench.harness.journal import Journal
from mlsys_bench.harness.race import Outcome, speed_up, timed
from mlsys_bench.harness.text import rows_section
from mlsys_bench.nimble.papers import net as net_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


TOLERANCE = 1e-5  # of the largest gradient; or three times as far from float64 as eager is
CASES = ("eager", "eager, channels last", "torch.compile", "Nimble")
QUICK_CASES = ("eager", "Nimble")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True)
class Row:
    """One case on one net."""

    net: str
    case: str
    batch: int
    difference: float  # of the gradients from float64's, relative to the largest
    median_ms: float
    best_ms: float
    over_eager: float | None  # the median of ratios within rounds


def step_of(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a training step without its optimiser."""

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        functional.cross_entropy(call(x), target).backward()  # type: ignore[no-untyped-call]

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


def steps_of(
    cases: Sequence[str], module: nn.Module, x: Tensor, target: Tensor
) -> dict[str, tuple[nn.Module, Callable[[], None]]]:
    """Return each case's own copy of the module, and a step of it."""
    found: dict[str, tuple[nn.Module, Callable[[], None]]] = {}
    for name in cases:
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


def compare(name: str, cases: Sequence[str], module: nn.Module, x: Tensor, target: Tensor) -> dict[str, float]:
    """Return the distance of each case's gradients from float64's.

    Raises:
        MlsysError: further than :data:`TOLERANCE`, and than three times eager's.
    """
    exact = copy.deepcopy(module).double()
    step_of(exact, exact, x.double() if x.is_floating_point() else x, target)()
    found: dict[str, float] = {}
    for case, (own, step) in steps_of(cases, module, x, target).items():
        step()
        found[case] = difference(gradients(own), gradients(exact))
        if found[case] > max(TOLERANCE, 3 * found["eager"]):
            raise MlsysError(f"{name}: {case}'s gradients differ from float64's by {found[case]:.1e}")
    return found


def race(name: str, *, cases: Sequence[str], batch: int, seconds: float, clock: Callable[[], float]) -> list[Row]:
    """Measure all cases on one net."""
    torch.manual_seed(0)
    module, x, target = NETS[name](batch)
    module.train().requires_grad_(True)
    found = compare(name, cases, smooth(copy.deepcopy(module)), x, target)
    steps = {case: step for case, (_, step) in steps_of(cases, module, x, target).items()}
    for step in steps.values():
        step()
    turns = take_turns(steps, budget_s=seconds, turn_s=0.5, clock=clock)
    outcomes = {case: timed(Outcome("timed"), own) for case, own in turns.items()}
    rows = []
    for case, one in outcomes.items():
        milliseconds = [sample * 1e3 for sample in one.samples_s]
        over = speed_up(one, outcomes["eager"])
        rows.append(Row(name, case, batch, found[case], median(milliseconds), min(milliseconds), over))
    return rows


def run(
    context: BenchContext,
    *,
    nets: tuple[str, ...] = ("resnet20-cifar", "mobilenet-v2", "efficientnet-b0", "transformer"),
    batch: int = 32,
    seconds: float = 20.0,
    clock: str = "wall",
) -> Section:
    """Race on each net.

    Args:
        context: The suite's context.
        nets: Names in :data:`mlsys_bench.nimble.training.NETS`.
        batch: Examples of a step.
        seconds: Of turns for each net.
        clock: ``wall``, or ``processor`` for the process's own time, with one thread.
    """
    if unknown := set(nets) - set(NETS):
        raise InvalidInputError(f"no net is called {min(unknown)!r}: there are {', '.join(NETS)}")
    if clock not in CLOCKS or (clock == "processor" and context.num_threads > 1):
        raise InvalidInputError(
            "clock is wall, or processor with --threads 1: threads that wait use processor time too"
        )
    if context.is_quick:
        nets, batch, seconds = nets[:1], 4, 0.0
    torch.set_num_threads(context.num_threads)
    setting = {"threads": context.num_threads, "batch": batch, "seconds": seconds, "clock": clock}
    setting["commit"] = describe_environment().get("commit")
    journal = Journal(context.output_dir / "nimble-training.jsonl", setting, key="net")
    rows = []
    for name in nets:
        if name not in journal.finished:
            context.console.print(f"{name} ...")
            cases = QUICK_CASES if context.is_quick else CASES
            found = race(name, cases=cases, batch=batch, seconds=seconds, clock=CLOCKS[clock])
            journal.add({"net": name, "rows": [asdict(row) for row in found]})
        rows += [Row(**row) for row in journal.finished[name]["rows"]]
    journal.path.unlink(missing_ok=True)
    return rows_section("Nimble: training steps", rows, threads=context.num_threads, clock=clock)


Example = tuple[nn.Module, Tensor, Tensor]  # module, input, target of cross_entropy
CLASSES = 10
NUM_TOKENS = 64


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


class _Logits(nn.Module):
    """Model of transformers that returns its logits, classes in dimension 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map images to ``[N, classes]``, or tokens ``[N, T]`` to ``[N, vocabulary, T]``."""
        logits: Tensor = self.model(x).logits
        return logits.movedim(-1, 1)


def _image_net(name: str, size: int, batch: int) -> Example:
    module = net_of(name).module
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.1
    return module, torch.randn(batch, 3, size, size), _classes(batch)


def _transformer(batch: int) -> Example:
    return Transformer(), torch.randint(0, 1000, (batch, NUM_TOKENS)), _classes(batch)


def vit(batch: int, **shape: int) -> Example:
    """Return a vision transformer (Dosovitskiy et al. 2021), ViT-S/16 on 224 x 224 unless ``shape`` says otherwise."""
    transformers: Any = importlib.import_module("transformers")
    small = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    config = transformers.ViTConfig(num_labels=CLASSES, **{**small, **shape})
    image = torch.randn(batch, 3, config.image_size, config.image_size)
    return _Logits(transformers.ViTForImageClassification(config)), image, _classes(batch)


def gpt2(batch: int, **shape: int) -> Example:
    """Return GPT-2 small (Radford et al. 2019) on 64 tokens and the next of each, without dropout."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **shape)
    tokens = torch.randint(0, config.vocab_size, (batch, NUM_TOKENS + 1))
    return _Logits(transformers.GPT2LMHeadModel(config)), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _classes(batch: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch,))


NETS: dict[str, Callable[[int], Example]] = {
    "resnet20-cifar": partial(_image_net, "resnet20-cifar", 32),
    "mobilenet-v2": partial(_image_net, "mobilenet-v2", 32),
    "efficientnet-b0": partial(_image_net, "efficientnet-b0", 32),
    "transformer": _transformer,
    "vit-small": vit,
    "gpt2-small": gpt2,
}
