"""The races of ``make bench-gpu``: the nets of figure 3.8, figure 3.9 and table 3.1 on a CUDA device.

Cases take turns on one net at a time; results, and gradients of training, are compared with eager's before times
count. A call is timed by the host's clock, with the device idle before and after. Everything is float32 without TF32,
as on the paper's V100.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.device import CudaDevice, device_kind
from mlsys_core.device.cuda_graphs import current_device, is_usable, reserved_nbytes
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import Section, Table
from mlsys_nimble.module import Nimble
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from mlsys_bench.harness.race import Case, Outcome, race
from mlsys_bench.harness.text import status_of, times_table, untimed
from mlsys_bench.nimble.papers import net as net_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


INFERENCE = (  # figure 3.8 and table 3.1
    *("resnet50", "resnet101", "inception-v3", "mobilenet-v2", "nasnet-mobile", "nasnet-large"),
    *("efficientnet-b0", "efficientnet-b5", "darts", "amoebanet"),
)
TRAINING = (  # figure 3.9: the net, and the size of its images (0: as it comes)
    *(("resnet50", 224), ("resnet50", 32), ("resnet101", 32), ("mobilenet-v2", 32)),
    *(("efficientnet-b0", 32), ("bert-base", 0)),
)
TRAINING_BATCH = 32
TOLERANCE = 1e-3  # of the largest number, beside eager: algorithms of convolutions differ
SECONDS, QUICK_SECONDS = 20.0, 4.0  # of turns for each net

Maker = Callable[[nn.Module, Sequence[Tensor]], Callable[..., Any]]


def compiled(mode: str) -> Maker:
    """Return the maker of torch.compile in one of its modes."""
    return lambda module, _: torch.compile(module, mode=mode)


def nimble(*, use_multi_stream: bool, training: bool = False) -> Maker:
    """Return the maker of Nimble as a user calls it."""

    def make(module: nn.Module, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        return Nimble(module).prepare(tuple(inputs), training=training, use_multi_stream=use_multi_stream)

    return make


def makers(*, training: bool, is_quick: bool) -> dict[str, Maker]:
    """Return the makers of all cases, eager first; quick runs leave out ``max-autotune``, which takes minutes a net."""
    found: dict[str, Maker] = {"eager": lambda module, _: module, "reduce-overhead": compiled("reduce-overhead")}
    if not is_quick:
        found["max-autotune"] = compiled("max-autotune")
    found["Nimble, one stream"] = nimble(use_multi_stream=False, training=training)
    found["Nimble"] = nimble(use_multi_stream=True, training=training)
    return found


def run_on_gpu(context: BenchContext, nets: Sequence[str] = ()) -> Section:
    """Run all races, or those of ``nets``, and report.

    Raises:
        InvalidInputError: the context's device is not a CUDA device that torch sees, or no race has such a net.
    """
    if unknown := set(nets) - {*INFERENCE, *(name for name, _ in TRAINING)}:
        raise InvalidInputError(f"on {context.device} there are no races of {', '.join(sorted(unknown))}")
    if device_kind(context.device).name != "cuda" or not is_usable():
        raise InvalidInputError(f"nimble's benchmark runs on cpu or cuda, and torch sees no {context.device!r} here")
    cuda = CudaDevice(torch.device(context.device).index or 0)
    device, seconds = torch.device(cuda.torch_name), QUICK_SECONDS if context.is_quick else SECONDS
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    races: list[Race] = []
    for name in (name for name in INFERENCE if not nets or name in nets):
        context.console.print(f"{name} ...")
        races.append(Race(name, is_training=False, outcomes=infer(name, device, seconds, context.is_quick)))
    for name, size in ((name, size) for name, size in TRAINING if not nets or name in nets):
        title = f"{name}, {size} x {size}" if size else name
        context.console.print(f"training {title} ...")
        races.append(Race(title, is_training=True, outcomes=train(name, size, device, seconds, context.is_quick)))
    return report(races, device=torch.cuda.get_device_name(cuda.index))


def infer(name: str, device: torch.device, seconds: float, is_quick: bool) -> dict[str, Outcome]:
    """Race on one net at batch 1."""
    module, inputs = net_of(name)
    module.to(device)
    data = tuple(x.to(device) for x in inputs)

    def ready(make: Maker) -> Callable[[], list[Tensor]]:
        call = make(copy.deepcopy(module), data)

        def answer() -> list[Tensor]:
            with torch.inference_mode():
                return tree_leaves(call(*data))

        return answer

    return race_on(
        {key: partial(ready, make) for key, make in makers(training=False, is_quick=is_quick).items()}, seconds
    )


def train(name: str, size: int, device: torch.device, seconds: float, is_quick: bool) -> dict[str, Outcome]:
    """Race on a step of one net at batch 32, forward and backward; its results are all gradients."""
    module, inputs = net_of(name, batch=TRAINING_BATCH)
    module.to(device).train().requires_grad_(True)
    data = tuple(x.to(device) for x in inputs)
    if size:
        data = (torch.randn(TRAINING_BATCH, 3, size, size, device=device),)

    def ready(make: Maker, dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
        own = copy.deepcopy(module).to(dtype)
        given = tuple(x.to(dtype) if x.is_floating_point() else x for x in data)
        call = make(own, given)

        def step() -> list[Tensor]:
            for parameter in own.parameters():
                parameter.grad = None
            result = tree_leaves(call(*given))[-1]
            functional.cross_entropy(result, torch.zeros(len(result), dtype=torch.int64, device=device)).backward()  # type: ignore[no-untyped-call]
            return [parameter.grad for parameter in own.parameters() if parameter.grad is not None]

        return step

    cases = makers(training=True, is_quick=is_quick)
    rounding = difference(ready(cases["eager"])(), ready(cases["eager"], torch.float64)())
    return race_on(
        {key: partial(ready, make) for key, make in cases.items()}, seconds, tolerance=max(TOLERANCE, 4 * rounding)
    )


def race_on(
    makers: dict[str, Callable[[], Callable[[], list[Tensor]]]],
    seconds: float,
    *,
    tolerance: float = TOLERANCE,
    synchronize: Callable[[], None] | None = None,
    reserved: Callable[[], int] | None = None,
) -> dict[str, Outcome]:
    """Race cases on a device; the first one's results are what the others' are compared with.

    Args:
        makers: Each makes a call.
        seconds: Seconds of turns.
        tolerance: Largest difference; in training as large as eager's rounding, which nets of random weights magnify.
        synchronize: Waits until the device is idle; None: torch's current CUDA device.
        reserved: Bytes that the device's allocator holds, with nothing kept that is free; None: of that device.
    """
    synchronize = synchronize or current_device().synchronize
    reserved = reserved or (lambda: reserved_nbytes(current_device(), gives_back=True))

    def ready(make: Callable[[], Callable[[], list[Tensor]]]) -> Case:
        before = reserved()
        call = make()

        def timed() -> list[Tensor]:
            results = call()
            synchronize()
            return results

        timed()
        note = f"{(reserved() - before) / 2**20:.0f} MiB reserved"
        return Case(timed, lambda results: [each.detach().clone() for each in results], note)

    return race(
        {name: partial(ready, make) for name, make in makers.items()},
        difference=difference,
        tolerance=tolerance,
        turn_s=0.3,
        budget_s=seconds,
    )


def difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference over the largest number."""
    pairs = list(zip(results, expected, strict=True))
    largest = max((b.double().abs().max().item() for _, b in pairs if b.numel()), default=0.0)
    apart = max(((a.double() - b.double()).abs().max().item() for a, b in pairs if b.numel()), default=0.0)
    return apart / largest if largest else apart


