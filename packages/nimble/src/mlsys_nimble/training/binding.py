"""Kernels of a training graph's operators, the strides of their results, and torch's functions for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlsys_nimble.backends.cpu.library import DTYPES, MAX_RANK, Kernel, View
from mlsys_nimble.backends.cpu.lowering import kernel_for
from mlsys_nimble.backends.reference.operators import as_needed, aten_function, compile_operator
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.operators import BatchNormGradient, BatchNormTraining
from mlsys_nimble.ir.program import Operator, ValueType
from mlsys_nimble.ir.strides import Strides, dense, order_of, row_major
from mlsys_nimble.training import convolutions, kernels, transformer
from mlsys_nimble.training.convolutions import images_of, way_of, work_of
from mlsys_nimble.training.passes import GRADIENT

_BY_KERNEL = (kinds.Pointwise, kinds.Reduce, kinds.Copy, kinds.Cast, kinds.Pad)
_NORMS = (BatchNormTraining, BatchNormGradient)
_LINEAR = (kinds.Gemm, kinds.WeightGradient)


def torch_run(operator: Operator, values: Sequence[ValueType]) -> Run:
    """Return torch's function for an operator. Convolutions get channels-last images, which are fastest in oneDNN."""
    kind = operator.kind
    work = work_of(operator, *([values[value] for value in group] for group in (operator.inputs, operator.outputs)))
    if work is not None and way_of(work, 1) == "gemm":
        into = convolutions.pixels(work)
        return replace(into, write=_with_channels_last(into.write, images_of(work), first=1))
    if isinstance(kind, kinds.MatMul) and kind.scale == 1 and _are_matrices(operator, values):
        return convolutions.gemm(values[operator.outputs[0]].shape)
    if isinstance(kind, kinds.Aten):
        run = _aten_run(kind) or compile_operator(operator, values)
        return _with_channels_last(run, 2) if kind.target == GRADIENT else run
    run = compile_operator(operator, values)
    return _with_channels_last(run, 1) if isinstance(kind, kinds.Convolution) else run


def _aten_run(kind: kinds.Aten) -> Run | None:
    """Return a call with the tensors' positions found ahead of time; None where tensors are nested in arguments."""
    indices = [index for index, argument in enumerate(kind.arguments) if isinstance(argument, kinds.Input)]
    if kind.keywords or [kind.arguments[index].index for index in indices] != list(range(len(indices))):
        return None
    if any(isinstance(a, tuple) and any(isinstance(part, kinds.Input | tuple) for part in a) for a in kind.arguments):
        return None
    function = aten_function(kind.target)
    template: list[Any] = [list(a) if isinstance(a, tuple) else a for a in kind.arguments]

    def run(*tensors: Tensor) -> Any:
        arguments = template.copy()
        for index, tensor in zip(indices, as_needed(kind, tensors), strict=True):
            arguments[index] = tensor
        made = function(*arguments)
        return made if isinstance(made, Tensor) else [part for part in made if part is not None]

    return run


def _are_matrices(operator: Operator, values: Sequence[ValueType]) -> bool:
    types = [values[value] for value in operator.inputs]
    return all(type_.dtype == "float32" and len(type_.shape) == 2 for type_ in types)


def _with_channels_last(run: Run, num_images: int, first: int = 0) -> Run:
    def run_laid_out(*tensors: Tensor) -> Any:
        if tensors[first].dim() != 4:
            return run(*tensors)
        last = first + num_images
        images = [image.contiguous(memory_format=torch.channels_last) for image in tensors[first:last]]
        return run(*tensors[:first], *images, *tensors[last:])

    return run_laid_out


