"""Check a decoded request against a model's spec: names, datatypes, shapes, rows, values. Pure; both fronts use it.

A codec reads the wire into :class:`WireRequest`; the result is the model's input. Messages name the tensor and say
what the model takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.model import InferRequest, InferResponse, Parameter
from mlsys_serving.models.spec import TensorSpec
from mlsys_serving.models.version import Version

from mlsys_open_inference.tensors import conformed

_keys = itertools.count(1)  # of the process: several apps may share one serving loop
_FEW = 64  # tensors that are looked at one by one in any case, for a better message
_MAX_PRIORITY = 2**32 - 1
_MAX_EMPTY_ELEMENTS = 2**56  # numpy refuses larger shapes, even of arrays that are empty


@dataclass(slots=True)
class WireTensor:
    """An input as received; its data is read only after the rest of it has been checked."""

    name: str
    datatype: str
    shape: Sequence[int]  # integers, 0 or more: the codec has seen to it
    read: Callable[[DataType, Sequence[int], str], Array]  # (datatype, shape, name for errors) -> array


@dataclass(slots=True)
class WireRequest:
    """A request as received, independent of the front."""

    inputs: list[WireTensor]
    outputs: list[str] = field(default_factory=list)  # empty: all
    request_id: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    size: int = 0  # bytes that reading the inputs goes through; a tensor's raw bytes count a 64th: numpy looks at them


def raw_size(nbytes: int, datatype: object) -> int:
    """Return the part of :attr:`WireRequest.size` that reading a tensor's raw bytes counts as."""
    return nbytes if datatype == DataType.BYTES.value else nbytes // 64


def check_counts(version: Version, *, num_inputs: int, num_outputs: int) -> None:
    """Check that a request has no more tensors than the model, before any work is done for each.

    Raises:
        InvalidInputError: it has more.
    """
    for what, count, limit in (
        ("inputs", num_inputs, len(version.inputs)),
        ("outputs", num_outputs, len(version.outputs)),
    ):
        if count > max(limit, _FEW):
            raise InvalidInputError(
                f"the request has {count} {what}; model {version.spec.name!r} has {limit}, and each may come once"
            )


def bind(wire: WireRequest, version: Version, *, now: float, deadline_s: float | None) -> InferRequest:
    """Return the checked request for ``version``'s model.

    Args:
        wire: as a codec read it.
        version: the model it is for.
        now: seconds of the front's clock.
        deadline_s: of the transport, on that clock; a ``timeout`` parameter may only shorten it.

    Raises:
        InvalidInputError: it does not fit the model's spec.
    """
    spec = version.spec
    inputs: dict[str, Array] = {}
    num_rows: int | None = None
    for tensor in wire.inputs:
        tensor_spec = version.inputs.get(tensor.name)
        if tensor_spec is None:
            known = ", ".join(map(repr, version.inputs)) or "none"
            raise InvalidInputError(f"model {spec.name!r} has no input {tensor.name[:100]!r}; its inputs are {known}")
        if tensor.name in inputs:
            raise InvalidInputError(f"input {tensor.name!r} is given twice")
        _check_shape(tensor, tensor_spec, spec.name)
        if spec.max_batch_size:
            rows = tensor.shape[0]
            if num_rows is not None and rows != num_rows:
                raise InvalidInputError(
                    f"input {tensor.name!r} has {rows} rows, other inputs have {num_rows}: the first dimension of all "
                    "inputs is that of the batch"
                )
            num_rows = rows
        inputs[tensor.name] = _values(tensor, tensor_spec)
    if len(inputs) != len(version.inputs):
        missing = version.required_inputs - inputs.keys()
        if missing:
            raise InvalidInputError(f"model {spec.name!r} needs the inputs {sorted(missing)}, which are not given")
    if num_rows is not None and not 1 <= num_rows <= spec.max_batch_size:
        raise InvalidInputError(
            f"the request has {num_rows} rows; model {spec.name!r} takes 1 to {spec.max_batch_size}"
        )
    priority, timeout_s = _schedule(wire.parameters)
    timeout_s = version.settings.timeout_s(timeout_s)
    if timeout_s is not None:
        deadline_s = now + timeout_s if deadline_s is None else min(deadline_s, now + timeout_s)
    return InferRequest(
        key=str(next(_keys)),
        model_name=spec.name,
        model_version=spec.version,
        inputs=inputs,
        outputs=_wanted(wire.outputs, version),
        num_rows=1 if num_rows is None else num_rows,
        request_id=wire.request_id,
        parameters=wire.parameters,
        priority=priority,
        deadline_s=deadline_s,
    )