@dataclass(frozen=True, slots=True)
class Race:
    """Outcomes of all cases on one net."""

    net: str
    is_training: bool
    outcomes: dict[str, Outcome]


def report(races: Sequence[Race], *, device: str) -> Section:
    """Return tables of times and memory, a line for each case that was not timed, and everything as data."""
    by_net = {race.net: race.outcomes for race in races}
    captions = {"Inference at batch 1 (figure 3.8, table 3.1)": False, f"Training at batch {TRAINING_BATCH}": True}
    body: list[str | Table] = [
        times_table({race.net: race.outcomes for race in races if race.is_training == kind}, "median ms", caption)
        for caption, kind in captions.items()
    ]
    names = list(dict.fromkeys(name for race in races for name in race.outcomes))
    rows = [
        [race.net, *(race.outcomes[name].note if name in race.outcomes else "-" for name in names)] for race in races
    ]
    memory = "What each added to the device's reserved memory, beside the net's own copy"
    body += [Table(["net", *names], rows, memory), *untimed(by_net)]
    data = {
        "device": device,
        "races": [
            {
                "net": race.net,
                "is_training": race.is_training,
                "outcomes": {name: one.to_json() for name, one in race.outcomes.items()},
            }
            for race in races
        ],
    }
    return Section(f"Nimble on {device}", body, status=status_of(by_net, "Nimble"), data=data)
