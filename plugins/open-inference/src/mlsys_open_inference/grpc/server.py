"""The gRPC server: REST's event loop, engine and lifecycle, so that keys, drains, deadlines and logs are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_open_inference.descriptions import NO_LOG_SETTINGS, NO_MEMORY, NO_TRACE_SETTINGS
from mlsys_open_inference.engine import Engine
from mlsys_open_inference.grpc.codec import parse_message
from mlsys_open_inference.grpc.schema import SERVICE, messages
from mlsys_open_inference.grpc.servicer import Servicer
from mlsys_serving.http import HttpConfig, HttpError, HttpRuntime, ServerAddress
from mlsys_serving.http.describe import describe
from mlsys_serving.http.lifecycle import shutting_down
from mlsys_serving.http.middleware.gate import KeyRing, presented_keys
from mlsys_serving.http.middleware.trace import Tracing
from mlsys_serving.http.tls import TlsConfig, read_pem, server_context
from mlsys_serving.tracing.record import Fact
from prometheus_client import Counter

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_MEMORIES = [
    f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")
]
REFUSED = dict.fromkeys(_MEMORIES, NO_MEMORY) | {"TraceSetting": NO_TRACE_SETTINGS, "LogSettings": NO_LOG_SETTINGS}
_HEALTH = "grpc.health.v1.Health"  # gRPC's own health check, which Kubernetes asks
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse.status
_ALWAYS_OPEN = frozenset({"ServerLive", "ServerReady"})  # no key, and answered while the server drains
_INFERENCES = frozenset({"ModelInfer", "ModelStreamInfer"})  # the calls that are traced
_MAX_STREAMS = 256  # calls at a time on one connection; more wait
_MIN_PING_INTERVAL_MS = 10_000  # clients that ping an idle connection more often are warned, then cut
_STOP_GRACE_S = 1.0  # when the lifecycle has drained, all calls have ended but for their last bytes


class Context(Protocol):
    """The part of grpc's call context that is used here."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata sent beside the request."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""
        ...

    def abort(self, code: Any, details: str) -> Awaitable[None]:
        """End the call with an error; raises."""
        ...


