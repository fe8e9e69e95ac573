"""Requests as strangers write them by hand, over REST: malformed ones, odd ones, and each form that is allowed."""

from __future__ import annotations

import gzip
import http.client
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from tests.conformance.oip.habits.case import Case, Server

ADD, ECHO = "/v2/models/add/infer", "/v2/models/echo/infer"
LENGTH = "Inference-Header-Content-Length"


def ask(server: Server, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
    """Return status and body; of an error only that it has the protocol's form, as its words are each server's own."""
    host, _, port = server.http.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request(method, path, body or None, dict(headers or {}))
        response = connection.getresponse()
        content = response.read()
        answered = {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()
    return [response.status, *_body(server, response.status, content, answered)]


def _body(server: Server, status: int, content: bytes, headers: Mapping[str, str]) -> list[Any]:
    encoding = headers.get("content-encoding", "")
    if encoding:
        content = gzip.decompress(content) if encoding == "gzip" else zlib.decompress(content)
    if status >= 400:
        try:
            found = json.loads(content)
        except ValueError:
            server.note(repr(content[:200]))
            return ["no JSON"]
        told = found.get("error") if isinstance(found, dict) else None
        return ["error" if isinstance(told, str) and server.note(told) else found]
    binary: list[str] = []
    if (length := headers.get(LENGTH.lower())) is not None:
        binary = [content[int(length) :].hex()]
        content = content[: int(length)]
    kind = headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.strip()]
        return [kind, [json.loads(event) for event in events]]
    try:
        found = json.loads(content) if content else None
    except ValueError:
        return [kind, "no JSON"]
    if isinstance(found, dict):
        found.pop("platform", None)
    return [found, *binary, *([encoding] if encoding else [])]


def tensor(name: str = "a", values: Any = (1, 2), *, shape: Any = (1, 2), datatype: Any = "FP32", **more: Any) -> Any:
    """Return an input; what is None is left out."""
    node = {"name": name, "shape": shape, "datatype": datatype, "data": values} | more
    return {key: value for key, value in node.items() if value is not None}


def infer(*tensors: Any, **more: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"inputs": list(tensors)} | more).encode()


