"""Convert gRPC messages to requests, and answers to messages. Pure. Tensors go out as raw bytes, as Triton's do.

The size of typed contents is found before a message is parsed: parsing is one call, which keeps the interpreter's lock.
Two million small integers take as long as the rest of a server may wait. Raw bytes and packed floats of any size are
only copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.binding import WireRequest, WireTensor, check_counts, raw_size
from mlsys_open_inference.classification import classified
from mlsys_open_inference.engine import Answer
from mlsys_open_inference.grpc.schema import messages
from mlsys_open_inference.rest.codec import MAX_DIMENSIONS, check_placement
from mlsys_open_inference.tensors import from_elements, from_numbers, from_raw, to_raw
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.model import Parameter
from mlsys_serving.models.version import Version

_MAX_INT64 = 2**63 - 1
MAX_CONTENTS = 2_000_000  # bytes of integers and booleans, and elements of BYTES, as contents of a request
_INPUTS = _TYPED = 5  # numbers of the fields ModelInferRequest.inputs, and InferInputTensor.contents
_FLOATS = frozenset({6, 7})  # fp32_contents, fp64_contents
_BYTES = 8  # bytes_contents
# The field of InferTensorContents that holds a datatype; FP16 and BF16 have none.
_CONTENTS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}


def parse_message(name: str, content: bytes) -> Any:
    """Parse ``content`` as a message of type ``name``.

    Raises:
        InvalidInputError: it is none (grpc itself would end the call as an internal error, uncounted), or it has too
            many typed contents.
    """
    if name == "ModelInferRequest" and len(content) > MAX_CONTENTS:
        check_contents(content)
    try:
        return getattr(messages(), name).FromString(content)
    except DecodeError as error:
        raise InvalidInputError(f"the request's {len(content)} bytes are no {name} ({error})") from error


def decode_message(request: Any, version: Version | None = None) -> tuple[WireRequest, dict[str, int]]:
    """Return the request in a ``ModelInferRequest``, and the number of classes of outputs wanted as classifications.

    Args:
        request: the message.
        version: the model that it is for; None does not count its tensors.

    Raises:
        InvalidInputError: its tensors and their data do not go together.
        UnsupportedError: it names shared memory.
    """
    if version is not None:
        check_counts(version, num_inputs=len(request.inputs), num_outputs=len(request.outputs))
    for tensor in request.inputs:
        if tensor.parameters:
            check_placement(parameters_of(tensor.parameters), f"input {tensor.name[:100]!r}")
    raw: Sequence[bytes | None] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInputError(
            f"raw_input_contents has {len(raw)} elements for {len(request.inputs)} inputs: give one for each, or none"
        )
    parts = raw or [None] * len(request.inputs)  # None: typed contents
    wire = WireRequest(
        inputs=[_tensor(tensor, part) for tensor, part in zip(request.inputs, parts, strict=True)],
        request_id=request.id,
        parameters=parameters_of(request.parameters) if request.parameters else {},
    )
    for tensor, part in zip(request.inputs, parts, strict=True):
        if part is None:
            wire.size += tensor.contents.ByteSize()
        else:
            wire.size += raw_size(len(part), tensor.datatype)
    num_classes: dict[str, int] = {}
    for output in request.outputs:
        wire.outputs.append(output.name)
        if output.parameters:
            parameters = parameters_of(output.parameters)
            check_placement(parameters, f"output {output.name[:100]!r}")
            count = parameters.get("classification", 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidInputError(f"'classification' of output {output.name[:100]!r} is a number of classes")
            if count:
                num_classes[output.name] = count
    return wire, num_classes


def encode_message(answer: Answer, num_classes: Mapping[str, int]) -> Any:
    """Return the ``ModelInferResponse`` of an answer."""
    spec = answer.version.spec
    response = messages().ModelInferResponse(
        model_name=spec.name, model_version=spec.version, id=answer.request.request_id
    )
    set_parameters(response.parameters, answer.parameters)
    for output, array in answer.outputs:
        datatype = output.datatype
        if output.name in num_classes:
            array = classified(array, output, num_classes[output.name], has_batch=bool(spec.max_batch_size))
            datatype = DataType.BYTES
        response.outputs.add(name=output.name, datatype=datatype.value, shape=array.shape)
        response.raw_output_contents.append(bytes(to_raw(array, datatype)))
    return response


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the plain values of a map of ``InferParameter``.

    Raises:
        InvalidInputError: one of them has no value.
    """
    plain: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidInputError(f"parameter {name[:100]!r} has no value")
        plain[name] = getattr(parameter, choice)
    return plain


