"""Whatever a client sends, it is served or refused by one of our own errors; nothing else comes out of the codecs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import MlsysError
from mlsys_open_inference.binding import WireRequest, bind
from mlsys_open_inference.grpc.codec import decode_message
from mlsys_open_inference.grpc.schema import messages
from mlsys_open_inference.rest.codec import decode
from mlsys_serving.models import DataType
from mlsys_serving.models.version import Version

SETTINGS = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
NAMES = st.sampled_from([datatype.value.lower() for datatype in DataType]) | st.text(max_size=3)
DATATYPES = st.sampled_from([datatype.value for datatype in DataType])
SHAPES = st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**63, 10**30]), max_size=3)
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data", "classification", "priority", "timeout", "x"]),
    st.integers(-1, 20) | SCALARS,
    max_size=3,
)
TENSORS = st.fixed_dictionaries(
    {"name": NAMES | VALUES, "datatype": DATATYPES | VALUES, "shape": SHAPES | VALUES},
    optional={"data": VALUES, "parameters": PARAMETERS | VALUES},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3) | VALUES},
    optional={
        "id": st.text(max_size=3) | VALUES,
        "outputs": st.lists(st.fixed_dictionaries({"name": NAMES}, optional={"parameters": PARAMETERS}), max_size=2)
        | VALUES,
        "parameters": PARAMETERS | VALUES,
    },
)


@pytest.fixture(scope="module")
def version(reference: ModuleType) -> Version:
    return Version(reference.Echo())


def served_or_refused(read: Callable[[], WireRequest], version: Version) -> bool:
    try:
        request = bind(read(), version, now=0.0, deadline_s=None)
    except MlsysError:
        return False
    for name, array in request.inputs.items():
        assert array.dtype == version.inputs[name].datatype.dtype
        assert array.ndim == 2
    return True


@SETTINGS
@given(request=REQUESTS, rest=st.binary(max_size=40), extra=st.integers(-3, 3))
def test_any_rest_request(version: Version, request: Any, rest: bytes, extra: int) -> None:
    header = json.dumps(request).encode()
    served_or_refused(lambda: decode(memoryview(header), None).wire, version)
    served_or_refused(lambda: decode(memoryview(header + rest), len(header) + extra).wire, version)


@SETTINGS
@given(body=st.binary(max_size=60), header_nbytes=st.none() | st.integers(-1, 80))
def test_any_bytes_over_rest(version: Version, body: bytes, header_nbytes: int | None) -> None:
    served_or_refused(lambda: decode(memoryview(body), header_nbytes).wire, version)


@SETTINGS
@given(data=st.data())
def test_any_grpc_request(version: Version, data: Any) -> None:
    request = messages().ModelInferRequest()
    for _ in range(data.draw(st.integers(0, 3))):
        shape = [size for size in data.draw(SHAPES) if size < 2**63]
        tensor = request.inputs.add(name=data.draw(NAMES), datatype=data.draw(DATATYPES), shape=shape)
        field = data.draw(st.sampled_from(["bool_contents", "int_contents", "fp32_contents", "bytes_contents", ""]))
        if field:
            values = {"bool": True, "int_": -1, "fp32": 0.5, "byte": b"x"}
            getattr(tensor.contents, field).extend([values[field[:4]]] * data.draw(st.integers(0, 3)))
    request.raw_input_contents.extend(data.draw(st.lists(st.binary(max_size=16), max_size=3)))
    served_or_refused(lambda: decode_message(request)[0], version)


@SETTINGS
@given(body=st.binary(max_size=80))
def test_any_bytes_over_grpc(version: Version, body: bytes) -> None:
    try:
        request = messages().ModelInferRequest.FromString(body)
    except DecodeError:
        return
    served_or_refused(lambda: decode_message(request)[0], version)


def test_the_fuzzing_is_not_all_refused(version: Version) -> None:
    tensor = {"name": "fp32", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2]]}
    body = json.dumps({"inputs": [tensor]}).encode()
    assert served_or_refused(lambda: decode(memoryview(body), None).wire, version)
