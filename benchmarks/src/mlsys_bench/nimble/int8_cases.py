"""Quantised forms of a net, each as its library's documentation advises, as functions of tensors.

Nimble takes what PT2E writes (torchao's ``X86InductorQuantizer``), ONNX Runtime a graph with QDQ pairs or dynamic
products, OpenVINO what NNCF writes. All are calibrated with the same inputs. A package is imported only here, when it
is its case's turn.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mlsys_nimble.nets.blocks import Net
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mlsys_bench.nimble import runtimes
from mlsys_bench.nimble.cases import Subject, onnx_file

Inputs = tuple[Tensor, ...]
Function = Callable[..., Sequence[Any]]  # of a net's inputs; gives its results as a flat list


def is_text(net: Net) -> bool:
    """Return whether all inputs are whole numbers, so that weights are in linears and rows may differ in range."""
    return not any(x.is_floating_point() for x in net.inputs)


def drawn(net: Net, count: int, seed: int) -> list[Inputs]:
    """Return inputs like the example's: normal numbers, or ids below the largest one; masks of ones stay."""
    draw = torch.Generator().manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=draw)
        most = int(x.max())
        return x if bool((x == most).all()) else torch.randint(0, most + 1, x.shape, generator=draw, dtype=x.dtype)

    return [tuple(like(x) for x in net.inputs) for _ in range(count)]


def by_pt2e(net: Net, calibration: Sequence[Inputs], *, is_dynamic: bool) -> nn.Module:
    """Return the net as PT2E quantises it for x86: a graph module in eager PyTorch."""
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    rules = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = rules.X86InductorQuantizer()
    quantizer.set_global(rules.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    graph = torch.export.export(net.module, net.inputs, strict=True).module()
    observed = pt2e.prepare_pt2e(graph, quantizer)
    for inputs in calibration:
        observed(*inputs)
    made: nn.Module = pt2e.convert_pt2e(observed)
    return made


def nimble(module: nn.Module, subject: Subject) -> Function:
    """Return the module prepared as a user prepares it."""
    from mlsys_nimble.module import Nimble

    model = Nimble(module).prepare(subject.net.inputs, num_threads=subject.num_threads)
    return lambda *inputs: tree_leaves(model(*inputs))


def onnx_static(subject: Subject, calibration: Sequence[Inputs]) -> Function:
    """Quantise to QDQ pairs, ``uint8`` by ``int8``, weights by channel; of a text net the linears alone."""
    package = importlib.import_module("onnxruntime.quantization")
    path = subject.cache_dir / "static.onnx"
    more = {"op_types_to_quantize": ["MatMul", "Gemm"]} if is_text(subject.net) else {}
    package.quantize_static(
        str(_for_quantisation(subject)),
        str(path),
        _Reader(subject, calibration),
        quant_format=package.QuantFormat.QDQ,
        per_channel=True,
        activation_type=package.QuantType.QUInt8,
        weight_type=package.QuantType.QInt8,
        **more,
    )
    return runtimes.onnx_runtime(path, subject.num_threads)


def onnx_dynamic(subject: Subject, _: Sequence[Inputs]) -> Function:
    """Quantise the linears with scales of the call, weights ``int8`` by channel."""
    package = importlib.import_module("onnxruntime.quantization")
    path = subject.cache_dir / "dynamic.onnx"
    package.quantize_dynamic(
        str(_for_quantisation(subject)), str(path), per_channel=True, weight_type=package.QuantType.QInt8
    )
    return runtimes.onnx_runtime(path, subject.num_threads)


def openvino(subject: Subject) -> Function:
    """Run the float net."""
    package = importlib.import_module("openvino")
    return runtimes.openvino(package.Core().read_model(str(onnx_file(subject))), subject.num_threads)


def openvino_static(subject: Subject, calibration: Sequence[Inputs]) -> Function:
    """Quantise by NNCF with bias correction; a text net as a transformer."""
    package = importlib.import_module("openvino")
    nncf = importlib.import_module("nncf")
    nncf.set_log_level("ERROR")
    model = package.Core().read_model(str(onnx_file(subject)))
    data = nncf.Dataset([[x.numpy() for x in inputs] for inputs in calibration])
    more = {"model_type": nncf.ModelType.TRANSFORMER} if is_text(subject.net) else {}
    quantised = nncf.quantize(model, data, subset_size=len(calibration), **more)
    return runtimes.openvino(quantised, subject.num_threads)


class _Reader:
    """Calibration inputs for ONNX Runtime: a feed at a time, then None."""

    def __init__(self, subject: Subject, calibration: Sequence[Inputs]) -> None:
        names = [one.name for one in runtimes.session(onnx_file(subject), 1).get_inputs()]
        feeds = ({name: x.numpy() for name, x in zip(names, inputs, strict=True)} for inputs in calibration)
        self._feeds = itertools.chain(feeds, itertools.repeat(None))

    def get_next(self) -> dict[str, Any] | None:
        """Return the next feed."""
        return next(self._feeds)


def _for_quantisation(subject: Subject) -> Path:
    """Return the ONNX file with shapes inferred and constants folded, as the quantiser wants it."""
    shapes = importlib.import_module("onnxruntime.quantization.shape_inference")
    source = onnx_file(subject)
    path = subject.cache_dir / "for-quantisation.onnx"
    shapes.quant_pre_process(str(source), str(path), skip_symbolic_shape=True)
    return path
