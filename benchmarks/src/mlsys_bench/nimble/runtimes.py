"""ONNX Runtime and OpenVINO at their best settings, as functions of tensors; each is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def session(path: str | Path, num_threads: int) -> Any:
    """Return an ONNX Runtime session of a file: all optimisations; threads spin within a run and stop with it."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def compiled(model: Any, num_threads: int, precision: str = "f32") -> Any:
    """Return an OpenVINO model compiled for latency; what is not int8 is in ``precision``."""
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    settings = {**hints, "INFERENCE_NUM_THREADS": num_threads}
    return importlib.import_module("openvino").Core().compile_model(model, "CPU", settings)


def onnx_runtime(path: str | Path, num_threads: int) -> Callable[..., list[Any]]:
    """Return a function of tensors that runs an ONNX file and returns arrays."""
    ready = session(path, num_threads)
    names = [one.name for one in ready.get_inputs()]
    return lambda *inputs: list(ready.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)}))


def openvino(model: Any, num_threads: int, precision: str = "f32") -> Callable[..., list[Any]]:
    """Return a function of tensors that runs an OpenVINO model and returns arrays; inputs are shared, not copied."""
    package = importlib.import_module("openvino")
    request = compiled(model, num_threads, precision).create_infer_request()

    def call(*inputs: torch.Tensor) -> list[Any]:
        for index, x in enumerate(inputs):
            request.set_input_tensor(index, package.Tensor(x.numpy(), shared_memory=True))
        request.infer()
        return [tensor.data.copy() for tensor in request.output_tensors]

    return call
