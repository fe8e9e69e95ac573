"""Large requests: read in pieces beside the event loop, equal to what the whole would be, or refused before it."""

from __future__ import annotations

import gzip
import json
import threading
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference import engine
from mlsys_open_inference.grpc import codec as grpc_codec
from mlsys_open_inference.grpc import server as grpc_server
from mlsys_open_inference.grpc import servicer as grpc_servicer
from mlsys_open_inference.grpc.codec import MAX_CONTENTS, check_contents
from mlsys_open_inference.grpc.schema import messages
from mlsys_open_inference.number_arrays import MAX_VALUES, lifted
from mlsys_open_inference.rest import codec as rest_codec
from mlsys_open_inference.rest import routes as rest
from mlsys_open_inference.tensors import from_values
from mlsys_serving.http import HttpError
from mlsys_serving.http.bodies import parse_json
from mlsys_serving.models.datatypes import DataType
from mlsys_serving.models.version import Version

LONG = 5000  # numbers; more than is left where it is


def _arrays(body: Any) -> list[np.ndarray[Any, Any]]:
    return list(lifted(json.dumps(body).encode())[1].values())


@pytest.mark.parametrize("pretty", [None, 1])
@pytest.mark.parametrize("values", [[1, -2], [0.5, -1e-300, 1e300, 0.1], [1, 2.5]])
@pytest.mark.parametrize("shape", [(LONG,), (2, LONG), (LONG, 1), (5, 10, 100), (1, 1, LONG), (3, 70_000)])
def test_an_array_of_numbers_is_what_numpy_makes_of_the_parsed_one(
    pretty: int | None, values: list[float], shape: tuple[int, ...]
) -> None:
    flat = (values * (int(np.prod(shape)) // len(values) + 1))[: int(np.prod(shape))]
    nested = np.array(flat, np.object_).reshape(shape).tolist()
    text, found = lifted(json.dumps({"a": "data", "inputs": [{"data": nested, "b": 1}]}, indent=pretty).encode())
    (array,) = found.values()
    expected = np.array(nested)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(array, expected)
    assert parse_json(text) == {"a": "data", "inputs": [{"data": next(iter(found)), "b": 1}]}


@pytest.mark.parametrize(
    "value",
    [
        "x" * LONG,
        ["a"] * LONG,
        [True] * LONG,
        [1] * LONG + [None],
        [1] * LONG + ["2"],
        [[1] * LONG, [1] * (LONG - 1)],
        [[1] * LONG, 1],
        [[1, 2]] * LONG + [[]],
        [[1, 2]] * LONG + [[[1, 2]]],
        [[]] * LONG,
        [1, [2]] + [1] * LONG,
        [2**63] * LONG,
        [2**70] * LONG,
        [-1, 2**63] * LONG,
        [1] * 10,
        {"data": 1},
    ],
)
def test_other_arrays_than_even_ones_of_int64_or_double_are_left_to_the_parser(value: Any) -> None:
    body = json.dumps({"data": value}).encode()
    assert lifted(body) == (body, {})


def test_a_text_that_looks_like_the_key_is_left_alone() -> None:
    inside = '"data": [' + "1, " * LONG + "1]"
    body = json.dumps({"text": inside, inside: 1, 'x\\"data': [1] * LONG}).encode()
    assert lifted(body) == (body, {})


BROKEN = [b"[1", b"1[", b"1]", b"1,,2", b"1, ,2", b"1 2", b"01", b"1.", b"+1", b"1e", b"-", b",1", b"1,"]


@pytest.mark.parametrize("many", [LONG, 200_000])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_wrong_number_is_refused_wherever_it_stands(many: int, position: str, broken: bytes) -> None:
    before, after = {"first": (b"", b",1" * many), "middle": (b"1," * many, b",1" * many), "last": (b"1," * many, b"")}[
        position
    ]
    body = b'{"data": [' + before + broken + after + b"]}"
    with pytest.raises(HttpError) as caught:
        parse_json(lifted(body)[0])
    assert (caught.value.http_status, caught.value.error_code) == (400, "malformed_json")


numbers = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
junk = st.sampled_from([b"", b"]", b"[", b",", b"}", b'"', b"1", b"\\", b' "data": [', b"e", b"[]", b" "])


@settings(max_examples=200)
@example([2**53 + 1, 0.0], 1, b"", 0, False)
@given(st.lists(numbers, min_size=1, max_size=40), st.integers(1, 4), junk, st.integers(0, 10_000), st.booleans())
def test_damaged_bodies_are_equal_or_refused(
    values: list[float], rows: int, damage: bytes, position: int, cut: bool
) -> None:
    row = values * (4096 // len(values))
    body = json.dumps({"inputs": [{"name": "x", "data": [row] * rows if rows > 1 else row}], "id": "y"}).encode()
    at = position * len(body) // 10_000
    body = body[:at] + damage + (b"" if cut else body[at:])
    try:
        expected = parse_json(body, check_floats=False)
    except HttpError:
        with pytest.raises(HttpError):
            parse_json(lifted(body)[0], check_floats=False)
        return
    text, found = lifted(body)
    value = parse_json(text, check_floats=False)
    assert _is_like(value, expected, found)


def _is_like(value: Any, expected: Any, arrays: dict[str, Any]) -> bool:
    """Compare, an array that was taken out with what numpy makes of the list: doubles, if one number is no integer."""
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(_is_like(value[key], expected[key], arrays) for key in value)
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(partial(_is_like, arrays=arrays), value, expected))
    if isinstance(value, str) and value in arrays:
        same = np.array(expected)
        return arrays[value].dtype == same.dtype and np.array_equal(
            arrays[value], same, equal_nan=same.dtype.kind == "f"
        )
    return bool(value == expected)


def test_so_many_values_beside_arrays_of_numbers_are_refused_before_they_are_parsed() -> None:
    assert _arrays({"data": [1] * (MAX_VALUES + 1)})[0].size == MAX_VALUES + 1
    with pytest.raises(HttpError, match="binary data"):
        lifted(b'{"data": [' + b'"",' * (MAX_VALUES + 1) + b'""]}')


@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.INT64, DataType.UINT64, DataType.UINT8, DataType.BOOL])
@pytest.mark.parametrize(
    "values", [[1, 2], [10**20, 1], [0.5, 1], [300, 1], [-1, 1], [True, False], [True, 2], [2**63, 1], [1e400]]
)
def test_long_lists_are_what_short_ones_are(datatype: DataType, values: list[Any]) -> None:
    """Pieces make the same array, and the same refusals, as one call on the whole."""

    def read(number: int) -> Any:
        try:
            array = from_values(values * number, datatype, [len(values) * number], what="x")
        except InvalidInputError as error:
            return str(error)
        return array.dtype, array[: len(values)].tolist()

    assert read(100_000) == read(1)