def set_parameters(into: Any, parameters: Mapping[str, Parameter]) -> None:
    """Write plain values to a map of ``InferParameter``."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            into[name].bool_param = value
        elif isinstance(value, int) and value > _MAX_INT64:
            into[name].uint64_param = value
        elif isinstance(value, int):
            into[name].int64_param = value
        elif isinstance(value, float):
            into[name].double_param = value
        else:
            into[name].string_param = value


def _tensor(tensor: Any, raw: bytes | None) -> WireTensor:
    what = f"input {tensor.name[:100]!r}"
    shape = list(tensor.shape)
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise InvalidInputError(f"'shape' of {what} is at most {MAX_DIMENSIONS} sizes from 0 on, got {shape[:32]}")
    if raw is None:
        read = _contents_reader(tensor.contents)
    elif tensor.HasField("contents"):
        raise InvalidInputError(f"{what} has 'contents' and raw_input_contents: give one of them")
    else:
        read = _raw_reader(raw)
    return WireTensor(tensor.name, tensor.datatype, shape, read)


def _raw_reader(raw: bytes) -> Callable[[DataType, Sequence[int], str], Array]:
    return lambda datatype, shape, what: from_raw(memoryview(raw), datatype, shape, what=what)


def _contents_reader(contents: Any) -> Callable[[DataType, Sequence[int], str], Array]:
    def read(datatype: DataType, shape: Sequence[int], what: str) -> Array:
        expected = _CONTENTS.get(datatype)
        given = [field.name for field, _ in contents.ListFields()]
        if expected is None:
            raise InvalidInputError(f"{what} is {datatype.value}, which only raw_input_contents can hold")
        if any(name != expected for name in given):
            raise InvalidInputError(f"{what} is {datatype.value}, whose contents are in {expected}; got {given}")
        elements = getattr(contents, expected)
        if datatype is DataType.BYTES:
            return from_elements(list(elements), shape, what=what)
        return from_numbers(elements, datatype, shape, what=what)

    return read


def check_contents(message: bytes) -> None:
    """Check that a ``ModelInferRequest`` has not too much slow content; other messages pass.

    Raises:
        InvalidInputError: it has.
    """
    size = 0
    for number, start, stop in _fields(message, 0, len(message)):
        for inner, inner_start, inner_stop in _fields(message, start, stop) if number == _INPUTS else ():
            size += 1
            for kind, first, last in _fields(message, inner_start, inner_stop) if inner == _TYPED else ():
                size += 1 if kind == _BYTES or kind in _FLOATS else last - first
                if size > MAX_CONTENTS:
                    break
        size += 1
        if size > MAX_CONTENTS:
            raise InvalidInputError(
                f"the request has more than {MAX_CONTENTS} bytes of integers, or elements of BYTES, as contents: send "
                "raw_input_contents"
            )


def _fields(message: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field; stop where the message is malformed."""
    at = start
    while at < stop:
        tag, at = _varint(message, at, stop)
        kind = tag & 7
        begin = at
        if kind == 0:
            _, at = _varint(message, at, stop)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            length, begin = _varint(message, at, stop)
            at = begin + length
        else:  # groups are not used here
            return
        if at > stop:
            return
        yield tag >> 3, begin, at


def _varint(message: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return an integer and its end; past ``stop`` if it is malformed."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, stop + 1
