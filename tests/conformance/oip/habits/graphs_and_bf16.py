"""Graphs of models, and tensors in bfloat16, over REST and gRPC by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tests.conformance.oip.habits import raw_grpc as by_grpc
from tests.conformance.oip.habits.case import Case, Server
from tests.conformance.oip.habits.raw_http import ask, binary, infer, tensor

CHAIN, BREAKS, BFLOAT = (f"/v2/models/{name}/infer" for name in ("chain", "breaks", "bfloat"))
TWO = struct.pack("<2f", 1, 2)
RAW = tensor("raw")
# 1, -2, the largest, the smallest of all, NaN and infinity
BITS = struct.pack("<6H", 0x3F80, 0xC000, 0x7F7F, 0x0001, 0x7FC0, 0x7F80)
WANTS_BINARY = {"parameters": {"binary_data_output": True}}


def _bf16(nbytes: int, shape: Any = (1, 6), **more: Any) -> Any:
    return tensor("x", None, shape=shape, datatype="BF16", parameters={"binary_data_size": nbytes}, **more)


# Name: (path, body and headers)
POSTED: dict[str, tuple[str, tuple[bytes, dict[str, str]]]] = {
    "graph": (CHAIN, (infer(RAW), {})),
    "graph, two rows": (CHAIN, (infer(tensor("raw", [1, 2, 3, 4], shape=[2, 2])), {})),
    "graph, as many rows as it takes": (CHAIN, (infer(tensor("raw", [1] * 8, shape=[8, 1])), {})),
    "graph, a row too many": (CHAIN, (infer(tensor("raw", [1] * 9, shape=[9, 1])), {})),
    "graph, no rows": (CHAIN, (infer(tensor("raw", [], shape=[0, 2])), {})),
    "graph, no input": (CHAIN, (infer(), {})),
    "graph, an input of a step": (CHAIN, (infer(RAW, tensor("a")), {})),
    "graph, a tensor between steps as input": (CHAIN, (infer(RAW, tensor("doubled")), {})),
    "graph, another datatype": (CHAIN, (infer(tensor("raw", datatype="INT32")), {})),
    "graph, another rank": (CHAIN, (infer(tensor("raw", shape=[2])), {})),
    "graph, the last output": (CHAIN, (infer(RAW, outputs=[{"name": "tripled"}]), {})),
    "graph, the output between": (CHAIN, (infer(RAW, outputs=[{"name": "doubled"}]), {})),
    "graph, both the other way round": (CHAIN, (infer(RAW, outputs=[{"name": "tripled"}, {"name": "doubled"}]), {})),
    "graph, an output of a step": (CHAIN, (infer(RAW, outputs=[{"name": "sum"}]), {})),
    "graph, an id": (CHAIN, (infer(RAW, id="7"), {})),
    "graph, a parameter": (CHAIN, (infer(RAW, parameters={"mine": 1}), {})),
    "graph, a priority": (CHAIN, (infer(RAW, parameters={"priority": 1}), {})),
    "graph, binary": (
        CHAIN,
        binary({"inputs": [tensor("raw", None, parameters={"binary_data_size": 8})], **WANTS_BINARY}, TWO),
    ),
    "graph, classes": (CHAIN, (infer(RAW, outputs=[{"name": "tripled", "parameters": {"classification": 1}}]), {})),
    "graph, a version": ("/v2/models/chain/versions/1/infer", (infer(RAW), {})),
    "graph, an unknown version": ("/v2/models/chain/versions/2/infer", (infer(RAW), {})),
    "graph, generate": ("/v2/models/chain/generate", (b'{"raw":[1,2]}', {})),
    "graph that fails": (BREAKS, (infer(tensor("raw", [1], shape=[1])), {})),
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
SEEN = {
    f"{title}, {what or 'metadata'}": f"/v2/models/{model}{what and '/' + what}"
    for title, model in (("graph", "chain"), ("bf16", "bfloat"))
    for what in ("", "ready")
}


def _graph(*tensors: Any, **more: Any) -> Any:
    return by_grpc.request(*tensors, model="chain", **more)


def _bfloat(*tensors: Any, **more: Any) -> Any:
    return by_grpc.request(*tensors, model="bfloat", **more)


CALLED: dict[str, Any] = {
    "graph": _graph(by_grpc.tensor("raw"), raw=[TWO]),
    "graph, typed": _graph(by_grpc.tensor("raw", fp32_contents=[1, 2])),
    "graph, an output": _graph(by_grpc.tensor("raw"), raw=[TWO], outputs=["doubled"]),
    "graph, an unknown output": _graph(by_grpc.tensor("raw"), raw=[TWO], outputs=["sum"]),
    "graph, no input": _graph(),
    "graph, a row too many": _graph(by_grpc.tensor("raw", (9, 1)), raw=[bytes(36)]),
    "graph that fails": by_grpc.request(by_grpc.tensor("raw", (1,)), model="breaks", raw=[bytes(4)]),
    "bf16": _bfloat(by_grpc.tensor("x", (1, 6), "BF16"), raw=[BITS]),
    "bf16, two rows": _bfloat(by_grpc.tensor("x", (2, 3), "BF16"), raw=[BITS]),
    "bf16, too few bytes": _bfloat(by_grpc.tensor("x", (1, 6), "BF16"), raw=[BITS[:-1]]),
    "bf16, typed as floats": _bfloat(by_grpc.tensor("x", (1, 2), "BF16", fp32_contents=[1, 2])),
    "bf16, typed as bytes": _bfloat(by_grpc.tensor("x", (1, 1), "BF16", bytes_contents=[BITS[:2]])),
    "bf16, as FP32": _bfloat(by_grpc.tensor("x"), raw=[TWO]),
}


def _counts(server: Server) -> Any:
    """Return how a request to the graph changes its own count and that of its step, which it asks two times."""

    def numbers() -> list[int]:
        told = [ask(server, "GET", f"/v2/models/{name}/stats")[1]["model_stats"][0] for name in ("chain", "add")]
        return [each["inference_stats"]["success"]["count"] for each in told] + [told[1]["inference_count"]]

    before = numbers()
    ask(server, "POST", CHAIN, infer(tensor("raw", [1, 2], shape=[2, 1])))
    return [late - early for early, late in zip(before, numbers(), strict=True)]


def _told(outcome: Any) -> Any:
    """Return an outcome without what has cases of its own: parameters about sequences, and the order of outputs."""
    for place, part in enumerate(outcome):
        if not isinstance(part, dict):
            continue
        _drop(part)
        _drop(part.get("parameters", {}))
        if part.get("parameters") == {}:
            del part["parameters"]
        outputs = part.get("outputs", [])
        if (raw := part.get("raw_output_contents")) is not None and outputs:
            pairs = sorted(zip(outputs, raw, strict=True), key=lambda pair: str(pair[0]["name"]))
            part["outputs"], part["raw_output_contents"] = (list(each) for each in zip(*pairs, strict=True))
        elif outputs and place + 1 < len(outcome):  # the binary data, as hexadecimal digits
            rest, chunks = outcome[place + 1], {}
            for each in outputs:
                size = 2 * each["parameters"]["binary_data_size"]
                chunks[each["name"]], rest = rest[:size], rest[size:]
            outcome[place + 1] = "".join(chunks[name] for name in sorted(chunks))
        part["outputs"] = sorted(part.get("outputs", []), key=lambda each: str(each["name"]))
    return outcome


def _drop(fields: dict[str, Any]) -> None:
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        fields.pop(name, None)


def cases() -> list[Case]:
    """Return all of them."""

    def posted(path: str, body: bytes, headers: dict[str, str]) -> Callable[[Server], Any]:
        return lambda server: _told(ask(server, "POST", path, body, headers))

    def seen(path: str) -> Callable[[Server], Any]:
        return lambda server: ask(server, "GET", path)

    def called(message: Any) -> Callable[[Server], Any]:
        def answer(server: Server) -> Any:
            told = by_grpc.call(server, lambda stub: by_grpc.found(stub.ModelInfer(message, timeout=30)))
            return _told([told])[0]

        return answer

    def parameters(server: Server) -> Any:
        return ask(server, "POST", CHAIN, infer(RAW))[1].get("parameters", "none")

    def order(server: Server) -> Any:
        return [each["name"] for each in ask(server, "POST", "/v2/models/order/infer", infer(RAW))[1]["outputs"]]

    return [
        *(Case(f"REST: {name}", posted(path, *sent)) for name, (path, sent) in POSTED.items()),
        *(Case(f"REST: {name}", seen(path)) for name, path in SEEN.items()),
        *(Case(f"gRPC: {name}", called(message)) for name, message in CALLED.items()),
        Case("REST: graph, statistics", _counts),
        Case("REST: graph, parameters of the answer", parameters),
        Case("REST: graph, order of the outputs", order),
    ]
