"""Who takes part, each made ready for one net with the settings that are best for it.

A peer is imported only here, when it is its turn. Each gets as many threads as Nimble. A contestant is a call without
arguments that answers the example inputs, which it was given before the clock started.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mlsys_nimble.nets.blocks import Net


class LeftOut(Exception):  # noqa: N818 - it is no error: the contestant sits this net out
    """Why a contestant is not for this net."""


@dataclass(frozen=True, slots=True)
class Bout:
    """What a contestant is made ready for."""

    net: Net
    num_threads: int
    cache_dir: Path  # this net's own: what is exported or compiled is kept there


@dataclass(frozen=True, slots=True)
class Ready:
    """A contestant made ready."""

    call: Callable[[], Any]
    tensors: Callable[[Any], Sequence[Any]] = tree_leaves  # of what ``call`` gives, in eager's order
    note: str = ""


Maker = Callable[[Bout], Ready]
EAGER = "eager"


def eager(bout: Bout) -> Ready:
    """The module as it is."""
    module, inputs = bout.net
    return Ready(lambda: module(*inputs))


def channels_last(bout: Bout) -> Ready:
    """Eager, in the layout of memory that convolutions like."""
    module, inputs = _channels_last(bout)
    return Ready(lambda: module(*inputs))


def compiled(bout: Bout) -> Ready:
    """torch.compile with frozen weights; images channels last."""
    net = _channels_last(bout) if _is_image(bout.net) else bout.net
    call = torch.compile(copy.deepcopy(net.module), options={"freezing": True})
    return Ready(lambda: call(*net.inputs))


def aot_inductor(bout: Bout) -> Ready:
    """Inductor ahead of time: a package of machine code, called without Python's guards."""
    inductor: Any = importlib.import_module("torch._inductor")
    path = bout.cache_dir / f"aoti-{torch.__version__}-{bout.num_threads}.pt2"
    net = _channels_last(bout) if _is_image(bout.net) else bout.net
    if not path.exists():
        program = torch.export.export(net.module, net.inputs)
        inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})
    package = inductor.aoti_load_package(str(path))
    return Ready(lambda: package(*net.inputs))


def onnx_runtime(bout: Bout) -> Ready:
    """ONNX Runtime; its threads spin within a run, where that helps, and stop with it."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = bout.num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = runtime.InferenceSession(str(_onnx(bout)), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, bout.net.inputs, strict=True)}
    return Ready(lambda: session.run(None, feeds), list)


def openvino(bout: Bout) -> Ready:
    """OpenVINO for latency, in float32; inputs and results are shared, not copied."""
    package = importlib.import_module("openvino")
    core = package.Core()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": bout.num_threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled_model = core.compile_model(core.read_model(str(_onnx(bout))), "CPU", settings)
    request = compiled_model.create_infer_request()
    for index, x in enumerate(bout.net.inputs):
        request.set_input_tensor(index, package.Tensor(x.numpy(), shared_memory=True))

    def call() -> Any:
        request.infer()
        return request

    num_outputs = len(compiled_model.outputs)
    return Ready(call, lambda done: [done.get_output_tensor(index).data.copy() for index in range(num_outputs)])


def nimble(*, use_multi_stream: bool) -> Maker:
    """Nimble, as a user calls it."""

    def make(bout: Bout) -> Ready:
        from mlsys_nimble.module import Nimble

        module, inputs = bout.net
        model = Nimble(module).prepare(inputs, use_multi_stream=use_multi_stream, num_threads=bout.num_threads)
        assert model.prepared is not None  # that is what prepare does
        return Ready(lambda: model(*inputs), note=type(model.prepared.executor).__name__)

    return make


MAKERS: dict[str, Maker] = {
    EAGER: eager,
    "eager, channels last": channels_last,
    "torch.compile": compiled,
    "AOTInductor": aot_inductor,
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
    "Nimble, one stream": nimble(use_multi_stream=False),
    "Nimble": nimble(use_multi_stream=True),
}
SLOW_TO_PREPARE = ("torch.compile", "AOTInductor")  # they call a C++ compiler for many kernels: minutes


def _is_image(net: Net) -> bool:
    return net.inputs[0].dim() == 4


def _channels_last(bout: Bout) -> Net:
    if not _is_image(bout.net):
        raise LeftOut("its input is no image")
    module = copy.deepcopy(bout.net.module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Net(module, tuple(x.to(memory_format=torch.channels_last) for x in bout.net.inputs))


def _onnx(bout: Bout) -> Path:
    """The net as an ONNX file, exported once."""
    path = bout.cache_dir / f"net-{torch.__version__}.onnx"
    if not path.exists():
        program = torch.onnx.export(bout.net.module, bout.net.inputs, dynamo=True, verbose=False)
        assert program is not None
        partial = path.with_suffix(".partial")
        program.save(str(partial), external_data=False)
        partial.replace(path)
    return path
