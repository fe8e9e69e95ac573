"""REST bodies without a server: what each field of a request becomes, and what each answer is written as."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.rest.codec import MAX_DIMENSIONS, RestRequest, decode, encode
from mlsys_serving.http.errors import HttpError
from mlsys_serving.models import DataType, TensorSpec
from mlsys_serving.models.errors import UnsupportedError

from .answers import answer

GOOD = {"name": "a", "datatype": "FP32", "shape": [2], "data": [1, 2]}


def body(request: Any, *raw: bytes) -> tuple[memoryview, int]:
    header = json.dumps(request).encode()
    return memoryview(b"".join([header, *raw])), len(header)


def decoded(**request: Any) -> RestRequest:
    return decode(body({"inputs": [], **request})[0], None)


def binary(name: str, nbytes: Any, datatype: str = "INT8") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": nbytes}}


def read(request: RestRequest, number: int, datatype: DataType) -> list[Any]:
    tensor = request.wire.inputs[number]
    return tensor.read(datatype, tensor.shape, "x").tolist()


def refused(request: Any, error: type[Exception] = InvalidInputError) -> str:
    with pytest.raises(error) as caught:
        decode(body(request)[0], None)
    return str(caught.value)


def test_the_fields_of_a_request() -> None:
    request = decoded(
        inputs=[GOOD, GOOD | {"name": "b", "shape": [0, 3], "data": []}],
        id="7",
        parameters={"text": "ä", "flag": False},
    )
    assert [(each.name, each.datatype, each.shape) for each in request.wire.inputs] == [
        ("a", "FP32", [2]),
        ("b", "FP32", [0, 3]),
    ]
    assert read(request, 0, DataType.FP32) == [1, 2]
    assert (request.wire.request_id, request.wire.parameters) == ("7", {"text": "ä", "flag": False})
    assert (request.wire.outputs, request.binary_by_default, request.binary, request.num_classes) == ([], False, {}, {})


def test_missing_values_are_empty() -> None:
    request = decode(memoryview(b'{"inputs": []}'), None)
    assert (request.wire.inputs, request.wire.outputs) == ([], [])
    assert (request.wire.request_id, request.wire.parameters) == ("", {})
    assert decoded(parameters=None).wire.parameters == {}


def test_each_output_says_how_it_is_written() -> None:
    outputs = [
        {"name": "plain"},
        {"name": "raw", "parameters": {"binary_data": True}},
        {"name": "json", "parameters": {"binary_data": False}},
        {"name": "best", "parameters": {"classification": 1}},
        {"name": "none", "parameters": {"classification": 0}},
    ]
    request = decoded(outputs=outputs, parameters={"binary_data_output": True, "seed": 1})
    assert request.wire.outputs == ["plain", "raw", "json", "best", "none"]
    assert request.binary_by_default
    assert request.binary == {"raw": True, "json": False}
    assert request.num_classes == {"best": 1}  # 0 classes: the output as it is
    assert request.wire.parameters == {"seed": 1}, "the model gets no parameter that the front understands"


def test_raw_data_stands_behind_the_header_in_the_order_of_the_inputs() -> None:
    inputs = [binary("a", 2), GOOD | {"name": "b"}, binary("c", 2), binary("d", 0) | {"shape": [0]}]
    content, nbytes = body({"inputs": inputs}, b"\1\2", b"\3\4")
    request = decode(content, nbytes)
    assert [read(request, number, DataType.INT8) for number in (0, 2, 3)] == [[1, 2], [3, 4], []]
    assert read(request, 1, DataType.FP32) == [1, 2]
    array = request.wire.inputs[2].read(DataType.INT8, [2], "c")
    assert np.shares_memory(array, np.frombuffer(content, np.uint8)), "tensors are views of the body"
    for number in (0, 1):
        with pytest.raises(InvalidInputError, match=r"^name has "):
            request.wire.inputs[number].read(DataType.FP64, [3], "name")


@pytest.mark.parametrize(
    ("sizes", "raw", "message"),
    [
        ([3, 2], b"1234", "'c' has 'binary_data_size' 2, but 1 bytes are left"),
        ([2], b"123", "1 bytes of binary data belong to no input"),
        ([-1], b"", "'binary_data_size' -1"),
        ([True], b"1", "'binary_data_size' True"),
        ([2.0], b"12", "'binary_data_size' 2.0"),
        (["2"], b"12", "'binary_data_size' 2, but 2 bytes are left"),
    ],
)
def test_sizes_of_raw_data_must_add_up(sizes: Sequence[Any], raw: bytes, message: str) -> None:
    content, nbytes = body({"inputs": [binary(name, size) for name, size in zip("ac", sizes, strict=False)]}, raw)
    with pytest.raises(InvalidInputError) as caught:
        decode(content, nbytes)
    assert message in str(caught.value)


def test_a_header_is_as_long_as_the_body_at_most() -> None:
    content, nbytes = body({"inputs": []})
    assert decode(content, nbytes).wire.inputs == []
    for length in (-1, nbytes + 1):
        with pytest.raises(InvalidInputError, match=f"is {length}, but the body has {nbytes} bytes"):
            decode(content, length)
    with pytest.raises(HttpError):
        decode(content, 0)  # no JSON at all
    with pytest.raises(HttpError):
        decode(memoryview(bytes(content) + b"\1\2"), None)  # without a header's length all of it is JSON


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_shared_memory_is_refused_by_the_tensors_name(where: str) -> None:
    node = GOOD | {"parameters": {"shared_memory_region": "r"}}
    assert f"{where[:-1]} 'a': this server has no shared memory" in refused(
        {"inputs": [], where: [node]}, UnsupportedError
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([1], "a JSON object, got list"),
        ({}, "'inputs' of the request is an array of objects, got nothing"),
        ({"inputs": [1]}, "'inputs' of the request is an array of objects, got list"),
        ({"inputs": [GOOD, 1]}, "array of objects"),
        ({"inputs": [], "outputs": {}}, "'outputs' of the request is an array of objects, got dict"),
        ({"inputs": [], "outputs": [{}]}, "'name' of an output is a string, got nothing"),
        ({"inputs": [{}]}, "'name' of an input is a string, got nothing"),
        ({"inputs": [GOOD | {"datatype": 1}]}, "'datatype' of input 'a' is a string, got int"),
        ({"inputs": [GOOD | {"parameters": 1}]}, "'parameters' of input 'a' is an object, got int"),
        ({"inputs": [], "outputs": [{"name": "y", "parameters": 1}]}, "'parameters' of output 'y' is an object"),
        ({"inputs": [], "parameters": {"x": [1]}}, "parameter 'x' of the request is a string"),
        ({"inputs": [], "parameters": {"x": 1e999}}, "parameter 'x' of the request is a string, a number"),
        ({"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "'binary_data' is true or"),
        ({"inputs": [], "parameters": {"binary_data_output": "no"}}, "'binary_data_output' is true or false"),
        ({"inputs": [], "id": None}, "'id' of the request is a string, got nothing"),
        ({"inputs": [{"name": "a", "datatype": "FP32", "shape": [1]}]}, "input 'a' has neither 'data' nor"),
        ({"inputs": [GOOD | {"parameters": {"binary_data_size": 0}}]}, "input 'a' has both 'data' and"),
        ({"inputs": [GOOD | {"shape": None}]}, "'shape' of input 'a' is an array of at most 64 sizes, got nothing"),
        ({"inputs": [GOOD | {"shape": [1] * 65}]}, "at most 64 sizes"),
        ({"inputs": [GOOD | {"shape": [2, -1]}]}, "from 0 on: -1"),
        ({"inputs": [GOOD | {"shape": [2**63]}]}, f"from 0 on: {2**63}"),
        ({"inputs": [GOOD | {"shape": [True]}]}, "from 0 on: True"),
        *(
            ({"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": many}}]}, "a number of classes")
            for many in (-1, True, 1.0, "2")
        ),
    ],
    ids=str,
)
def test_an_invalid_request_is_refused_by_the_field_at_fault(request_: Any, message: str) -> None:
    content = json.dumps(request_).replace("Infinity", "1e999").encode()
    with pytest.raises(InvalidInputError) as caught:
        decode(memoryview(content), None)
    assert message in str(caught.value)


def test_long_names_and_values_are_cut_in_messages() -> None:
    assert len(refused({"inputs": [GOOD | {"name": "n" * 10_000, "shape": [-(10**500)]}]})) < 300
    assert len(refused({"inputs": [], "parameters": {"p" * 10_000: None}})) < 300
    long = {"name": "n" * 10_000, "parameters": {"classification": "c" * 10_000}}
    assert len(refused({"inputs": [], "outputs": [long]})) < 300
    assert len(refused({"inputs": [binary("n" * 10_000, "s" * 10_000)]})) < 300


def test_the_largest_shape() -> None:
    shape = [1] * (MAX_DIMENSIONS - 2) + [2**63 - 1, 0]
    request = decoded(inputs=[GOOD | {"shape": shape, "data": []}])
    assert (MAX_DIMENSIONS, request.wire.inputs[0].shape) == (64, shape)


WORDS = TensorSpec("words", DataType.BYTES, (-1,))
NUMBERS = TensorSpec("numbers", DataType.INT16, (-1, -1), labels=("no", "yes"))
TEXTS = np.array(["ä".encode(), b"b"], np.object_)
INTS = np.array([[1, -2], [3, 4]], np.int16)


def test_an_answer_in_json() -> None:
    content, nbytes = encode(answer((WORDS, TEXTS), (NUMBERS, INTS), request_id="7", seed=1), decoded())
    assert nbytes is None, "no raw data follows"
    assert json.loads(content) == {
        "model_name": "m",
        "model_version": "3",
        "id": "7",
        "parameters": {"seed": 1},
        "outputs": [
            {"name": "words", "datatype": "BYTES", "shape": [2], "data": ["ä", "b"]},
            {"name": "numbers", "datatype": "INT16", "shape": [2, 2], "data": [1, -2, 3, 4]},
        ],
    }
    assert "ä".encode() in content, "text is UTF-8, not escapes"
    assert b" " not in content


def test_an_answer_without_id_and_parameters_does_not_mention_them() -> None:
    content, _ = encode(answer(), decoded())
    assert json.loads(content) == {"model_name": "m", "model_version": "3", "outputs": []}


def test_raw_outputs_stand_behind_the_header_in_order() -> None:
    request = decoded(
        outputs=[{"name": "numbers", "parameters": {"binary_data": True}}], parameters={"binary_data_output": False}
    )
    content, nbytes = encode(answer((WORDS, TEXTS), (NUMBERS, INTS), (WORDS, TEXTS[:1])), request)
    assert nbytes is not None
    outputs = json.loads(content[:nbytes])["outputs"]
    assert ["data" in output for output in outputs] == [True, False, True]
    assert outputs[1]["parameters"] == {"binary_data_size": 8}
    assert content[nbytes:] == INTS.tobytes()
    request = decoded(
        outputs=[{"name": "words", "parameters": {"binary_data": False}}], parameters={"binary_data_output": True}
    )
    content, nbytes = encode(answer((NUMBERS, INTS), (WORDS, TEXTS), (NUMBERS, -INTS)), request)
    assert content[nbytes:] == INTS.tobytes() + (-INTS).tobytes()


@pytest.mark.parametrize(
    ("max_batch_size", "expected"),
    [(4, [["1:0:no"], ["4:1:yes"]]), (0, ["4:3"])],
    ids=["by row", "all as one"],
)
def test_classifications_are_texts(max_batch_size: int, expected: list[Any]) -> None:
    request = decoded(outputs=[{"name": "numbers", "parameters": {"classification": 1}}])
    content, _ = encode(answer((NUMBERS, INTS), max_batch_size=max_batch_size), request)
    [output] = json.loads(content)["outputs"]
    shape = [len(expected), 1] if max_batch_size else [1]
    assert output == {
        "name": "numbers", "datatype": "BYTES", "shape": shape, "data": np.ravel(expected).tolist(),
    }  # fmt: skip


def test_an_output_that_json_cannot_hold_is_named() -> None:
    spec = TensorSpec("y", DataType.FP32, (-1,))
    with pytest.raises(InvalidInputError, match="output 'y' holds NaN or infinity"):
        encode(answer((spec, np.array([np.nan], np.float32))), decoded())