def test_typed_contents_are_bounded_before_they_are_parsed_and_floats_and_raw_bytes_are_not() -> None:
    def message(raw: bytes | None = None, **contents: Any) -> bytes:
        request = messages().ModelInferRequest(model_name="m")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1])
        for name, values in contents.items():
            getattr(tensor.contents, name).extend(values)
        if raw is not None:
            request.raw_input_contents.append(raw)
        content: bytes = request.SerializeToString()
        return content

    for small in (
        message(fp32_contents=[0.5] * MAX_CONTENTS),
        message(raw=bytes(8 * MAX_CONTENTS)),
        message(bytes_contents=[bytes(MAX_CONTENTS)] * 4),
        message(int64_contents=[1] * (MAX_CONTENTS - 100)),
        b"\x2a\xff\xff\xff\xff\x7f" + bytes(MAX_CONTENTS),  # an input longer than the message
        b"\xff" * MAX_CONTENTS,
    ):
        check_contents(small)
    many = messages().ModelInferRequest()
    many.outputs.extend([messages().ModelInferRequest.InferRequestedOutputTensor()] * (MAX_CONTENTS + 1))
    for large in (
        message(int64_contents=[1] * (MAX_CONTENTS + 1)),
        message(bool_contents=[True] * (MAX_CONTENTS + 1)),
        message(bytes_contents=[b""] * (MAX_CONTENTS + 1)),
        many.SerializeToString(),
    ):
        with pytest.raises(InvalidInputError, match="raw_input_contents"):
            check_contents(large)


