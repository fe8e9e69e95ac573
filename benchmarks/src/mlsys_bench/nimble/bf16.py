"""The suite ``nimble-bf16``: nets in bf16 beside torch's, OpenVINO's and ONNX Runtime's, errors beside speed."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mlsys_nimble.module import Nimble
from mlsys_nimble.nets.blocks import Net
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mlsys_bench.nimble import EAGER as TORCH
from mlsys_bench.nimble import OURS, accuracy, runtimes
from mlsys_bench.nimble.accuracy import FLOAT, NUM_HELD_OUT, QUICK_NETS, Accuracy, Forms, Function, drawn, errors
from mlsys_bench.nimble.cases import Subject, exported, in_channels_last, is_image, left_out_of_quick, onnx_file
from mlsys_bench.nimble.races import subject_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

BF16, AUTOCAST, WEIGHTS, PAIRS = "bf16", "autocast", "bf16 weights", "bf16 pairs"
COMPILED = "torch.compile"
NETS = ("mobilenet-v2", "resnet50", "minilm-l6", "bert-base", "timm:vit_base_patch16_224")
FORMS = Forms(
    "nimble-bf16",
    "in bf16",
    (f"{OURS}, {PAIRS}", f"{OURS}, {WEIGHTS}"),
    (
        *(f"{peer}, {form}" for peer in (TORCH, COMPILED) for form in (BF16, AUTOCAST)),
        f"ONNX Runtime, {BF16}",
        f"OpenVINO, {BF16}",
    ),
    "eager float32",
)
FLOATS = tuple(f"{name}, {FLOAT}" for name in (TORCH, "ONNX Runtime", "OpenVINO", OURS))


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in bf16, beside the float32 of all but the compiler.

    A run that was cut goes on from ``nimble-bf16.jsonl``.

    Args:
        context: The suite's context; quick: without torch.compile.
        nets: As for the suite ``nimble``; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: As for the suite ``nimble``.
        trust_code: As for the suite ``nimble``.
    """
    chosen = nets or (QUICK_NETS if context.is_quick else NETS)
    return accuracy.race_forms(context, FORMS, f"{__name__}:race_net", chosen, peers, trust_code)


def race_net(model: str, budget_s: float, is_quick: bool, **setup: Any) -> dict[str, dict[str, Any]]:
    """Race on one net in this process; return by case the fields of the outcomes and the errors."""
    subject = subject_of(model, **setup)
    held_out = drawn(subject.net, NUM_HELD_OUT // (4 if is_quick else 1), seed=2)

    def make(name: str) -> Function:
        if is_quick and name.startswith(COMPILED):
            left_out_of_quick(subject)
        return function_of(name, subject)

    def measure(functions: Mapping[str, Function], names: Sequence[str]) -> Accuracy:
        wanted = [tree_leaves(subject.net.module(*inputs)) for inputs in held_out]
        return {
            name: errors([(functions[name](*inputs), one) for inputs, one in zip(held_out, wanted, strict=True)])
            for name in names
        }

    names = (*FLOATS, *FORMS.peers, *FORMS.ours)
    return accuracy.race_net(model, subject, names, make, measure=measure, budget_s=budget_s)


class Halves(nn.Module):
    """A module whose parameters are bf16, between float32 inputs and results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).bfloat16()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module on rounded inputs; integers stay."""
        return _as(torch.float32, self.module(*_as(torch.bfloat16, inputs)))


class Autocast(nn.Module):
    """A float32 module under autocast to bf16, with float32 results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module; torch keeps the weights' rounded copies only within the call."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self.module(*inputs)
        return _as(torch.float32, found)


def _as(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def function_of(name: str, subject: Subject) -> Function:
    """Make the form of this name ready.

    Raises:
        Exception: whatever its library raises.
    """
    contestant, form = name.split(", ")
    if contestant == OURS:
        return _nimble(subject, {FLOAT: "fp32", WEIGHTS: "bf16", PAIRS: "bf16-pairs"}[form])
    if contestant == "ONNX Runtime":
        if form == FLOAT:
            return runtimes.onnx_runtime(onnx_file(subject), subject.num_threads)
        halves = Net(Halves(subject.net.module), subject.net.inputs)
        path = exported(halves, subject.cache_dir / f"bf16-{torch.__version__}.onnx")
        return runtimes.onnx_runtime(path, subject.num_threads)
    if contestant == "OpenVINO":
        model = importlib.import_module("openvino").Core().read_model(str(onnx_file(subject)))
        return runtimes.openvino(model, subject.num_threads, "f32" if form == FLOAT else "bf16")
    return _torch(contestant, form, subject)


def _nimble(subject: Subject, precision: str) -> Function:
    net = subject.net
    model = Nimble(net.module).prepare(net.inputs, num_threads=subject.num_threads, precision=precision)
    return lambda *inputs: tree_leaves(model(*inputs))


def _torch(contestant: str, form: str, subject: Subject) -> Function:
    """Return eager's or the compiler's form; images channels last."""
    assert contestant in (TORCH, COMPILED)
    net = in_channels_last(subject) if is_image(subject.net) else subject.net
    module: Any = {FLOAT: lambda given: given, BF16: Halves, AUTOCAST: Autocast}[form](net.module)
    if contestant == COMPILED:
        module = torch.compile(copy.deepcopy(module), options={"freezing": True})
    layout: dict[str, Any] = {"memory_format": torch.channels_last}
    return lambda *inputs: tree_leaves(module(*(x.to(**layout) if x.dim() == 4 else x for x in inputs)))