class GrpcServer:
    """Serves an engine over gRPC beside an HTTP app.

    Args:
        engine: runs inference.
        runtime: of the app: its config, lifecycle, logger, metrics and readiness hold here too.
        model_control: let clients load and unload.
    """

    def __init__(self, engine: Engine, runtime: HttpRuntime, *, model_control: bool = False) -> None:
        self._engine = engine
        self._runtime = runtime
        self._keys = KeyRing(runtime.config.api_keys)
        self._servicer = Servicer(
            engine,
            runtime.readiness,
            lambda error: describe(error).message,
            model_control=model_control,
        )
        self._calls = Counter(
            "mlsys_grpc_requests", "Calls ended", ("method", "code"), registry=runtime.metrics.registry
        )

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncGenerator[ServerAddress, None]:
        """Listen while the context is open.

        Raises:
            ServingError: the port is in use, or the host is no address of this machine.
        """
        config = self._runtime.config
        server = grpc.aio.server(
            options=server_options(config), maximum_concurrent_rpcs=config.connections.max_connections
        )
        health = grpc.stream_unary_rpc_method_handler(self._health)
        services = {SERVICE: self._handlers(), _HEALTH: {"Check": health}}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in services.items()]
        )
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if config.tls is None:
                address = ServerAddress(host, server.add_insecure_port(target))
            else:
                address = ServerAddress(host, server.add_secure_port(target, _credentials(config.tls)), "https")
        except RuntimeError as error:
            raise ServingError(
                f"gRPC cannot listen on {target}; choose another port (0 takes a free one), or another host"
            ) from error
        await server.start()
        try:
            yield address
        finally:
            await server.stop(_STOP_GRACE_S)

    def _handlers(self) -> dict[str, Any]:
        """Return the handlers by method name."""
        handlers = {name: _unary(name, self._guarded(name, method)) for name, method in self._servicer.methods.items()}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._guarded_stream("ModelStreamInfer", self._servicer.stream_infer),
            response_serializer=messages().ModelStreamInferResponse.SerializeToString,
        )
        return handlers | {name: _refusal(instead) for name, instead in REFUSED.items()}

    def _guarded(
        self, name: str, method: Callable[[Any, float | None], Awaitable[Any]]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]:
        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            started_s, running = self._engine.now(), _RunningCall()
            try:
                with self._runtime.lifecycle.running(running), self._traced(name, context):
                    self._admit(name, context)
                    content = await self._received(requests)
                    async with self._runtime.bodies.admitted(len(content)):
                        message = await self._parsed(f"{name}Request", content)
                        response = await method(message, self._deadline_s(context, started_s))
            except BaseException as error:  # noqa: BLE001  (the boundary of a call: it is answered, and noted)
                await self._refuse(name, error, running, context, started_s)
            self._note(name, grpc.StatusCode.OK, started_s)
            return response

        return call

    def _guarded_stream(
        self, name: str, method: Callable[[AsyncIterator[Any], float | None], AsyncGenerator[Any, None]]
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncGenerator[Any, None]]:
        async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[Any, None]:
            started_s, running = self._engine.now(), _RunningCall()
            incoming = _Incoming(requests, self._parsed)
            try:
                with self._runtime.lifecycle.running(running), self._traced(name, context):
                    self._admit(name, context)
                    async with aclosing(method(aiter(incoming), self._deadline_s(context, started_s))) as responses:
                        async for response in responses:
                            yield response
                    if incoming.error is not None:
                        raise incoming.error
            except BaseException as error:  # noqa: BLE001  (as above)
                await self._refuse(name, error, running, context, started_s)
            self._note(name, grpc.StatusCode.OK, started_s)

        return call

    async def _health(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        """Serve ``Health/Check``, without a key: any service that is asked for is as ready as the server."""
        try:
            await self._received(requests)
        except MlsysError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return _SERVING if (await self._runtime.readiness.report()).is_ready else _NOT_SERVING

    async def _received(self, requests: AsyncIterator[bytes]) -> bytes:
        """Return a call's one message, which must arrive within the time of an HTTP body."""
        timeout_s = self._runtime.config.connections.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for request in requests:
                    return request
        except TimeoutError:
            raise HttpError(f"the call's message did not arrive within {timeout_s:g} s", http_status=504) from None
        raise InvalidInputError("the call came without a message")

    async def _parsed(self, name: str, content: bytes) -> Any:
        return await self._engine.threads.run(parse_message, name, content, size=len(content))

    def _traced(self, name: str, context: Context) -> AbstractContextManager[object]:
        """Return a context that traces an inference; ``traceparent`` comes as metadata."""
        tracing = self._runtime.tracing
        return nullcontext() if tracing is None or name not in _INFERENCES else _traced_call(tracing, name, context)

    def _admit(self, name: str, context: Context) -> None:
        if name in _ALWAYS_OPEN:
            return
        if self._runtime.lifecycle.is_draining:
            raise shutting_down()
        if self._keys:
            metadata = context.invocation_metadata() or ()
            self._keys.check(presented_keys((key.encode(), _encoded(value)) for key, value in metadata))

    def _deadline_s(self, context: Context, started_s: float) -> float | None:
        timeout_s = timeout_of(context.time_remaining(), self._runtime.config)
        return None if timeout_s is None else started_s + timeout_s

    async def _refuse(
        self, name: str, error: BaseException, running: _RunningCall, context: Context, started_s: float
    ) -> NoReturn:
        """End the call with the status of ``error``."""
        if running.error is not None:
            error = running.error  # the end of a drain, and not the client, cancelled it
            running.task.uncancel()
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._note(name, grpc.StatusCode.CANCELLED, started_s)
            raise error
        info = describe(error)
        code = _CODES.get(info.status, grpc.StatusCode.INTERNAL)
        if code is grpc.StatusCode.INTERNAL:
            self._runtime.logger.error("grpc request failed", method=name, exc_info=error)
        self._note(name, code, started_s)
        await context.abort(code, info.message)
        raise AssertionError("abort() raises")

    def _note(self, name: str, code: Any, started_s: float) -> None:
        self._calls.labels(name, code.name).inc()
        duration_ms = round((self._engine.now() - started_s) * 1000, 3)
        self._runtime.logger.info("grpc request", method=name, code=code.name, duration_ms=duration_ms)


@contextmanager
def _traced_call(tracing: Tracing, name: str, context: Context) -> Iterator[None]:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    facts: dict[str, Fact] = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": name}
    with tracing.request(f"{SERVICE}/{name}", metadata, facts) as opened:
        try:
            yield
        except BaseException as error:
            if opened is not None:
                opened.trace.is_error = describe(error).status >= 500 if isinstance(error, Exception) else False
            raise


class _Incoming:
    """Messages of a stream up to the first invalid one, which ends the call after the others are answered."""

    def __init__(self, requests: AsyncIterator[bytes], parse: Callable[[str, bytes], Awaitable[Any]]) -> None:
        self._requests = requests
        self._parse = parse
        self.error: InvalidInputError | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for request in self._requests:
            try:
                message = await self._parse("ModelInferRequest", request)
            except InvalidInputError as error:
                self.error = error
                return
            yield message


class _RunningCall:
    """A call, as the lifecycle sees it."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.error: MlsysError | None = None  # why the server stopped it

    def stop(self, error: MlsysError) -> None:
        """End the call soon."""
        if self.error is None and not self.task.done():
            self.error = error
            self.task.cancel()


def server_options(config: HttpConfig) -> list[tuple[str, int]]:
    """Return gRPC's own settings for the limits of ``config``."""
    limits = config.connections
    return [
        ("grpc.max_receive_message_length", config.max_body_nbytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
        ("grpc.max_concurrent_streams", _MAX_STREAMS),  # of one connection
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.header_timeout_s)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.keep_alive_timeout_s)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.write_timeout_s)),  # a peer that has vanished is found
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.header_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), 2**31 - 1)


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Return the certificate for gRPC; HTTPS has checked that its files match."""
    server_context(tls)
    authority = None if tls.client_ca is None else read_pem(tls.client_ca, "client CA")
    pair = (read_pem(tls.key, "key"), read_pem(tls.certificate, "certificate"))
    return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=authority is not None)


def timeout_of(asked_s: float | None, config: HttpConfig) -> float | None:
    """Return the seconds a call may take; None: no bound.

    From the client's own deadline, the default and the cap.

    Example:
        >>> timeout_of(90.0, HttpConfig(request_timeout_s=10, max_request_timeout_s=60))
        60
    """
    if asked_s is None:
        return config.request_timeout_s
    return asked_s if config.timeout_cap_s is None else min(asked_s, config.timeout_cap_s)


def _refusal(instead: str) -> Any:
    async def refuse(_: bytes, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, instead)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _unary(name: str, call: Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]) -> Any:
    """Return a one-request method as a stream on this side: gRPC waits for a unary request without bound."""
    return grpc.stream_unary_rpc_method_handler(
        call,
        response_serializer=getattr(messages(), f"{name}Response").SerializeToString,
    )


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