def strides_by_kernel(
    operator: Operator, values: Sequence[ValueType], inputs: Sequence[Tensor]
) -> list[Strides] | None:
    """Return the strides of an operator's results if kernels make them; None: torch runs it.

    Args:
        operator: Operator of the program.
        values: Types of the program's values.
        inputs: Inputs of the operator in the pre-run.
    """
    results = [values[value] for value in operator.outputs]
    views = [View.of(tensor) for tensor in inputs]
    if isinstance(operator.kind, _NORMS):
        images = [view for view in views if len(view.shape) > 1]
        if not all(map(kernels.takes, images)) or any(view.strides != (1,) for view in views if len(view.shape) == 1):
            return None
        return [images[0].strides if len(result.shape) > 1 else (1,) for result in results]
    work = work_of(operator, views, results)
    if work is not None:
        strides = convolutions.strides_of_result(work)
        out = View(0, "float32", results[0].shape, strides)
        return [strides] if convolutions.make_kernels(work, views, out) else None
    attention_work = transformer.attention_of(operator, views)
    if attention_work is not None:
        return transformer.attention_strides(attention_work, views)
    if isinstance(operator.kind, _LINEAR):
        return transformer.linear_strides(operator, views)
    found = transformer.norm_strides(operator, views)
    if found is not None:
        return found
    if not isinstance(operator.kind, _BY_KERNEL) or results[0].numel == 0:
        return None
    strides = _like_the_largest(results[0], views)
    outs = [View(0, results[0].dtype, results[0].shape, strides)]
    return [strides] if _has_kernel(operator, views, outs) else None


def _has_kernel(operator: Operator, inputs: Sequence[View], outputs: Sequence[View]) -> bool:
    if any(view.dtype not in DTYPES or len(view.shape) > MAX_RANK for view in (*inputs, *outputs)):
        return False
    return bool(make_kernels(operator, inputs, outputs))


def _like_the_largest(result: ValueType, inputs: Sequence[View]) -> Strides:
    """Return the strides of the first dense input of the result's shape, or else row-major ones."""
    for view in inputs:
        if view.shape == result.shape and view.strides == dense(view.shape, order_of(view.shape, view.strides)):
            return view.strides
    return dense(result.shape, row_major(len(result.shape)))


def image_inputs(operator: Operator, values: Sequence[ValueType], inputs: Sequence[Tensor]) -> list[int]:
    """Return the indices of images that must be copied to channels last; of a batch norm only if ``x`` need not be."""
    images = [index for index, tensor in enumerate(inputs) if tensor.dim() == 4]
    if isinstance(operator.kind, _NORMS):
        if not kernels.takes(View.of(inputs[isinstance(operator.kind, BatchNormGradient)])):
            return []
    else:
        work = work_of(operator, [values[value] for value in operator.inputs], [values[v] for v in operator.outputs])
        if work is None or way_of(work, kernels.load().kernel_lanes()) in (None, "gemm"):
            return []
        images = images[: images_of(work)]
    return [index for index in images if not kernels.lies_channels_last(View.of(inputs[index]))]


def make_kernels(operator: Operator, inputs: Sequence[View], outputs: Sequence[View]) -> list[Kernel]:
    """Bind the kernels that make an operator's results; return none if it has none."""
    if isinstance(operator.kind, BatchNormTraining):
        return kernels.batch_norm(operator.kind, inputs, outputs)
    if isinstance(operator.kind, BatchNormGradient):
        return kernels.batch_norm_gradient(inputs, outputs)
    work = work_of(operator, inputs, outputs)
    if work is not None:
        return convolutions.make_kernels(work, inputs, outputs[0])
    attention_work = transformer.attention_of(operator, inputs)
    if attention_work is not None:
        return transformer.attention_kernels(attention_work, inputs, outputs)
    if isinstance(operator.kind, _LINEAR):
        return transformer.linear_kernels(operator.kind, inputs, outputs)
    if transformer.norm_strides(operator, inputs) is not None:
        return transformer.norm_kernels(operator, inputs, outputs)
    views = dict(zip((*operator.inputs, *operator.outputs), (*inputs, *outputs), strict=True))
    kernel = kernel_for(operator, views, {})
    return [kernel] if kernel is not None else []
