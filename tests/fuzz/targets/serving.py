"""Bodies of requests: OpenAI's routes, the Open Inference Protocol over REST and gRPC, settings files."""

# ruff: noqa: E501 - lists of words

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from tests.fuzz.target import Case, Input, Target


class ServerFaultError(Exception):
    """An answer of a server that is neither right nor a refusal."""


def _numbers() -> Any:
    import numpy as np
    from mlsys_serving.models import DataType, InferRequest, InferResponse, ModelSpec, TensorSpec

    class Echo:
        """Gives its inputs back: what is looked for is in the way there and back."""

        spec = ModelSpec(
            name="echo",
            version="1",
            inputs=(
                TensorSpec("a", DataType.FP32, (-1, -1), optional=True),
                TensorSpec("n", DataType.INT64, (-1,), optional=True),
                TensorSpec("t", DataType.BYTES, (-1,), optional=True),
                TensorSpec("b", DataType.BOOL, (-1,), optional=True),
                TensorSpec("h", DataType.FP16, (-1,), optional=True),
            ),
            outputs=(TensorSpec("sum", DataType.FP64, (1,)),),
            max_batch_size=0,
        )

        async def infer(self, request: InferRequest) -> InferResponse:
            total = float(sum(np.size(value) for value in request.inputs.values()))
            return InferResponse({"sum": np.array([total])})

        async def close(self) -> None:
            """Nothing is held."""

    return Echo()


