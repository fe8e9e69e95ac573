"""Forms of a net in bf16, as functions of float32 tensors; a package is imported only when it is its case's turn."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from mlsys_nimble.nets.blocks import Net
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mlsys_bench.nimble import runtimes
from mlsys_bench.nimble.accuracy import AUTOCAST, BF16, COMPILED, FLOAT, PAIRS, TORCH, WEIGHTS
from mlsys_bench.nimble.cases import Subject, exported, in_channels_last, is_image, onnx_file
from mlsys_bench.nimble.int8_cases import Function
from mlsys_bench.nimble.summary import OURS


class Halves(nn.Module):
    """A module whose parameters are bf16, between float32 inputs and results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).bfloat16()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module on rounded inputs; whole numbers stay."""
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
    from mlsys_nimble.module import Nimble

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
