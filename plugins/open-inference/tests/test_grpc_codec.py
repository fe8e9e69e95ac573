"""gRPC messages without a channel: what each field of a request becomes, and what each answer is written as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.grpc.codec import (
    decode_message,
    encode_message,
    parameters_of,
    parse_message,
    set_parameters,
)
from mlsys_open_inference.grpc.schema import messages
from mlsys_open_inference.rest.codec import MAX_DIMENSIONS
from mlsys_serving.models import DataType, TensorSpec
from mlsys_serving.models.errors import UnsupportedError

from .answers import answer

m = messages()


def request_of(*shapes: list[int], datatype: str = "INT16", **fields: Any) -> Any:
    """A request of inputs "a", "b", ... of these shapes."""
    request = m.ModelInferRequest(model_name="m", **fields)
    for name, shape in zip("abc", shapes, strict=False):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def refused(request: Any, error: type[Exception] = InvalidInputError) -> str:
    with pytest.raises(error) as caught:
        decode_message(request)
    return str(caught.value)


def read(request: Any, datatype: DataType, number: int = 0) -> Any:
    tensor = decode_message(request)[0].inputs[number]
    return tensor.read(datatype, tensor.shape, "x")


def test_the_fields_of_a_request() -> None:
    request = request_of([2], [0, 3], id="7", raw_input_contents=[b"\1\0\2\0", b""])
    request.parameters["seed"].int64_param = 5
    for name in ("y", "z"):
        request.outputs.add(name=name)
    wire, num_classes = decode_message(request)
    assert [(each.name, each.datatype, each.shape) for each in wire.inputs] == [
        ("a", "INT16", [2]),
        ("b", "INT16", [0, 3]),
    ]
    assert (wire.request_id, wire.parameters, wire.outputs, num_classes) == ("7", {"seed": 5}, ["y", "z"], {})
    assert [read(request, DataType.INT16, number).tolist() for number in (0, 1)] == [[1, 2], []]


def test_missing_values_are_empty() -> None:
    wire, num_classes = decode_message(m.ModelInferRequest())
    assert (wire.inputs, wire.outputs, wire.request_id, wire.parameters, num_classes) == ([], [], "", {}, {})


CONTENTS = [
    (DataType.BOOL, "bool_contents", [True, False]),
    *((datatype, "int_contents", [-1, 2]) for datatype in (DataType.INT8, DataType.INT16, DataType.INT32)),
    (DataType.INT64, "int64_contents", [-(2**63), 2**63 - 1]),
    *((datatype, "uint_contents", [0, 200]) for datatype in (DataType.UINT8, DataType.UINT16, DataType.UINT32)),
    (DataType.UINT64, "uint64_contents", [0, 2**64 - 1]),
    (DataType.FP32, "fp32_contents", [0.5, -1.0]),
    (DataType.FP64, "fp64_contents", [0.1, -1e300]),
    (DataType.BYTES, "bytes_contents", [b"\xff\0", b""]),
]


@pytest.mark.parametrize(("datatype", "field", "values"), CONTENTS, ids=str)
def test_typed_contents(datatype: DataType, field: str, values: list[Any]) -> None:
    request = request_of([1, 2])
    getattr(request.inputs[0].contents, field).extend(values)
    array = read(request, datatype)
    assert (array.dtype, array.tolist()) == (datatype.dtype, [values])
    other = "fp64_contents" if field != "fp64_contents" else "fp32_contents"
    getattr(request.inputs[0].contents, other).append(1)
    with pytest.raises(InvalidInputError, match=f"x is {datatype.value}, whose contents are in {field}; got"):
        read(request, datatype)


def test_contents_must_be_there_and_fit() -> None:
    assert read(request_of([0]), DataType.INT8).tolist() == []
    with pytest.raises(InvalidInputError, match=r"x has 0 elements of data, but shape \[2\] takes 2"):
        read(request_of([2]), DataType.INT8)
    with pytest.raises(InvalidInputError, match="x has 0 elements of data"):
        read(request_of([2]), DataType.BYTES)
    for datatype in (DataType.FP16, DataType.BF16):
        with pytest.raises(InvalidInputError, match=f"x is {datatype.value}, which only raw_input_contents can hold"):
            read(request_of([0]), datatype)
    request = request_of([1])
    request.inputs[0].contents.int_contents.append(128)
    with pytest.raises(InvalidInputError, match="x: an element is out of the range of INT8"):
        read(request, DataType.INT8)


def test_raw_contents_are_for_all_inputs_or_none() -> None:
    for raw in ([b""], [b"", b"", b""]):
        message = refused(request_of([0], [0], raw_input_contents=raw))
        assert f"raw_input_contents has {len(raw)} elements for 2 inputs" in message
    request = request_of([0], [0], raw_input_contents=[b"", b""])
    request.inputs[1].contents.int_contents.append(1)
    assert "input 'b' has 'contents' and raw_input_contents" in refused(request)
    with pytest.raises(InvalidInputError, match="x has 3 bytes of data"):
        read(request_of([2], raw_input_contents=[b"123"]), DataType.INT16)


def test_shapes_are_bounded() -> None:
    shape = [1] * (MAX_DIMENSIONS - 1) + [0]
    assert decode_message(request_of(shape))[0].inputs[0].shape == shape
    for bad in ([1, *shape], [2, -1], [-1]):
        assert "'shape' of input 'a' is at most 64 sizes from 0 on" in refused(request_of(bad))
    request = request_of([-1])
    request.inputs[0].name = "n" * 10_000
    request.inputs[0].shape.extend([1] * 10_000)
    assert len(refused(request)) < 400


@pytest.mark.parametrize(("count", "expected"), [(0, {}), (1, {"y": 1}), (7, {"y": 7})])
def test_outputs_wanted_as_classes(count: int, expected: dict[str, int]) -> None:
    request = request_of()
    request.outputs.add(name="x").parameters["other"].bool_param = True
    request.outputs.add(name="y").parameters["classification"].int64_param = count
    wire, num_classes = decode_message(request)
    assert (wire.outputs, num_classes) == (["x", "y"], expected)


def test_an_invalid_number_of_classes_is_refused() -> None:
    for field, value in (("int64_param", -1), ("bool_param", True), ("double_param", 1.0), ("string_param", "2")):
        request = request_of()
        setattr(request.outputs.add(name="y").parameters["classification"], field, value)
        assert refused(request) == "'classification' of output 'y' is a number of classes"


def test_shared_memory_is_refused_by_the_tensors_name() -> None:
    request = request_of([0])
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert "input 'a': this server has no shared memory" in refused(request, UnsupportedError)
    request = request_of()
    request.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"
    assert "output 'y': this server has no shared memory" in refused(request, UnsupportedError)


def test_parameters_both_ways() -> None:
    plain = {
        "flag": True,
        "off": False,
        "count": -(2**63),
        "large": 2**64 - 1,
        "none": 0,
        "rate": 0.5,
        "zero": 0.0,
        "text": "ä",
        "no": "",
    }
    request = m.ModelInferRequest()
    set_parameters(request.parameters, plain)
    again = parameters_of(m.ModelInferRequest.FromString(request.SerializeToString()).parameters)
    assert {name: (type(value), value) for name, value in again.items()} == {
        name: (type(value), value) for name, value in plain.items()
    }
    request.parameters["nothing"].Clear()
    with pytest.raises(InvalidInputError, match="parameter 'nothing' has no value"):
        parameters_of(request.parameters)


def test_bytes_that_are_no_message_are_refused() -> None:
    request = request_of([1], id="7")
    assert parse_message("ModelInferRequest", request.SerializeToString()) == request
    with pytest.raises(InvalidInputError, match="the request's 3 bytes are no ModelInferRequest"):
        parse_message("ModelInferRequest", b"\x0a\xff\xff")


NUMBERS = TensorSpec("numbers", DataType.INT16, (-1, -1), labels=("no", "yes"))
WORDS = TensorSpec("words", DataType.BYTES, (-1,))
INTS = np.array([[1, -2], [3, 4]], np.int16)


def test_an_answer() -> None:
    words = np.array([b"ab", b""], np.object_)
    response = encode_message(answer((WORDS, words), (NUMBERS, INTS), request_id="7", seed=5), {})
    assert (response.model_name, response.model_version, response.id) == ("m", "3", "7")
    assert parameters_of(response.parameters) == {"seed": 5}
    assert [(output.name, output.datatype, list(output.shape)) for output in response.outputs] == [
        ("words", "BYTES", [2]),
        ("numbers", "INT16", [2, 2]),
    ]
    assert list(response.raw_output_contents) == [b"\2\0\0\0ab\0\0\0\0", INTS.tobytes()]


@pytest.mark.parametrize(("max_batch_size", "shape", "texts"), [
    (4, [2, 1], [b"1:0:no", b"4:1:yes"]), (0, [1], [b"4:3"]),
])  # fmt: skip
def test_classifications_are_texts(max_batch_size: int, shape: list[int], texts: list[bytes]) -> None:
    given = answer((WORDS, np.array([b"w"], np.object_)), (NUMBERS, INTS), max_batch_size=max_batch_size)
    response = encode_message(given, {"numbers": 1})
    output = response.outputs[1]
    assert (output.name, output.datatype, list(output.shape)) == ("numbers", "BYTES", shape)
    assert response.raw_output_contents[1] == b"".join(len(t).to_bytes(4, "little") + t for t in texts)
    assert response.raw_output_contents[0] == b"\1\0\0\0w"
