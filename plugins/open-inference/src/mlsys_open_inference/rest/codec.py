"""REST bodies: JSON, and JSON followed by the tensors' bytes (the binary tensor data extension). Pure.

No pydantic here: a request's JSON is small and its shape is fixed, and this is the hot path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.binding import WireRequest, WireTensor, check_counts, raw_size
from mlsys_open_inference.classification import classified
from mlsys_open_inference.descriptions import NO_MEMORY
from mlsys_open_inference.engine import Answer
from mlsys_open_inference.number_arrays import lifted
from mlsys_open_inference.tensors import from_raw, from_values, to_raw, to_values
from mlsys_serving.http.bodies import parse_json
from mlsys_serving.http.streaming import LARGE
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.errors import UnsupportedError
from mlsys_serving.models.model import Parameter, flag
from mlsys_serving.models.version import Version

MAX_DIMENSIONS = 64
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_MAX_SIZE = 2**63 - 1
_PIECE = 4096  # elements


@dataclass(slots=True)
class RestRequest:
    """A request, and the form of its response."""

    wire: WireRequest
    binary_by_default: bool = False
    binary: dict[str, bool] = field(default_factory=dict)  # of outputs that say so themselves
    num_classes: dict[str, int] = field(default_factory=dict)  # of outputs wanted as classifications


def json_nbytes(body: memoryview, header_nbytes: int | None) -> int:
    """Return the length of the JSON in ``body``; arguments as :func:`decode`'s.

    Raises:
        InvalidInputError: the header is not a length within the body.
    """
    if header_nbytes is not None and not 0 <= header_nbytes <= len(body):
        raise InvalidInputError(
            f"Inference-Header-Content-Length is {header_nbytes}, but the body has {len(body)} bytes"
        )
    return len(body) if header_nbytes is None else header_nbytes


def decode(body: memoryview, header_nbytes: int | None, version: Version | None = None) -> RestRequest:
    """Return the request in ``body``.

    Args:
        body: as sent, not compressed; arrays will be views of it.
        header_nbytes: length of the JSON at its start (``Inference-Header-Content-Length``); None: all of it is JSON.
        version: the model that it is for; None does not count its tensors.

    Raises:
        HttpError: 400, the JSON is malformed or has too many values.
        InvalidInputError: it is no inference request, or its binary data does not add up.
        UnsupportedError: it names shared memory.
    """
    nbytes = json_nbytes(body, header_nbytes)
    text, arrays = bytes(body[:nbytes]), dict[str, Array]()
    if nbytes >= LARGE:
        text, arrays = lifted(text)
    request = parse_json(text, check_floats=False)
    rest = body[nbytes:]
    if not isinstance(request, dict):
        raise InvalidInputError(f"an inference request is a JSON object, got {_type(request)}")
    inputs, outputs = _objects(request, "inputs"), _objects(request, "outputs", default=[])
    if version is not None:
        check_counts(version, num_inputs=len(inputs), num_outputs=len(outputs))
    parameters = parameters_of(request, "the request")
    tensors, size = _inputs(inputs, rest, arrays)
    decoded = RestRequest(
        WireRequest(
            inputs=tensors,
            request_id=_text(request, "id", "the request", default=""),
            parameters=parameters,
            size=nbytes + size,
        ),
        binary_by_default=flag(parameters, "binary_data_output"),
    )
    parameters.pop("binary_data_output", None)
    for output in outputs:
        _read_output(output, decoded)
    return decoded


def encode(answer: Answer, request: RestRequest) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary data follows.

    Raises:
        InvalidInputError: an output cannot be written as JSON, or cannot be classified.
    """
    version, chunks, texts = answer.version, [], []
    for spec, array in answer.outputs:
        datatype, name = spec.datatype, spec.name
        if name in request.num_classes:
            array = classified(array, spec, request.num_classes[name], has_batch=bool(version.spec.max_batch_size))
            datatype = DataType.BYTES
        output: dict[str, Any] = {"name": name, "datatype": datatype.value, "shape": list(array.shape)}
        data = ""
        if request.binary.get(name, request.binary_by_default):
            raw = to_raw(array, datatype)
            output["parameters"] = {"binary_data_size": len(raw)}
            chunks.append(raw)
        else:
            data = f',"data":[{_values_text(array.ravel(), datatype, what=f"output {name!r}")}]'
        texts.append(_ENCODER.encode(output)[:-1] + data + "}")
    response: dict[str, Any] = {"model_name": version.spec.name, "model_version": version.spec.version}
    if answer.request.request_id:
        response["id"] = answer.request.request_id
    if answer.parameters:
        response["parameters"] = answer.parameters
    header = f'{_ENCODER.encode(response)[:-1]},"outputs":[{",".join(texts)}]}}'.encode()
    return (b"".join([header, *chunks]), len(header)) if any(map(len, chunks)) else (header, None)


