"""The suite ``nimble-int8``: quantised nets beside ONNX Runtime's and OpenVINO's, accuracy beside speed.

Each form is made as its library's documentation advises. Nimble takes what PT2E writes (torchao's
``X86InductorQuantizer``), ONNX Runtime a graph with QDQ pairs or dynamic products, OpenVINO what NNCF writes. All are
calibrated with the same inputs. A package is imported only when it is its case's turn.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mlsys_nimble.module import Nimble
from mlsys_nimble.nets.blocks import Net
from torch import nn
from torch.utils._pytree import tree_leaves

from mlsys_bench.harness.race import Outcome
from mlsys_bench.nimble import OURS, accuracy, runtimes
from mlsys_bench.nimble.accuracy import (
    FLOAT,
    NUM_HELD_OUT,
    QUICK_NETS,
    Accuracy,
    Forms,
    Function,
    Inputs,
    distance,
    drawn,
    errors,
    race_forms,
)
from mlsys_bench.nimble.cases import Subject, onnx_file
from mlsys_bench.nimble.races import subject_of

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

NETS = ("mobilenet-v2", "resnet50", "minilm-l6", "bert-base")
CONTESTANTS = (OURS, "ONNX Runtime", "OpenVINO")
STATIC, DYNAMIC = "static", "dynamic"
FORMS = Forms(
    "nimble-int8",
    "in int8",
    (f"{OURS}, {STATIC}", f"{OURS}, {DYNAMIC}"),
    tuple(f"{peer}, {form}" for peer in CONTESTANTS[1:] for form in (STATIC, DYNAMIC)),
    "each one's own float32",
)
NUM_CALIBRATION = 8  # inputs; a quarter in quick runs
EAGER_TOLERANCE = 0.02  # Nimble's int8 from eager PyTorch's on the same graph, or thrice what moving it by 1e-6 does


def run(
    context: BenchContext, *, nets: tuple[str, ...] = (), peers: str | None = None, trust_code: bool = False
) -> Section:
    """Race on each net in int8: static quantisation, and dynamic as well for nets whose inputs are integers.

    A run that was cut goes on from ``nimble-int8.jsonl``.

    Args:
        context: The suite's context.
        nets: As for the suite ``nimble``; none: :data:`NETS` or :data:`QUICK_NETS`.
        peers: As for the suite ``nimble``.
        trust_code: As for the suite ``nimble``.
    """
    chosen = nets or (QUICK_NETS if context.is_quick else NETS)
    return race_forms(context, FORMS, f"{__name__}:race_net", chosen, peers, trust_code)


def race_net(model: str, budget_s: float, is_quick: bool, **setup: Any) -> dict[str, dict[str, Any]]:
    """Race on one net in this process; return by case the fields of the outcomes and the accuracy."""
    subject = subject_of(model, **setup)
    share = 4 if is_quick else 1
    calibration = [subject.net.inputs, *drawn(subject.net, NUM_CALIBRATION // share - 1, seed=1)]
    held_out = drawn(subject.net, NUM_HELD_OUT // share, seed=2)
    graphs: dict[str, nn.Module] = {}  # PT2E's, in eager PyTorch, by our forms

    def make(name: str) -> Function:
        contestant, kind = name.split(", ")
        if contestant == OURS and kind != FLOAT:
            graphs[name] = by_pt2e(subject.net, calibration, is_dynamic=kind == DYNAMIC)
        return function_of(contestant, kind, subject, calibration, graphs.get(name))

    def measure(functions: Mapping[str, Function], names: Sequence[str]) -> Accuracy:
        """Return each int8 form's errors, beside its contestant's own float form."""
        found: Accuracy = {}
        for name in names:
            ours, own_float = functions[name], functions.get(f"{name.split(', ')[0]}, {FLOAT}")
            if own_float is None:
                continue
            found[name] = errors([(ours(*inputs), own_float(*inputs)) for inputs in held_out])
            if graph := graphs.get(name):
                found[name] |= _beside_eager(ours, graph, held_out[0])
        return found

    kinds = (STATIC, DYNAMIC) if is_text(subject.net) else (STATIC,)
    own = [f"{OURS}, {kind}" for kind in kinds]
    names = [*(f"{name}, {FLOAT}" for name in CONTESTANTS), *own, *(f"ONNX Runtime, {kind}" for kind in kinds)]
    names.append(f"OpenVINO, {STATIC}")
    found = accuracy.race_net(model, subject, names, make, measure=measure, budget_s=budget_s)
    for name, one in found["accuracy"].items():
        if is_off(one):
            found["outcomes"][name] = asdict(Outcome("differs", f"from eager's int8 by {one['from_eager']:.1e}"))
    return found


def function_of(
    contestant: str, kind: str, subject: Subject, calibration: Sequence[Inputs], graph: nn.Module | None
) -> Function:
    """Make the form of a contestant ready; ``graph`` is what Nimble's int8 is prepared from."""
    if contestant == OURS:
        return nimble(graph or subject.net.module, subject)
    if contestant == "ONNX Runtime":
        if kind == FLOAT:
            return runtimes.onnx_runtime(onnx_file(subject), subject.num_threads)
        return onnx_dynamic(subject) if kind == DYNAMIC else onnx_static(subject, calibration)
    return openvino_float(subject) if kind == FLOAT else openvino_static(subject, calibration)


def is_off(accuracy: Mapping[str, Any]) -> bool:
    """Return whether Nimble's int8 is another net than eager's: further than its own sensitivity to rounding."""
    return bool(accuracy.get("from_eager", 0.0) > max(EAGER_TOLERANCE, 3 * accuracy.get("eager_moved", 0.0)))


def _beside_eager(ours: Function, graph: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Return our distance from eager's int8, and eager's own when its input, or its largest table, moves by 1e-6."""
    wanted = tree_leaves(graph(*inputs))
    moved = max(distance(tree_leaves(_moved(graph, inputs, by)), wanted) for by in (1e-6, -1e-6))
    return {"from_eager": distance(ours(*inputs), wanted), "eager_moved": moved}


def _moved(graph: nn.Module, inputs: Inputs, by: float) -> Any:
    if any(x.is_floating_point() for x in inputs):
        return graph(*(x * (1 + by) if x.is_floating_point() else x for x in inputs))
    table = max((each for each in graph.parameters() if each.is_floating_point()), key=lambda each: each.numel())
    kept = table.clone()
    table.mul_(1 + by)
    found = graph(*inputs)
    table.copy_(kept)
    return found


def is_text(net: Net) -> bool:
    """Return whether all inputs are integers, so that weights are in linears and rows may differ in range."""
    return not any(x.is_floating_point() for x in net.inputs)


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


def onnx_dynamic(subject: Subject) -> Function:
    """Quantise the linears with scales of the call, weights ``int8`` by channel."""
    package = importlib.import_module("onnxruntime.quantization")
    path = subject.cache_dir / "dynamic.onnx"
    package.quantize_dynamic(
        str(_for_quantisation(subject)), str(path), per_channel=True, weight_type=package.QuantType.QInt8
    )
    return runtimes.onnx_runtime(path, subject.num_threads)


def openvino_float(subject: Subject) -> Function:
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