def binary(header: Any, *chunks: bytes, nbytes: Any = None) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request with binary data."""
    text = json.dumps(header).encode()
    return text + b"".join(chunks), {LENGTH: str(len(text) if nbytes is None else nbytes)}


def one(datatype: str, values: Any, shape: Any = (1, 1)) -> bytes:
    """Return a request that echoes one tensor."""
    name = datatype.lower()
    return infer(tensor(name, values, shape=shape, datatype=datatype), outputs=[{"name": f"{name}_out"}])


TWO = struct.pack("<2f", 1, 2)
SIZED = {"parameters": {"binary_data_size": 8}}
WANTS_BINARY = {"parameters": {"binary_data_output": True}}
A = tensor()
RAW_A = tensor(values=None, **SIZED)

# Name: body of POST /v2/models/add/infer
ADD_BODIES: dict[str, bytes] = {
    "flat data": infer(A),
    "nested data": infer(tensor(values=[[1, 2]])),
    "nested otherwise than the shape": infer(tensor(values=[[1, 2, 3, 4]], shape=[2, 2])),
    "unevenly nested": infer(tensor(values=[[1, 2], [3]], shape=[1, 3])),
    "nested in part": infer(tensor(values=[1, [2]])),
    "two rows": infer(tensor(values=[1, 2, 3, 4], shape=[2, 2])),
    "both inputs": infer(A, tensor("b")),
    "both inputs, the other way round": infer(tensor("b"), A),
    "too few elements": infer(tensor(values=[1])),
    "too many elements": infer(tensor(values=[1, 2, 3])),
    "no data": infer(tensor(values=None)),
    "data null": b'{"inputs":[{"name":"a","shape":[1,2],"datatype":"FP32","data":null}]}',
    "data a number": infer(tensor(values=1, shape=[1, 1])),
    "data an object": infer(tensor(values={"x": 1}, shape=[1, 1])),
    "no shape": infer(tensor(shape=None)),
    "no datatype": infer(tensor(datatype=None)),
    "no name": infer({"shape": [1, 2], "datatype": "FP32", "data": [1, 2]}),
    "an empty name": infer(tensor("")),
    "a name that is a number": infer(tensor(values=[1, 2]) | {"name": 1}),
    "no inputs": b"{}",
    "inputs null": b'{"inputs":null}',
    "inputs empty": infer(),
    "inputs an object": b'{"inputs":{}}',
    "an input that is a string": infer("a"),
    "an empty body": b"",
    "a body of spaces": b"  ",
    "an array": b"[]",
    "a string": b'"x"',
    "no JSON": b"hello",
    "JSON that is cut": infer(A)[:-1],
    "JSON and something after": infer(A) + b"x",
    "JSON after a byte order mark": b"\xef\xbb\xbf" + infer(A),
    "JSON with a comment": infer(A)[:-1] + b"/* no */}",
    "JSON with a comma too many": infer(A)[:-2] + b",]}",
    "JSON with bytes that are no UTF-8": infer(A, id="?").replace(b"?", b"\xff"),
    "JSON with a NUL": infer(A) + b"\0",
    "an id": infer(A, id="7"),
    "an empty id": infer(A, id=""),
    "an id of other letters": infer(A, id='ä"\\\n'),
    "an id that is a number": infer(A, id=7),
    "an id that is null": infer(A, id=None),
    "unknown fields": infer(A | {"extra": 1}, extra={"x": []}),
    "a key twice": infer(A)[:-1] + b',"id":"1","id":"2"}',
    "parameters of each kind": infer(A, parameters={"s": "x", "i": 1, "f": 0.5, "b": True}),
    "parameters empty": infer(A, parameters={}),
    "parameters null": infer(A, parameters=None),
    "parameters a list": infer(A, parameters=[1]),
    "a parameter that is an object": infer(A, parameters={"x": {}}),
    "a parameter that is null": infer(A, parameters={"x": None}),
    "a parameter that is a list": infer(A, parameters={"x": [1]}),
    "parameters of an input": infer(A | {"parameters": {"own": 1}}),
    "an output": infer(A, outputs=[{"name": "sum"}]),
    "an unknown output": infer(A, outputs=[{"name": "z"}]),
    "an output twice": infer(A, outputs=[{"name": "sum"}, {"name": "sum"}]),
    "outputs empty": infer(A, outputs=[]),
    "outputs null": infer(A, outputs=None),
    "outputs an object": infer(A, outputs={}),
    "an output that is a string": infer(A, outputs=["sum"]),
    "an output without a name": infer(A, outputs=[{}]),
    "an output with a datatype": infer(A, outputs=[{"name": "sum", "datatype": "FP32"}]),
    "an input twice": infer(A, A),
    "an unknown input": infer(A, tensor("z")),
    "the required input missing": infer(tensor("b")),
    "inputs of different rows": infer(A, tensor("b", [1, 2, 3, 4], shape=[2, 2])),
    "no rows": infer(tensor(values=[], shape=[0, 2])),
    "rows of nothing": infer(tensor(values=[], shape=[1, 0])),
    "too many rows": infer(tensor(values=[0] * 9, shape=[9, 1])),
    "a negative size": infer(tensor(shape=[-1, 2])),
    "two negative sizes": infer(tensor(shape=[-1, -2])),
    "a size that is a fraction": infer(tensor(shape=[1, 2.0])),
    "a size that is a string": infer(tensor(shape=["1", 2])),
    "a size that is true": infer(tensor(values=[1], shape=[True, 1])),
    "a shape that is a number": infer(tensor(shape=2)),
    "a shape that is empty": infer(tensor(values=[1], shape=[])),
    "a shape of one dimension": infer(tensor(shape=[2])),
    "a shape of three dimensions": infer(tensor(shape=[1, 1, 2])),
    "a shape whose product is too large": infer(tensor(values=[1], shape=[2**32, 2**32])),
    "a shape whose size is too large": infer(tensor(values=[1], shape=[2**64, 1])),
    "another datatype": infer(tensor(datatype="INT32")),
    "a datatype in small letters": infer(tensor(datatype="fp32")),
    "an unknown datatype": infer(tensor(datatype="FP8")),
    "a datatype of the configuration": infer(tensor(datatype="TYPE_FP32")),
    "strings for numbers": infer(tensor(values=["1", "2"])),
    "booleans for floats": infer(tensor(values=[True, False])),
    "null among the numbers": infer(tensor(values=[1, None])),
    "large numbers": infer(tensor(values=[1e38, 16777217])),
    "numbers beyond FP32": infer(tensor(values=[1e39, -1e39])),
    "numbers beyond a double": infer(A).replace(b"[1, 2]}", b"[1e400, 2]}"),
    "NaN": infer(A).replace(b"[1, 2]}", b"[NaN, 2]}"),
    "infinity": infer(A).replace(b"[1, 2]}", b"[Infinity, 2]}"),
    "numbers with a sign": infer(A).replace(b"[1, 2]}", b"[+1, 2]}"),
    "classes": infer(A, outputs=[{"name": "sum", "parameters": {"classification": 2}}]),
    "no classes": infer(A, outputs=[{"name": "sum", "parameters": {"classification": 0}}]),
    "a negative number of classes": infer(A, outputs=[{"name": "sum", "parameters": {"classification": -1}}]),
    "more classes than there are": infer(A, outputs=[{"name": "sum", "parameters": {"classification": 9}}]),
    "classes beyond the labels": infer(
        tensor(values=[1, 2, 3, 4], shape=[1, 4]), outputs=[{"name": "sum", "parameters": {"classification": 4}}]
    ),
    "classes of two rows": infer(
        tensor(values=[1, 5, 3, 9, 2, 4], shape=[2, 3]), outputs=[{"name": "sum", "parameters": {"classification": 2}}]
    ),
    "classes of equals": infer(
        tensor(values=[1, 1, 1], shape=[1, 3]), outputs=[{"name": "sum", "parameters": {"classification": 3}}]
    ),
    "classes as a string": infer(A, outputs=[{"name": "sum", "parameters": {"classification": "2"}}]),
    "a priority": infer(A, parameters={"priority": 1}),
    "a negative priority": infer(A, parameters={"priority": -1}),
    "a priority that is a string": infer(A, parameters={"priority": "1"}),
    "a priority that is a fraction": infer(A, parameters={"priority": 1.5}),
    "a timeout": infer(A, parameters={"timeout": 10_000_000}),
    "a timeout of 0": infer(A, parameters={"timeout": 0}),
    "a negative timeout": infer(A, parameters={"timeout": -1}),
    "a timeout that is a string": infer(A, parameters={"timeout": "100"}),
    "binary output": infer(A, **WANTS_BINARY),
    "binary output for one": infer(A, outputs=[{"name": "sum", "parameters": {"binary_data": True}}]),
    "binary output but for one": infer(
        A, outputs=[{"name": "sum", "parameters": {"binary_data": False}}], **WANTS_BINARY
    ),
    "binary output as a number": infer(A, parameters={"binary_data_output": 1}),
    "binary output as a string": infer(A, outputs=[{"name": "sum", "parameters": {"binary_data": "true"}}]),
    "binary classes": infer(A, outputs=[{"name": "sum", "parameters": {"classification": 1, "binary_data": True}}]),
    "a size of binary data and no binary data": infer(RAW_A),
    "a sequence for a model without": infer(A, parameters={"sequence_id": 5, "sequence_start": True}),
}

# Name: (header, chunks, length of the header or None)
BINARY: dict[str, tuple[Any, tuple[bytes, ...], Any]] = {
    "binary data": ({"inputs": [RAW_A]}, (TWO,), None),
    "binary both ways": ({"inputs": [RAW_A], **WANTS_BINARY}, (TWO,), None),
    "binary and JSON beside": ({"inputs": [RAW_A, tensor("b")]}, (TWO,), None),
    "two inputs of binary data": ({"inputs": [RAW_A, RAW_A | {"name": "b"}]}, (TWO, TWO), None),
    "binary data that is too short": ({"inputs": [RAW_A]}, (TWO[:7],), None),
    "binary data that is too long": ({"inputs": [RAW_A]}, (TWO, b"x"), None),
    "binary data of another size than the shape": ({"inputs": [RAW_A | {"shape": [1, 3]}]}, (TWO,), None),
    "binary data and data": ({"inputs": [A | SIZED]}, (TWO,), None),
    "a negative size of binary data": (
        {"inputs": [tensor(values=None, parameters={"binary_data_size": -8})]},
        (TWO,),
        None,
    ),
    "a size of binary data that is a string": (
        {"inputs": [tensor(values=None, parameters={"binary_data_size": "8"})]},
        (TWO,),
        None,
    ),
    "a size of binary data that is 0": (
        {"inputs": [tensor(values=None, shape=[1, 0], parameters={"binary_data_size": 0})]},
        (),
        None,
    ),
    "binary data that no input names": ({"inputs": [A]}, (TWO,), None),
    "a header's length of 0": ({"inputs": [RAW_A]}, (TWO,), 0),
    "a header's length beyond the body": ({"inputs": [RAW_A]}, (TWO,), 10_000),
    "a negative header's length": ({"inputs": [RAW_A]}, (TWO,), -1),
    "a header's length that is no number": ({"inputs": [RAW_A]}, (TWO,), "x"),
    "a header's length that is too small": ({"inputs": [RAW_A]}, (TWO,), 5),
    "NaN in binary data": ({"inputs": [RAW_A], **WANTS_BINARY}, (struct.pack("<2f", float("nan"), 1),), None),
    "NaN in a JSON answer": ({"inputs": [RAW_A]}, (struct.pack("<2f", float("nan"), float("inf")),), None),
}

# Name: body of POST /v2/models/echo/infer
VALUES: dict[str, bytes] = {
    "booleans": one("BOOL", [True, False], [1, 2]),
    "booleans as numbers": one("BOOL", [1, 0], [1, 2]),
    "booleans as strings": one("BOOL", ["true", "false"], [1, 2]),
    **{
        f"limits of INT{bits}": one(f"INT{bits}", [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1], [1, 2])
        for bits in (8, 16, 32, 64)
    },
    **{f"limits of UINT{bits}": one(f"UINT{bits}", [0, 2**bits - 1], [1, 2]) for bits in (8, 16, 32, 64)},
    **{f"beyond INT{bits}": one(f"INT{bits}", [2 ** (bits - 1)]) for bits in (8, 16, 32, 64)},
    **{f"beyond UINT{bits}": one(f"UINT{bits}", [2**bits]) for bits in (8, 16, 32, 64)},
    "a negative UINT8": one("UINT8", [-1]),
    "a negative UINT64": one("UINT64", [-1]),
    "a fraction as INT32": one("INT32", [1.5]),
    "a whole float as INT32": one("INT32", [1.0]),
    "true as INT32": one("INT32", [True]),
    "true among INT32": one("INT32", [1, True], [1, 2]),
    "false among FP32": one("FP32", [0.5, False], [1, 2]),
    "a string as INT32": one("INT32", ["1"]),
    "FP16 as JSON": one("FP16", [0.5]),
    "FP64": one("FP64", [0.1]),
    "FP64 with an exponent": one("FP64", [1e-300, 1.7976931348623157e308], [1, 2]),
    "FP32 that is no double": one("FP32", [0.1]),
    "texts": one("BYTES", ["a", ""], [1, 2]),
    "texts of other letters": one("BYTES", ["ä\u20ac\U0001f600", '\u0000x\n"'], [1, 2]),
    "texts as numbers": one("BYTES", [1, 2], [1, 2]),
    "texts as null": one("BYTES", [None]),
    "texts nested": one("BYTES", [["a"], ["b"]], [2, 1]),
    "no elements": one("FP32", [], [0, 0]),
    "no elements of BYTES": one("BYTES", [], [0, 3]),
    "classes without a batch": infer(
        tensor("int32", [3, 1, 2], shape=[1, 3], datatype="INT32"),
        outputs=[{"name": "int32_out", "parameters": {"classification": 2}}],
    ),
    "classes of floats without labels": infer(
        tensor("fp64", [3, 1.5, 2], shape=[1, 3], datatype="FP64"),
        outputs=[{"name": "fp64_out", "parameters": {"classification": 2}}],
    ),
    # Not classes of texts or booleans: the real Triton crashes on them, and ours refuses them (400).
}


def _element(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _raw(
    datatype: str, data: bytes, shape: Any = (1, 1), *, binary_out: bool = True
) -> tuple[Any, tuple[bytes, ...], Any]:
    name = datatype.lower()
    node = tensor(name, None, shape=shape, datatype=datatype, parameters={"binary_data_size": len(data)})
    output = {"name": f"{name}_out", "parameters": {"binary_data": binary_out}}
    return {"inputs": [node], "outputs": [output]}, (data,), None


ECHO_BINARY: dict[str, tuple[Any, tuple[bytes, ...], Any]] = {
    "binary FP16": _raw("FP16", struct.pack("<e", 0.5)),
    "binary FP16 and a JSON answer": _raw("FP16", struct.pack("<e", 0.5), binary_out=False),
    "binary texts": _raw("BYTES", _element(b"ab") + _element(b""), [1, 2]),
    "binary texts that are no UTF-8": _raw("BYTES", _element(b"\xff\xfe")),
    "binary texts that are no UTF-8 and a JSON answer": _raw("BYTES", _element(b"\xff\xfe"), binary_out=False),
    "binary texts with a NUL and a JSON answer": _raw("BYTES", _element(b"a\0b"), binary_out=False),
    "binary texts whose length is beyond the data": _raw("BYTES", struct.pack("<I", 9) + b"ab"),
    "binary texts with a length that is cut": _raw("BYTES", b"\1\0"),
    "binary texts, more than the shape": _raw("BYTES", _element(b"a") + _element(b"b")),
    "binary texts, fewer than the shape": _raw("BYTES", _element(b"a"), [1, 2]),
    "no binary texts": _raw("BYTES", b"", [0, 1]),
    "binary booleans": _raw("BOOL", b"\0\1", [1, 2]),
    "binary booleans other than 0 and 1": _raw("BOOL", b"\2"),
    "binary INT64": _raw("INT64", struct.pack("<q", -(2**63))),
    "binary UINT64 and a JSON answer": _raw("UINT64", struct.pack("<Q", 2**64 - 1), binary_out=False),
}


def cases() -> list[Case]:
    """Return all of them."""
    found = []

    def post(name: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        found.append(Case(f"REST: {name}", lambda server: ask(server, "POST", path, body, headers)))

    for name, body in ADD_BODIES.items():
        post(name, ADD, body)
    for path, table in ((ADD, BINARY), (ECHO, ECHO_BINARY)):
        for name, (header, chunks, length) in table.items():
            post(name, path, *binary(header, *chunks, nbytes=length))
    for name, body in VALUES.items():
        post(name, ECHO, body)
    return found
