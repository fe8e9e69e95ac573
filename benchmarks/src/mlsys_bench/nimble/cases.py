"""The cases of one net, each made ready with the settings that are best for it.

A peer is imported only here, when it is its turn. Each gets as many threads as Nimble. A case is a call without
arguments that answers the example inputs, which it was given before the clock started.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_nimble.nets.blocks import Net
from torch.utils._pytree import tree_leaves

from mlsys_bench.harness.race import Case, LeftOut
from mlsys_bench.nimble import EAGER, OURS, OURS_SINGLE, runtimes


@dataclass(frozen=True, slots=True)
class Subject:
    """A net that cases are made ready for."""

    net: Net
    num_threads: int
    cache_dir: Path  # the net's own, for exported and compiled files


Maker = Callable[[Subject], Case]


def _case(call: Callable[[], Any], note: str = "") -> Case:
    return Case(call, tree_leaves, note)  # in eager's order


def eager(subject: Subject) -> Case:
    """Call the module as it is."""
    module, inputs = subject.net
    return _case(lambda: module(*inputs))


def channels_last(subject: Subject) -> Case:
    """Call the module in the layout of memory that convolutions like."""
    module, inputs = in_channels_last(subject)
    return _case(lambda: module(*inputs))


def compiled(subject: Subject) -> Case:
    """Compile with frozen weights; images channels last."""
    net = in_channels_last(subject) if is_image(subject.net) else subject.net
    call = torch.compile(copy.deepcopy(net.module), options={"freezing": True})
    return _case(lambda: call(*net.inputs))


def compiled_with_tuning(subject: Subject) -> Case:
    """Compile with frozen weights, products and convolutions chosen by measurement; images channels last."""
    net = in_channels_last(subject) if is_image(subject.net) else subject.net
    call = torch.compile(copy.deepcopy(net.module), options={"freezing": True, "max_autotune": True})
    return _case(lambda: call(*net.inputs))


def aot_inductor(subject: Subject) -> Case:
    """Compile ahead of time into a package of machine code, which is called without Python's guards."""
    inductor: Any = importlib.import_module("torch._inductor")
    path = subject.cache_dir / f"aoti-{torch.__version__}-{subject.num_threads}.pt2"
    net = in_channels_last(subject) if is_image(subject.net) else subject.net
    if not path.exists():
        program = torch.export.export(net.module, net.inputs)
        inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})
    package = inductor.aoti_load_package(str(path))
    return _case(lambda: package(*net.inputs))


def onnx_runtime(subject: Subject) -> Case:
    """Run it in ONNX Runtime, whose threads spin within a run, where that helps, and stop with it."""
    session = runtimes.session(onnx_file(subject), subject.num_threads)
    names = [one.name for one in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, subject.net.inputs, strict=True)}
    return Case(lambda: session.run(None, feeds), list)


def openvino(subject: Subject) -> Case:
    """Run it in OpenVINO for latency, in float32; inputs and results are shared, not copied."""
    package = importlib.import_module("openvino")
    compiled_model = runtimes.compiled(package.Core().read_model(str(onnx_file(subject))), subject.num_threads)
    request = compiled_model.create_infer_request()
    for index, x in enumerate(subject.net.inputs):
        request.set_input_tensor(index, package.Tensor(x.numpy(), shared_memory=True))
    num_outputs = len(compiled_model.outputs)
    return Case(request.infer, lambda _: [request.get_output_tensor(index).data.copy() for index in range(num_outputs)])


def nimble(*, use_multi_stream: bool) -> Maker:
    """Return the maker of Nimble as a user calls it."""

    def make(subject: Subject) -> Case:
        from mlsys_nimble.module import Nimble

        module, inputs = subject.net
        model = Nimble(module).prepare(inputs, use_multi_stream=use_multi_stream, num_threads=subject.num_threads)
        assert model.prepared is not None  # that is what prepare does
        return _case(lambda: model(*inputs), type(model.prepared.executor).__name__)

    return make


MAKERS: dict[str, Maker] = {
    EAGER: eager,
    "eager, channels last": channels_last,
    "torch.compile": compiled,
    "AOTInductor": aot_inductor,
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
    OURS_SINGLE: nimble(use_multi_stream=False),
    OURS: nimble(use_multi_stream=True),
}
ZOO_MAKERS: dict[str, Maker] = {name: make for name, make in MAKERS.items() if name != OURS_SINGLE} | {
    "torch.compile": compiled_with_tuning,
}
SLOW_TO_PREPARE = ("torch.compile", "AOTInductor")  # by a C++ compiler for many kernels: minutes


def left_out_of_quick(_: Subject) -> Case:
    """Leave a case out of quick runs."""
    raise LeftOut("not in --quick: it compiles for minutes")


def build_kernels() -> None:
    """Compile the native library, so that no net's preparation includes a C++ compiler's minute."""
    from mlsys_nimble.module import Nimble

    Nimble(torch.nn.ReLU()).prepare(torch.zeros(1))


def is_image(net: Net) -> bool:
    """Return whether a net's first input is a batch of images."""
    return net.inputs[0].dim() == 4


def in_channels_last(subject: Subject) -> Net:
    """Return a net of images in the layout that convolutions like."""
    if not is_image(subject.net):
        raise LeftOut("its input is no image")
    module = copy.deepcopy(subject.net.module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Net(module, tuple(x.to(memory_format=torch.channels_last) for x in subject.net.inputs))


def onnx_file(subject: Subject) -> Path:
    """Return the net as an ONNX file, exported once."""
    return exported(subject.net, subject.cache_dir / f"net-{torch.__version__}.onnx")


def exported(net: Net, path: Path) -> Path:
    """Export a net to an ONNX file, unless it is there; return the file."""
    if not path.exists():
        program = torch.onnx.export(net.module, net.inputs, dynamo=True, verbose=False)
        assert program is not None
        partial = path.with_suffix(".partial")
        program.save(str(partial), external_data=False)
        partial.replace(path)
    return path