class _Asgi:
    """Requests to an app without a socket, one after another, on one event loop."""

    def __init__(self, app: Any) -> None:
        import httpx

        self._loop = asyncio.new_event_loop()
        self._lifespan = app.router.lifespan_context(app)
        self._loop.run_until_complete(self._lifespan.__aenter__())
        transport = httpx.ASGITransport(app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send one request.

        Raises:
            InvalidInputError: it was refused.
            ServerFaultError: the server failed.
        """
        answer = self._loop.run_until_complete(self._client.post(path, content=body, headers=headers))
        if answer.status_code >= 500 and answer.status_code not in (501, 503, 504):
            raise ServerFaultError(f"{answer.status_code} {answer.text[:200]}")
        if answer.status_code >= 400:
            error = answer.json()  # a refusal is JSON, and says why
            if not error:
                raise ServerFaultError(f"{answer.status_code} without a reason")
            raise InvalidInputError(answer.text[:200])


def _quiet_logger() -> Any:
    import io

    from mlsys_serving.http.record import make_logger

    return make_logger("json", stream=io.StringIO())


def _oip_app() -> Any:
    from mlsys_open_inference import create_oip_app
    from mlsys_serving.http import HttpConfig
    from mlsys_serving.models import ModelRepository

    return create_oip_app(ModelRepository([_numbers()]), config=HttpConfig(), logger=_NoLogger())


class _NoLogger:
    """A logger that keeps nothing: memory is measured."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self


_OIP_WORDS = ("inputs", "outputs", "parameters", "binary_data_size", "binary_data_output", "classification", "FP32", "INT64", "BYTES",
              "BF16", "FP16", "BOOL", "shape", "datatype", "data", "sequence_id", "shared_memory_region", "a", "n", "t", "priority", "timeout")  # fmt: skip


def oip_json(folder: Path) -> Case:
    """JSON bodies of infer."""
    asgi = _Asgi(_oip_app())
    seeds = [
        {"id": "1", "inputs": [{"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [1, 2.5, [3], 4]},
                               {"name": "n", "shape": [2], "datatype": "INT64", "data": [1, -2]},
                               {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["é"]}],
         "outputs": [{"name": "sum", "parameters": {"binary_data": True, "classification": 1}}], "parameters": {"x": 1}},
        {"inputs": [{"name": "b", "shape": [2], "datatype": "BOOL", "data": [True, False], "parameters": {"a": "b"}}]},
    ]  # fmt: skip
    seeds[0]["inputs"][0]["data"] = [[1, 2.5], [3, 4]]  # type: ignore[index]

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        asgi.post("/v2/models/echo/infer", made, {"content-type": "application/json"})

    plain = [
        json.dumps(seed).replace(', "parameters": {"binary_data": true, "classification": 1}', "").encode()
        for seed in seeds
    ]
    return Case(plain, parse, _OIP_WORDS)


def oip_binary(folder: Path) -> Case:
    """Bodies with JSON first and raw tensors after it."""
    asgi = _Asgi(_oip_app())
    header = json.dumps(
        {"inputs": [{"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
                    {"name": "t", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 11}}],
         "outputs": [{"name": "sum", "parameters": {"binary_data": True}}]}
    ).encode()  # fmt: skip
    data = struct.pack("<2f", 1, 2) + struct.pack("<I", 2) + b"ab" + struct.pack("<I", 1) + b"c"

    def parse(made: Input) -> None:
        assert isinstance(made, dict)
        body = made.get("header", b"") + made.get("data", b"")
        said = made.get("length", b"") or str(len(made.get("header", b""))).encode()
        length = "".join(letter for letter in said.decode("latin-1") if " " < letter < "\x7f")[:100]
        asgi.post("/v2/models/echo/infer", body, {"inference-header-content-length": length or "0"})

    return Case(
        [{"header": header, "data": data}, {"header": header, "data": data, "length": str(len(header)).encode()}],
        parse,
        _OIP_WORDS,
    )


def protobuf(folder: Path) -> Case:
    """ModelInferRequest messages, and each other request of the service."""
    from mlsys_open_inference.binding import bind
    from mlsys_open_inference.grpc.codec import decode_message, parse_message
    from mlsys_open_inference.grpc.schema import messages
    from mlsys_serving.models.version import Version

    request = messages().ModelInferRequest(model_name="echo", id="7")
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    request.inputs.add(name="t", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    request.parameters["x"].int64_param = 3
    request.outputs.add(name="sum").parameters["classification"].int64_param = 2
    raw = messages().ModelInferRequest(model_name="echo")
    raw.inputs.add(name="a", datatype="FP32", shape=[1, 2])
    raw.raw_input_contents.append(struct.pack("<2f", 1, 2))
    version = Version(_numbers())

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        wire, _ = decode_message(parse_message("ModelInferRequest", made))
        bind(wire, version, now=0.0, deadline_s=None)

    return Case(
        [request.SerializeToString(), raw.SerializeToString()], parse, ("FP32", "INT64", "BYTES", "\x0a\x05", "a", "t")
    )


_OPENAI_WORDS = (
    "messages", "role", "user", "assistant", "tool", "system", "content", "text", "image_url", "prompt", "max_tokens", "n", "stop",
    "stream", "temperature", "top_p", "logprobs", "top_logprobs", "logit_bias", "response_format", "json_schema", "json_object",
    "schema", "tools", "tool_choice", "function", "name", "arguments", "parameters", "seed", "best_of", "echo", "suffix", "user",
    "presence_penalty", "stream_options", "include_usage", "input", "encoding_format", "dimensions", "regex", "guided_regex",
    "(a+)+b", "$ref", "#", "#/$defs/a", "allOf", "anyOf", "pattern", "minItems", "maxItems", "additionalProperties", "enum",
)  # fmt: skip


def openai(folder: Path) -> Case:
    """Bodies of completions, chat completions and responses, to the server of a tiny model."""
    from mlsys_core.plugins import installed_plugins
    from mlsys_orca.api.server import make_app, make_service
    from mlsys_orca.engine.engine import EngineConfig
    from mlsys_orca.loading.load import load_model
    from mlsys_orca_gateway.options import GatewayOptions
    from mlsys_serving.extensions import Extensions
    from mlsys_serving.http import HttpConfig

    from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf

    path = write_gguf(folder / "tiny.gguf", tiny_metadata(), tiny_tensors())
    loaded = load_model(path, dtype="fp32", backend="torch", num_threads=1)
    service = make_service(loaded, "tiny", EngineConfig(max_batch_size=4, max_model_len=64))
    gateway = GatewayOptions(journal=folder / "journal")
    extensions = Extensions.of("orca", installed_plugins().registry, orca_gateway=gateway)
    asgi = _Asgi(make_app(service, HttpConfig(validation_status=400), extensions=extensions, logger=_NoLogger()))
    chat = {"model": "tiny", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
            "max_tokens": 1, "temperature": 0, "stop": ["x"], "seed": 1, "logprobs": True, "top_logprobs": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
            "tool_choice": "none", "logit_bias": {"5": 1}}  # fmt: skip
    formatted = {"model": "tiny", "messages": [{"role": "user", "content": "b"}], "max_tokens": 1,
                 "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": ["a"],
                 "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {"enum": [1, "x"]}}}}}}  # fmt: skip
    plain = {
        "model": "tiny",
        "prompt": ["a", "b"],
        "max_tokens": 1,
        "n": 1,
        "echo": True,
        "logprobs": 1,
        "stream": False,
    }
    answer = {
        "model": "tiny",
        "input": [{"role": "user", "content": "hi"}],
        "max_output_tokens": 16,
        "instructions": "be",
    }
    seeds: list[Input] = [
        json.dumps({"path": path, "body": body}).encode()
        for path, body in (
            ("chat/completions", chat),
            ("chat/completions", formatted),
            ("completions", plain),
            ("responses", answer),
        )
    ]

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        try:
            request = json.loads(made)
            route, body = request["path"], json.dumps(request["body"]).encode("utf-8", "surrogatepass")
        except (ValueError, KeyError, TypeError, RecursionError):
            route, body = "chat/completions", made
        if route not in ("chat/completions", "completions", "responses"):
            route = "completions"
        asgi.post(f"/v1/{route}", body, {"content-type": "application/json"})

    return Case(seeds, parse, _OPENAI_WORDS)


def settings_file(folder: Path) -> Case:
    """TOML files of ``--config``."""
    import click
    import typer
    from mlsys_serving.cli.settings_file import file_reader

    kinds = {"port": int, "host": str | None, "qos_ms": float, "api_key": list[str], "quiet": bool, "log": Path | None}
    read = file_reader(kinds)
    path = folder / "settings.toml"
    seed = b'port = 8001\nqos-ms = 4.5\nhost = "127.0.0.1"\n# a comment\napi-key = ["a", "b"]\nquiet = true\n'

    def parse(made: Input) -> None:
        assert isinstance(made, bytes)
        path.write_bytes(made)
        read(typer.Context(click.Command("serve")), path)

    return Case([seed], parse, ("[a]", "[[a]]", '"""', "= {", "inf", "nan", "1979-05-27", "0x1", "port", "a.b.c = 1"))


TARGETS = (
    Target("oip-json", oip_json, share=8),
    Target("oip-binary", oip_binary, share=8),
    Target("protobuf", protobuf, share=40),
    Target("openai", openai, share=1, limit_nbytes=2 << 30),
    Target("settings-file", settings_file, share=20),
)
