"""An ONNX file in ONNX Runtime as a module of one operator: rows of its inputs in, rows of its outputs out."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.slicing.onnx_nodes import run_by_nodes
from mlsys_serving.isolation.reading import is_following
from torch import Tensor, fx, nn


class OnnxSession(nn.Module):
    """A session with as many threads as torch has now. It cannot be forked: the runtime's import starts a thread.

    Args:
        path: Path of the file.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        at_once: Requests that the file takes at once: other batches are split, and the last part is filled up with
            copies of its last request. None: any number.

    Raises:
        InvalidInputError: ONNX Runtime does not take the file.
    """

    def __init__(self, path: Path, inputs: Sequence[str], outputs: Sequence[str], at_once: int | None) -> None:
        super().__init__()
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise InvalidInputError(f"{path}: ONNX Runtime refuses it: {told(error)}") from error
        self._path, self._inputs, self._outputs, self._at_once = path, tuple(inputs), tuple(outputs), at_once
        self.register_buffer("file", torch.empty(path.stat().st_size, device="meta"))  # tells its profile from others'

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, ``[requests, ...]`` each."""
        num = len(tensors[0])
        at_once = self._at_once or num
        if is_following() and at_once > 1:
            rows_of = torch.arange(at_once) % num
            filled = [tensor if at_once == num else tensor[rows_of] for tensor in tensors]
            return tuple(run_by_nodes(self._path, self._inputs, self._outputs, filled))
        arrays = [tensor.numpy() for tensor in tensors]
        parts = []
        for first in range(0, num, at_once):
            rows = [array[first : first + at_once] for array in arrays]
            if missing := at_once - len(rows[0]):
                rows = [np.concatenate([each, np.repeat(each[-1:], missing, axis=0)]) for each in rows]
            try:
                parts.append(self._session.run(list(self._outputs), dict(zip(self._inputs, rows, strict=True))))
            except Exception as error:
                raise RuntimeError(told(error)) from error
            for name, value in zip(self._outputs, parts[-1], strict=True):
                require_rows(name, value, at_once)
        columns = [part[0] if len(parts) == 1 else np.concatenate(part) for part in zip(*parts, strict=True)]
        return tuple(torch.from_numpy(column[:num]) for column in columns)

    def graph_module(self) -> fx.GraphModule:
        """Return a graph whose only operator that computes is this session."""
        graph = fx.Graph()
        given = [graph.placeholder(f"input_{number}") for number in range(len(self._inputs))]
        called = graph.call_module("session", tuple(given))
        graph.output(tuple(graph.call_function(operator.getitem, (called, n)) for n in range(len(self._outputs))))
        return fx.GraphModule({"session": self}, graph)


def require_rows(name: str, value: Any, num: int) -> None:
    """Refuse an output that is no tensor of numbers with a row for each of ``num`` requests.

    Raises:
        InvalidInputError: It is none.
    """
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    if is_numbers and value.shape[:1] == (num,):
        return
    what = f"of shape {list(value.shape)}" if is_numbers else "no tensor of numbers"
    hint = "" if is_numbers else " (skl2onnx: options={'zipmap': False}, and classes that are numbers)"
    raise InvalidInputError(
        f"output {name!r} is {what} for {num} request{'s' * (num > 1)}: each output needs a row for each request; "
        f"export the model without it{hint}"
    )


def told(error: Exception) -> str:
    """Return the first line of a runtime's error without its codes and places."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.rpartition(" : ")[2].rpartition("Status Message: ")[2]
