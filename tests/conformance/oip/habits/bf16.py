"""Tensors in bfloat16, over REST and gRPC by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tests.conformance.oip.habits import raw_grpc as by_grpc
from tests.conformance.oip.habits.case import Case, Server
from tests.conformance.oip.habits.raw_http import ask, binary, infer, tensor

BFLOAT = "/v2/models/bfloat/infer"
TWO = struct.pack("<2f", 1, 2)
# 1, -2, the largest, the smallest of all, NaN and infinity
BITS = struct.pack("<6H", 0x3F80, 0xC000, 0x7F7F, 0x0001, 0x7FC0, 0x7F80)
WANTS_BINARY = {"parameters": {"binary_data_output": True}}


def _bf16(nbytes: int, shape: Any = (1, 6), **more: Any) -> Any:
    return tensor("x", None, shape=shape, datatype="BF16", parameters={"binary_data_size": nbytes}, **more)


# Name: (path, body and headers)
POSTED: dict[str, tuple[str, tuple[bytes, dict[str, str]]]] = {
    "bf16, binary": (BFLOAT, binary({"inputs": [_bf16(12)], **WANTS_BINARY}, BITS)),
    "bf16, rows": (BFLOAT, binary({"inputs": [_bf16(12, (2, 3))], **WANTS_BINARY}, BITS)),
    "bf16, binary but for the answer": (BFLOAT, binary({"inputs": [_bf16(4, (1, 2))]}, BITS[:4])),
    "bf16, too few bytes": (BFLOAT, binary({"inputs": [_bf16(10)], **WANTS_BINARY}, BITS[:10])),
    "bf16, bytes of FP32": (BFLOAT, binary({"inputs": [_bf16(24)], **WANTS_BINARY}, bytes(24))),
    "bf16, JSON": (BFLOAT, (infer(tensor("x", datatype="BF16")), {})),
    "bf16, as FP32": (BFLOAT, (infer(tensor("x")), {})),
    "bf16, as FP16": (
        BFLOAT,
        binary({"inputs": [_bf16(4, (1, 2)) | {"datatype": "FP16"}], **WANTS_BINARY}, BITS[:4]),
    ),
    "bf16, no elements": (BFLOAT, binary({"inputs": [_bf16(0, (1, 0))], **WANTS_BINARY})),
    "bf16, classes": (
        BFLOAT,
        binary(
            {"inputs": [_bf16(4, (1, 2))], "outputs": [{"name": "y", "parameters": {"classification": 1}}]}, BITS[:4]
        ),
    ),
}
SEEN = {"bf16, metadata": "/v2/models/bfloat", "bf16, ready": "/v2/models/bfloat/ready"}


def _bfloat(*tensors: Any, **more: Any) -> Any:
    return by_grpc.request(*tensors, model="bfloat", **more)


CALLED: dict[str, Any] = {
    "bf16": _bfloat(by_grpc.tensor("x", (1, 6), "BF16"), raw=[BITS]),
    "bf16, two rows": _bfloat(by_grpc.tensor("x", (2, 3), "BF16"), raw=[BITS]),
    "bf16, too few bytes": _bfloat(by_grpc.tensor("x", (1, 6), "BF16"), raw=[BITS[:-1]]),
    "bf16, typed as floats": _bfloat(by_grpc.tensor("x", (1, 2), "BF16", fp32_contents=[1, 2])),
    "bf16, typed as bytes": _bfloat(by_grpc.tensor("x", (1, 1), "BF16", bytes_contents=[BITS[:2]])),
    "bf16, as FP32": _bfloat(by_grpc.tensor("x"), raw=[TWO]),
}


def cases() -> list[Case]:
    """Return all of them."""

    def posted(path: str, body: bytes, headers: dict[str, str]) -> Callable[[Server], Any]:
        return lambda server: ask(server, "POST", path, body, headers)

    def seen(path: str) -> Callable[[Server], Any]:
        return lambda server: ask(server, "GET", path)

    def called(message: Any) -> Callable[[Server], Any]:
        return lambda server: by_grpc.call(server, lambda stub: by_grpc.found(stub.ModelInfer(message, timeout=30)))

    return [
        *(Case(f"REST: {name}", posted(path, *sent)) for name, (path, sent) in POSTED.items()),
        *(Case(f"REST: {name}", seen(path)) for name, path in SEEN.items()),
        *(Case(f"gRPC: {name}", called(message)) for name, message in CALLED.items()),
    ]