def checked_outputs(
    response: InferResponse, request: InferRequest, version: Version, *, is_partial: bool
) -> list[tuple[TensorSpec, Array]]:
    """Return the outputs that the client wants, in its order, checked against the spec.

    Args:
        response: the model's.
        request: the request that it answers.
        version: the model.
        is_partial: outputs may be missing, as in the responses of a stream.

    Raises:
        ServingError: the model gave something else.
    """
    outputs = []
    for name in request.outputs:
        spec, array = version.outputs[name], response.outputs.get(name)
        if array is None:
            if is_partial:
                continue
            raise ServingError(f"model {version.spec.name!r} gave no output {name!r}")
        array = conformed(np.asarray(array), spec.datatype, what=f"output {name!r} of model {version.spec.name!r}")
        if not _fits(array.shape, spec.shape):
            raise ServingError(
                f"output {name!r} of model {version.spec.name!r} should have shape {list(spec.shape)}, the model gave "
                f"{list(array.shape)}"
            )
        if version.spec.max_batch_size and not is_partial and array.shape[0] != request.num_rows:
            raise ServingError(
                f"output {name!r} of model {version.spec.name!r} has {array.shape[0]} rows for a request of "
                f"{request.num_rows}"
            )
        outputs.append((spec, array))
    return outputs


def _check_shape(tensor: WireTensor, spec: TensorSpec, model_name: str) -> None:
    if tensor.datatype != spec.datatype.value:
        raise InvalidInputError(
            f"input {tensor.name!r} is {tensor.datatype[:40]}, but model {model_name!r} takes {spec.datatype.value}"
        )
    if not _fits(tensor.shape, spec.shape):
        raise InvalidInputError(
            f"input {tensor.name!r} has shape {list(tensor.shape)[:32]}, but model {model_name!r} takes "
            f"{list(spec.shape)}, where -1 is any size"
        )
    if 0 in tensor.shape and math.prod(size or 1 for size in tensor.shape) > _MAX_EMPTY_ELEMENTS:
        raise InvalidInputError(f"input {tensor.name!r} has shape {list(tensor.shape)}, which is too large")


def _fits(shape: Sequence[int], pattern: Sequence[int]) -> bool:
    if len(shape) != len(pattern):
        return False
    return all(allowed in (-1, size) for size, allowed in zip(shape, pattern, strict=True))


def _values(tensor: WireTensor, spec: TensorSpec) -> Array:
    array = tensor.read(spec.datatype, tensor.shape, f"input {tensor.name!r}")
    if spec.finite_only and spec.datatype.is_floating and not np.isfinite(array).all():
        raise InvalidInputError(f"input {tensor.name!r} holds NaN or infinity, which the model does not take")
    if spec.utf8_only and spec.datatype is DataType.BYTES:
        try:
            for element in array.ravel().tolist():
                element.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"input {tensor.name!r} holds bytes that are no UTF-8; the model takes text"
            ) from error
    return array


def _wanted(names: Sequence[str], version: Version) -> tuple[str, ...]:
    if not names:
        return version.output_names
    for name in names:
        if name not in version.outputs:
            known = ", ".join(map(repr, version.outputs))
            raise InvalidInputError(
                f"model {version.spec.name!r} has no output {name[:100]!r}; its outputs are {known}"
            )
    return tuple(dict.fromkeys(names))  # one that is asked for twice comes once, as from Triton


def _schedule(parameters: dict[str, Parameter]) -> tuple[int, float | None]:
    """Remove ``priority`` and ``timeout`` (microseconds; 0 is none) from the parameters and return them."""
    if not parameters:
        return 0, None
    priority = _whole(parameters, "priority", _MAX_PRIORITY)
    timeout_us = _whole(parameters, "timeout", 2**63 - 1)
    return priority, timeout_us / 1e6 if timeout_us else None


def _whole(parameters: dict[str, Parameter], name: str, limit: int) -> int:
    value = parameters.pop(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise InvalidInputError(f"parameter {name!r} is a whole number from 0 to {limit}, got {str(value)[:40]!r}")
    return value
