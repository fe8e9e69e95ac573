"""Clients of ``core-oip-front``: as thin as Python allows, so that the server dominates the time.

Each sends its next request when it has its answer, over a connection of its own, and compares every answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

WIDTH = 4


def http_request(model: str, wire: str, x: Any) -> bytes:
    """Return the bytes of one request."""
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    headers = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
    if wire == "binary":
        tensor["parameters"] = {"binary_data_size": x.nbytes}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers += f"Inference-Header-Content-Length: {len(body)}\r\n"
        body += x.tobytes()
    else:
        body = json.dumps({"inputs": [tensor | {"data": x.ravel().tolist()}]}).encode()
    return f"{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def check_http(response: bytes, wire: str, x: Any) -> None:
    """Fail if ``response`` is not the answer to ``x``."""
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request failed: {response[:500]!r}")
    if wire == "binary":
        y: Any = np.frombuffer(body[-x.nbytes :], np.float32)
    else:
        found = json.loads(body)
        y = found["outputs"][0]["data"]
    if np.any(np.asarray(y) != 2 * x.ravel()):
        raise SystemExit(f"a wrong answer to {x}: {y}")


def joined(chunks: bytearray) -> bytes:
    """Return the body of a chunked answer: after each line with a length, that many bytes."""
    body, at = b"", chunks.index(b"\r\n\r\n") + 4
    while (end := chunks.index(b"\r\n", at)) and (length := int(chunks[at:end], 16)):
        body += chunks[end + 2 : end + 2 + length]
        at = end + 4 + length
    return body


class HttpClient(asyncio.Protocol):
    """One keep-alive connection: as thin as Python allows, so that the server dominates the time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None  # of the request under way
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport of the new connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Wake the waiting caller when the answer is whole."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        _, has_length, rest = head.partition(b"\r\ncontent-length:")
        if has_length:
            is_whole = len(self._buffer) >= end + 4 + int(rest.split(b"\r\n")[0])
        else:  # in chunks, the last of which is empty
            is_whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        if is_whole and self._answer is not None:
            waiting, self._answer = self._answer, None
            answer = bytes(self._buffer) if has_length else bytes(self._buffer[: end + 4]) + joined(self._buffer[end:])
            self._buffer.clear()
            waiting.set_result(answer)

    def close(self) -> None:
        """Close the connection: a server holds as many as it is told to."""
        self._transport.close()

    async def ask(self, request: bytes) -> bytes:
        """Return the answer, headers and body."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        response: bytes = await answer
        return response


async def http_clients(address: str, model: str, wire: str, num_clients: int, seconds: float) -> list[float]:
    """Return the latencies, in seconds, of all requests that began within ``seconds``."""
    host, _, port = address.partition(":")
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        x = np.arange(WIDTH, dtype=np.float32)[None] + number
        request = http_request(model, wire, x)
        _, connection = await loop.create_connection(HttpClient, host, int(port))
        while (started_s := time.perf_counter()) < end:
            response = await connection.ask(request)
            latencies.append(time.perf_counter() - started_s)
            check_http(response, wire, x)
        connection.close()
        await asyncio.sleep(0)  # it closes on the loop's next turn

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return latencies


async def grpc_clients(
    address: str, model: str, num_clients: int, seconds: float, *, is_stream: bool = False
) -> list[float]:
    """Return the latencies of gRPC clients, like :func:`http_clients`; as a stream each client has one call for all."""
    import grpc.aio
    from mlsys_open_inference.grpc.schema import SERVICE, messages

    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        x = np.arange(WIDTH, dtype=np.float32)[None] + number
        request = messages().ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="FP32", shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            ask = _streamed(channel, SERVICE, messages()) if is_stream else _unary(channel, SERVICE, messages())
            while (started_s := time.perf_counter()) < end:
                response = await ask(request)
                latencies.append(time.perf_counter() - started_s)
                if np.any(np.frombuffer(response.raw_output_contents[0], np.float32) != 2 * x.ravel()):
                    raise SystemExit(f"a wrong answer to {x}")

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return latencies


def _unary(channel: Any, service: str, messages: Any) -> Callable[[Any], Awaitable[Any]]:
    """Return a function that asks by a call of its own."""
    ask: Callable[[Any], Awaitable[Any]] = channel.unary_unary(
        f"/{service}/ModelInfer",
        request_serializer=messages.ModelInferRequest.SerializeToString,
        response_deserializer=messages.ModelInferResponse.FromString,
    )
    return ask


def _streamed(channel: Any, service: str, messages: Any) -> Callable[[Any], Awaitable[Any]]:
    """Return a function that asks over one stream, which lives as long as the channel."""
    call = channel.stream_stream(
        f"/{service}/ModelStreamInfer",
        request_serializer=messages.ModelInferRequest.SerializeToString,
        response_deserializer=messages.ModelStreamInferResponse.FromString,
    )()

    async def ask(request: Any) -> Any:
        await call.write(request)
        response = await call.read()
        if response.error_message:
            raise SystemExit(f"a request failed: {response.error_message}")
        return response.infer_response

    return ask
