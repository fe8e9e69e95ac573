"""Whom the protocol's front lets in, and who may load and unload: REST and gRPC alike."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from mlsys_open_inference import GrpcConfig, grpc_address_of
from mlsys_open_inference.grpc.schema import SERVICE, messages
from mlsys_open_inference.grpc.server import server_options
from mlsys_serving.http import BackgroundServer, ConnectionLimits, HttpConfig, TlsConfig

from tests.certificates import Certificates, make_certificates

m = messages()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def call(channel: Any, name: str, request: Any = None, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    """Call a method of the service."""
    request = getattr(m, f"{name}Request")() if request is None else request
    method = channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(m, f"{name}Response").FromString,
    )
    return method(request, metadata=metadata, timeout=600)


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of ``app``, whose lifespan has loaded the models."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        yield client


class Source:
    """The reference models, made anew for each load."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def names(self) -> list[str]:
        return sorted(model.spec.name for model in self._reference.all_models())

    async def load(self, name: str) -> list[Any]:
        return [model for model in self._reference.all_models() if model.spec.name == name]


async def test_clients_neither_load_nor_unload_unless_asked_for(make_app: Any, reference: Any) -> None:
    app = make_app([], source=Source(reference), app={"model_control": False})
    async with started(app) as client:
        for verb in ("load", "unload"):
            response = await client.post(f"/v2/repository/models/upper/{verb}")
            assert response.status_code == 403
            assert "--model-control" in response.json()["error"]
        assert (await client.get("/v2/models/upper/ready")).status_code == 200
        assert (await client.post("/v2/repository/index")).status_code == 200, "to look is allowed"


async def test_an_unload_can_be_undone(make_app: Any, reference: Any) -> None:
    app = make_app([], source=Source(reference), app={"model_control": True})
    async with started(app) as client:
        for _ in range(2):
            assert (await client.post("/v2/repository/models/upper/unload")).status_code == 200
            assert (await client.get("/v2/models/upper/ready")).status_code in (404, 503)
            assert (await client.post("/v2/repository/models/upper/load")).status_code == 200
            assert (await client.get("/v2/models/upper/ready")).status_code == 200


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_pages_cannot_load_or_unload(verb: str, make_app: Any, reference: Any) -> None:
    app = make_app([], source=Source(reference), app={"model_control": True})
    path = f"/v2/repository/models/upper/{verb}"
    async with started(app) as client:
        evil = await client.post(path, headers={"origin": "https://evil.example"})
        assert evil.status_code == 403
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            response = await client.post(path, content=b"{}", headers={"content-type": content_type})
            assert response.status_code == 415
        assert (await client.get("/v2/models/upper/ready")).status_code == 200


def test_grpc_neither_loads_nor_unloads_unless_asked_for(make_app: Any) -> None:
    app = make_app(app={"grpc": GrpcConfig(), "model_control": False})
    with BackgroundServer(app):
        address = grpc_address_of(app)
        with grpc.insecure_channel(f"{address.host}:{address.port}") as channel:
            for verb in ("Load", "Unload"):
                name = f"RepositoryModel{verb}"
                with pytest.raises(grpc.RpcError) as caught:
                    call(channel, name, getattr(m, f"{name}Request")(model_name="upper"))
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "--model-control" in caught.value.details()
            assert call(channel, "ModelReady", m.ModelReadyRequest(name="upper")).ready


@pytest.fixture(params=[False, True], ids=["certificate", "with clients' certificates"])
def secured(request: Any, make_app: Any, certificates: Certificates) -> Iterator[tuple[Any, BackgroundServer, bool]]:
    ca = certificates.ca if request.param else None
    tls = TlsConfig(certificate=certificates.server, key=certificates.server_key, client_ca=ca)
    app = make_app(app={"grpc": GrpcConfig()}, tls=tls, api_keys=frozenset({"secret"}))
    with BackgroundServer(app) as server:
        yield app, server, request.param


def test_one_certificate_and_one_set_of_keys_for_both(
    secured: tuple[Any, BackgroundServer, bool], certificates: Certificates
) -> None:
    app, server, needs_client = secured
    address = grpc_address_of(app)
    assert address.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificates.ca))
    parts: dict[str, bytes] = {"root_certificates": certificates.ca.read_bytes()}
    if needs_client:
        with grpc.secure_channel(f"127.0.0.1:{address.port}", grpc.ssl_channel_credentials(**parts)) as stranger:
            with pytest.raises(grpc.RpcError) as caught:
                call(stranger, "ServerLive")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        context.load_cert_chain(certificates.client, certificates.client_key)
        parts |= {
            "private_key": certificates.client_key.read_bytes(),
            "certificate_chain": certificates.client.read_bytes(),
        }
    assert httpx.get(f"{server.url}/v2", verify=context).status_code == 401
    assert httpx.get(f"{server.url}/v2", verify=context, headers={"x-api-key": "secret"}).status_code == 200
    with grpc.secure_channel(f"127.0.0.1:{address.port}", grpc.ssl_channel_credentials(**parts)) as channel:
        assert call(channel, "ServerLive").live
        for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", "Secret"),)):
            with pytest.raises(grpc.RpcError) as caught:
                call(channel, "ServerMetadata", metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", "Bearer secret"),), (("x-api-key", "secret"),)):
            assert call(channel, "ServerMetadata", metadata=metadata).name
    with grpc.insecure_channel(f"127.0.0.1:{address.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        call(channel, "ServerLive")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_silent_connection_to_grpc_is_closed(make_app: Any) -> None:
    app = make_app(app={"grpc": GrpcConfig()}, connections=ConnectionLimits(header_timeout_s=0.5))
    with BackgroundServer(app):
        address = grpc_address_of(app)
        with socket.create_connection((address.host, address.port), timeout=120) as sock:
            while sock.recv(4096):  # its settings; then the end
                pass


@pytest.mark.parametrize("has_key", [True, False])
def test_a_call_whose_message_never_comes_is_ended(has_key: bool, make_app: Any) -> None:
    limits = ConnectionLimits(body_timeout_s=0.5)
    app = make_app(app={"grpc": GrpcConfig()}, connections=limits, api_keys=frozenset({"secret"}))
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with BackgroundServer(app):
        address = grpc_address_of(app)
        with grpc.insecure_channel(f"{address.host}:{address.port}") as channel:
            metadata = (("x-api-key", "secret"),) if has_key else ()
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary(f"/{SERVICE}/ModelInfer")(never(), metadata=metadata, timeout=None)
            ended.set()
    expected = grpc.StatusCode.DEADLINE_EXCEEDED if has_key else grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.code() is expected, "and keys are asked for before a message is waited for"


def test_a_call_without_a_message_is_refused(make_app: Any) -> None:
    app = make_app(app={"grpc": GrpcConfig()})
    with BackgroundServer(app):
        address = grpc_address_of(app)
        target = f"{address.host}:{address.port}"
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{SERVICE}/ServerMetadata")(iter(()), timeout=600)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_limits_of_http_are_those_of_grpc() -> None:
    limits = ConnectionLimits(max_connections=7, header_timeout_s=1.5, keep_alive_timeout_s=1e9)
    options = dict(server_options(HttpConfig(max_body_nbytes=99, connections=limits)))
    assert options["grpc.max_receive_message_length"] == 99
    assert options["grpc.max_allowed_incoming_connections"] == 7
    assert options["grpc.server_handshake_timeout_ms"] == 1500
    assert options["grpc.max_connection_idle_ms"] == 2**31 - 1, "gRPC's own bound"
