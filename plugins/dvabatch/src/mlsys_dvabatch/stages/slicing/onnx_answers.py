"""Answers of an ONNX file's own runtime to some requests, and their comparison with those of a converted model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.slicing.onnx_child import answers_in_child
from mlsys_dvabatch.stages.slicing.onnx_inputs import OnnxInputs
from mlsys_serving.isolation import Kind, draw_like
from torch import nn

_TOLERANCE = 1e-3  # relative to the largest number of an output
_ROWS = 4  # requests that are compared, at least

Array = npt.NDArray[Any]


def require_equal(path: Path, model: Any, module: nn.Module, inputs: OnnxInputs) -> None:
    """Refuse a converted model whose answers to a batch are not what the file says of each request.

    Args:
        path: Path of the file.
        model: What it holds, for where ONNX Runtime is not installed or does not know the model.
        module: The converted model; it gets all requests at once.
        inputs: Inputs of the file. The file is asked for each request alone, or as many as it takes.

    Raises:
        InvalidInputError: An answer differs, or an output has no row for each request.
    """
    requests, at_once = _requests(inputs), inputs.batch or 1
    expected = _answers(path, model, inputs, requests)
    alone = [_run(module, requests[first : first + at_once]) for first in range(0, len(requests), at_once)]
    if fault := _first_fault(model, [np.concatenate(rows) for rows in zip(*alone, strict=True)], expected):
        raise InvalidInputError(
            f"{path}: onnx2torch converts it into another model: {fault}. Export a .pt2 file instead"
        )
    try:
        fault = _first_fault(model, _run(module, requests), expected)
    except Exception as error:  # noqa: BLE001 - it runs as the file has it: its batch is written into the graph
        fault = str(error).partition("\n")[0]
    if fault:
        raise InvalidInputError(
            f"{path} gives other answers to {len(requests)} requests at once than to {at_once}: {fault}. Export it "
            "with a dynamic first dimension, without operations over it"
        )


def _run(module: nn.Module, requests: Sequence[tuple[Array, ...]]) -> list[Array]:
    with torch.inference_mode():
        found = module(*(torch.from_numpy(np.stack(rows)) for rows in zip(*requests, strict=True)))
    return [value.numpy() for value in (found if isinstance(found, tuple | list) else (found,))]


def _first_fault(model: Any, answers: Sequence[Array], expected: Sequence[Array]) -> str | None:
    if len(answers) != len(expected):
        return f"{len(answers)} outputs for {len(expected)}"
    faults = zip(model.graph.output, map(_fault, answers, expected), strict=True)
    return next((f"{fault} (output {output.name!r})" for output, fault in faults if fault), None)


def _requests(inputs: OnnxInputs) -> list[tuple[Array, ...]]:
    at_once = inputs.batch or 1
    draw, rng = draw_like([value[0].numpy() for value in inputs.example]), np.random.default_rng(0)
    return [draw(rng, Kind.ORDINARY) for _ in range(-(-_ROWS // at_once) * at_once)]


def _answers(path: Path, model: Any, inputs: OnnxInputs, requests: Sequence[tuple[Array, ...]]) -> list[Array]:
    """Return each output's rows."""
    at_once = inputs.batch or 1
    batches = [
        {
            name: np.stack(rows)
            for name, rows in zip(inputs.names, zip(*requests[first : first + at_once], strict=True), strict=True)
        }
        for first in range(0, len(requests), at_once)
    ]
    answers: Sequence[Sequence[Any]] | None = None
    if importlib.util.find_spec("onnxruntime") is not None:
        answers = answers_in_child(path, [list(each.values()) for each in batches])
    if answers is None:
        answers = _of_evaluator(model, batches)
    for given in answers:
        for output, value in zip_longest(model.graph.output, given):
            shape = getattr(value, "shape", None)
            if shape is None or shape[:1] != (at_once,):
                what = "no tensor" if shape is None else f"of shape {list(shape)}"
                raise InvalidInputError(
                    f"{path}: output {output.name!r} is {what} for {at_once} request{'s' * (at_once > 1)}: each output "
                    "needs a row for each request; export the model without it"
                )
    return [np.concatenate(rows) for rows in zip(*answers, strict=True)]


def _of_evaluator(model: Any, batches: Sequence[dict[str, Array]]) -> list[list[Any]]:
    """Return what the evaluator in numpy says that comes with onnx."""
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    return [list(evaluator.run(None, each)) for each in batches]


def _fault(own: Array, other: Array) -> str | None:
    if own.shape != other.shape or own.dtype != other.dtype:
        return f"{own.dtype} of shape {list(own.shape)} where ONNX has {other.dtype} of shape {list(other.shape)}"
    if own.dtype.kind != "f":
        return None if np.array_equal(own, other) else "other numbers than ONNX's"
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=1e-3))
    if np.allclose(own, other, rtol=0, atol=_TOLERANCE * largest, equal_nan=True):
        return None
    return f"numbers that differ from ONNX's by up to {float(np.nanmax(np.abs(own - other))):.3g}"