def _values_text(flat: Array, datatype: DataType, *, what: str) -> str:
    """Return the elements of ``flat`` as JSON, without brackets; in pieces, each of which lets other threads go on."""
    pieces = (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))
    return ",".join(_ENCODER.encode(to_values(piece, datatype, what=what))[1:-1] for piece in pieces)


def parameters_of(node: Mapping[str, Any], what: str) -> dict[str, Parameter]:
    """Return the ``parameters`` of a JSON object; none if it has none.

    Raises:
        InvalidInputError: they are no object, or one of them is not a string, a number or true or false.
    """
    parameters = node.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidInputError(f"'parameters' of {what} is an object, got {_type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(value, str | int | float) or (type(value) is float and not math.isfinite(value)):
            raise InvalidInputError(
                f"parameter {name[:100]!r} of {what} is a string, a number, true or false, got {_type(value)}"
            )
    return parameters


def check_placement(parameters: Mapping[str, Parameter], what: str) -> None:
    """Refuse the parameters of a tensor that lies in shared memory.

    Raises:
        UnsupportedError: it does.
    """
    if "shared_memory_region" in parameters:
        raise UnsupportedError(f"{what}: {NO_MEMORY}")


def _inputs(
    nodes: Sequence[Mapping[str, Any]], rest: memoryview, arrays: Mapping[str, Array]
) -> tuple[list[WireTensor], int]:
    """Return the tensors, and the size of the data that reading them goes through."""
    tensors, offset, size = list[WireTensor](), 0, 0
    left = dict(arrays)
    for node in nodes:
        name = _text(node, "name", "an input")
        what = f"input {name[:100]!r}"
        parameters = parameters_of(node, what)
        check_placement(parameters, what)
        nbytes = parameters.get("binary_data_size")
        if nbytes is None:
            if "data" not in node:
                raise InvalidInputError(f"{what} has neither 'data' nor the parameter 'binary_data_size'")
            values = node["data"]
            read = _value_reader(left.pop(values, values) if isinstance(values, str) else values)
        else:
            if "data" in node:
                raise InvalidInputError(f"{what} has both 'data' and the parameter 'binary_data_size'")
            if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 <= nbytes <= len(rest) - offset:
                raise InvalidInputError(
                    f"{what} has 'binary_data_size' {str(nbytes)[:40]}, but {len(rest) - offset} bytes are left"
                )
            read = _raw_reader(rest[offset : offset + nbytes])
            offset += nbytes
            size += raw_size(nbytes, node.get("datatype"))
        tensors.append(WireTensor(name, _text(node, "datatype", what), _shape(node, what), read))
    if left:
        raise InvalidInputError("the request has an array of numbers called 'data' outside of its inputs")
    if offset != len(rest):
        raise InvalidInputError(f"{len(rest) - offset} bytes of binary data belong to no input")
    return tensors, size


def _raw_reader(raw: memoryview) -> Callable[[DataType, Sequence[int], str], Array]:
    return lambda datatype, shape, what: from_raw(raw, datatype, shape, what=what)


def _value_reader(values: Any) -> Callable[[DataType, Sequence[int], str], Array]:
    return lambda datatype, shape, what: from_values(values, datatype, shape, what=what)


def _read_output(node: Mapping[str, Any], into: RestRequest) -> None:
    name = _text(node, "name", "an output")
    what = f"output {name[:100]!r}"
    parameters = parameters_of(node, what)
    check_placement(parameters, what)
    if "binary_data" in parameters:
        into.binary[name] = flag(parameters, "binary_data")
    if "classification" in parameters:
        num_classes = parameters["classification"]
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise InvalidInputError(f"'classification' of {what} is a number of classes, got {str(num_classes)[:40]}")
        if num_classes:
            into.num_classes[name] = num_classes
    into.wire.outputs.append(name)


def _objects(node: Mapping[str, Any], key: str, *, default: list[Any] | None = None) -> list[Mapping[str, Any]]:
    values = node.get(key, default)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidInputError(f"'{key}' of the request is an array of objects, got {_type(values)}")
    return values


def _text(node: Mapping[str, Any], key: str, what: str, *, default: str | None = None) -> str:
    value = node.get(key, default)
    if not isinstance(value, str):
        raise InvalidInputError(f"'{key}' of {what} is a string, got {_type(value)}")
    return value


def _shape(node: Mapping[str, Any], what: str) -> list[int]:
    shape = node.get("shape")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise InvalidInputError(f"'shape' of {what} is an array of at most {MAX_DIMENSIONS} sizes, got {_type(shape)}")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise InvalidInputError(f"'shape' of {what} has a size that is no whole number from 0 on: {str(size)[:40]}")
    return shape


def _type(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
