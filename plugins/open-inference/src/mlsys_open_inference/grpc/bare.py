"""Methods that need no messages of the protocol: those not offered, those empty here, and gRPC's own health check."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from mlsys_core.errors import MlsysError
from mlsys_serving.http import Readiness

HEALTH = "grpc.health.v1.Health"  # which Kubernetes asks
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse.status
_UNSUPPORTED = ("CudaSharedMemoryRegister", "LogSettings")
_EMPTY = ("CudaSharedMemoryStatus", "CudaSharedMemoryUnregister")


def bare_handlers() -> dict[str, Any]:
    """Return the handlers by method.

    There are no regions of GPUs, and none to forget: Triton's own examples forget all of them at their start.
    """
    handlers = dict.fromkeys(_UNSUPPORTED, grpc.unary_unary_rpc_method_handler(_unsupported))
    return handlers | dict.fromkeys(_EMPTY, grpc.unary_unary_rpc_method_handler(_nothing))


def health_handlers(
    readiness: Readiness, received: Callable[[AsyncIterator[bytes]], Awaitable[bytes]]
) -> dict[str, Any]:
    """Return the handlers of the service of health; they need no key.

    Args:
        readiness: of the server; any service that is asked for is as ready as the server, as in Triton.
        received: returns a call's one message, within a bounded time.
    """

    async def check(requests: AsyncIterator[bytes], context: Any) -> bytes:
        try:
            await received(requests)
        except MlsysError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return _SERVING if (await readiness.report()).is_ready else _NOT_SERVING

    return {"Check": grpc.stream_unary_rpc_method_handler(check)}


async def _nothing(_: bytes, __: Any) -> bytes:
    return b""  # an empty message of any type


async def _unsupported(_: bytes, context: Any) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED, "this server does not support shared memory of GPUs and log settings"
    )
    raise AssertionError("abort() raises")