def test_a_request_of_more_tensors_than_the_model_has_is_refused_before_each_is_looked_at(reference: Any) -> None:
    version = Version(reference.Add())
    request = messages().ModelInferRequest(model_name="add")
    for _ in range(1000):
        request.inputs.add(name="x")
    with pytest.raises(InvalidInputError, match="has 1000 inputs"):
        grpc_codec.decode_message(request, version)
    body = json.dumps({"inputs": [{}] * 1000}).encode()
    with pytest.raises(InvalidInputError, match="has 1000 inputs"):
        rest_codec.decode(memoryview(body), None, version)
    body = json.dumps({"inputs": [], "outputs": [{}] * 1000}).encode()
    with pytest.raises(InvalidInputError, match="has 1000 outputs"):
        rest_codec.decode(memoryview(body), None, version)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(call, thread) of all that grows with a request; the calls run as ever."""
    seen: set[tuple[str, str]] = set()

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.add((name, threading.current_thread().name))
            return call(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in [
        (rest, "decode"), (rest, "encode"), (rest, "decompressed"), (rest, "compressed"),
        (engine, "bind"), (grpc_server, "parse_message"), (grpc_servicer, "encode_message"),
    ]:  # fmt: skip
        watch(owner, name)
    return seen


LARGE = "mlsys-front-large_0"


async def test_the_work_of_large_requests_is_not_done_on_the_event_loops_thread(
    client: httpx.AsyncClient, threads: set[tuple[str, str]]
) -> None:
    values = [[0.25, -1.5] * 50_000]
    tensor = {"name": "fp32", "datatype": "FP32", "shape": [1, 100_000], "data": values}
    body = json.dumps({"inputs": [tensor], "outputs": [{"name": "fp32_out"}]}).encode()
    headers = {"content-encoding": "gzip", "accept-encoding": "gzip"}
    answer = await client.post("/v2/models/echo/infer", content=gzip.compress(body), headers=headers)
    assert answer.json()["outputs"][0]["data"] == values[0]
    names = {"decode", "encode", "decompressed", "compressed", "bind"}
    assert threads == {(name, LARGE) for name in names}


async def test_small_requests_pay_for_no_thread(client: httpx.AsyncClient, threads: set[tuple[str, str]]) -> None:
    tensor = {"name": "fp32", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    assert (await client.post("/v2/models/echo/infer", json={"inputs": [tensor]})).status_code == 200
    assert {thread for _, thread in threads} == {"MainThread"}


async def test_numbers_called_data_that_are_no_inputs_are_refused(client: httpx.AsyncClient) -> None:
    tensor = {"name": "fp32", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    for body in (
        {"inputs": [tensor], "parameters": {"data": [1] * 70_000}},
        {"inputs": [tensor | {"parameters": {"data": [1] * 70_000}}]},
        {"inputs": [tensor | {"data": "x" * 70_000}]},
        {"inputs": [{"name": "bytes", "datatype": "BYTES", "shape": [1, 70_000], "data": [1] * 70_000}]},
    ):
        answer = await client.post("/v2/models/echo/infer", json=body)
        assert answer.status_code == 400, answer.text[:200]


def test_no_call_turns_more_than_a_piece_of_a_long_list_into_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = np.array

    def watched(values: Any, *args: Any) -> Any:
        sizes.append(len(values))
        return make(values, *args)

    monkeypatch.setattr(np, "array", watched)
    assert from_values([0.5] * 300_000, DataType.FP32, [300_000], what="x").sum() == 150_000
    assert max(sizes) == 65_536
    # A piece of another kind: as numpy has it of the whole.
    assert from_values([1] * 100_000 + [0.5], DataType.FP64, [100_001], what="x").sum() == 100_000.5
