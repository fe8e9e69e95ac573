"""The generate extension: plain JSON fields in place of tensors, for models of text. Pure.

A field named like an input is that input, a string or number or an array of them; any other is a parameter, as in
Triton. ``parameters`` are as in an inference request, and those named like inputs are inputs, too. A response has a
field for each output: the element itself where there is one, else all in a flat array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.binding import WireRequest, WireTensor
from mlsys_open_inference.engine import Answer
from mlsys_open_inference.rest.codec import is_parameter, parameters_of
from mlsys_open_inference.tensors import from_values, to_values
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.version import Version


def decode_generate(request: object, version: Version) -> WireRequest:
    """Return the request in a parsed JSON body.

    Raises:
        InvalidInputError: it is no object, or a field of it is not what the model takes.
    """
    if not isinstance(request, dict):
        raise InvalidInputError("a generate request is a JSON object")
    parameters = parameters_of(request, "the request")
    others = {name: value for name, value in request.items() if name not in ("id", "parameters")}
    fields = {name: others.pop(name) for name in [*others] if name in version.inputs}
    _check_parameters(others, version)
    parameters = {**others, **parameters}
    for name in [name for name in parameters if name in version.inputs]:
        if name in fields:
            raise InvalidInputError(f"input {name!r} is given twice: as a field and as a parameter")
        fields[name] = parameters.pop(name)
    request_id = request.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidInputError("'id' of the request is a string")
    inputs = [_tensor(name, value, version) for name, value in fields.items()]
    return WireRequest(inputs=inputs, request_id=request_id, parameters=parameters)


def encode_generate(answer: Answer) -> dict[str, Any]:
    """Return the JSON of one response.

    Raises:
        InvalidInputError: JSON cannot hold an output.
    """
    spec = answer.version.spec
    response: dict[str, Any] = {"model_name": spec.name, "model_version": spec.version}
    if answer.request.request_id:
        response["id"] = answer.request.request_id
    if answer.parameters:
        response["parameters"] = answer.parameters
    for output, array in answer.outputs:
        values = to_values(array, output.datatype, what=f"output {output.name!r}")
        response[output.name] = values[0] if len(values) == 1 else values
    return response


def _check_parameters(fields: Mapping[str, Any], version: Version) -> None:
    for name, value in fields.items():
        if not is_parameter(value):
            known = ", ".join(map(repr, version.inputs)) or "none"
            raise InvalidInputError(
                f"model {version.spec.name!r} has no input {name[:100]!r}, and a parameter is a string, a number, true "
                f"or false; its inputs are {known}"
            )


def _tensor(name: str, value: Any, version: Version) -> WireTensor:
    spec = version.inputs[name]
    values = value if isinstance(value, list) else [value]
    shape, row = _shape(values), spec.shape[1:]
    if version.spec.max_batch_size and len(shape) == len(row):
        size = math.prod(row)
        if len(row) == 1 and size > 0 and len(values) % size == 0:  # rows of a fixed size, one after the other
            return WireTensor(name, spec.datatype.value, [len(values) // size, size], _reader(values))
        values, shape = [values], [1, *shape]  # one row
    return WireTensor(name, spec.datatype.value, shape, _reader(values))


def _reader(values: list[Any]) -> Callable[[DataType, Sequence[int], str], Array]:
    return lambda datatype, shape, what: from_values(values, datatype, shape, what=what)


def _shape(values: list[Any]) -> list[int]:
    """Return the shape of nested lists, by their first elements."""
    shape: list[int] = []
    node: Any = values
    while isinstance(node, list):
        shape.append(len(node))
        node = node[0] if node else None
    return shape
