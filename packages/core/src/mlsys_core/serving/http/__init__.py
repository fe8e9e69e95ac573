"""The HTTP serving base: one FastAPI factory, and the services that a model server needs around it (``docs/http.md``).

Orca's OpenAI front and the Open Inference Protocol front bring routers; this package brings request ids, API keys,
limits, deadlines, one error shape, health, metrics, logs and a server that drains. Names are imported when they are
asked for, so that importing the package stays cheap.

Example:
    >>> from mlsys_core.serving.http import HttpConfig
    >>> HttpConfig(max_body_nbytes=1024).max_body_nbytes
    1024
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsys_core.serving.http.app import HttpRuntime, create_app, runtime_of
    from mlsys_core.serving.http.config import HttpConfig
    from mlsys_core.serving.http.errors import ErrorFormat, ErrorInfo, HttpError
    from mlsys_core.serving.http.lifecycle import Lifecycle, Readiness, ReadinessState
    from mlsys_core.serving.http.limits import ConnectionLimits
    from mlsys_core.serving.http.port import BoundPort
    from mlsys_core.serving.http.routing import Router
    from mlsys_core.serving.http.server import BackgroundServer, ServerAddress, serve
    from mlsys_core.serving.http.streaming import ClosingStreamingResponse, cancel_on_disconnect
    from mlsys_core.serving.http.tls import TlsConfig

_MODULES = {
    "HttpRuntime": "app",
    "create_app": "app",
    "runtime_of": "app",
    "HttpConfig": "config",
    "ErrorFormat": "errors",
    "ErrorInfo": "errors",
    "HttpError": "errors",
    "Lifecycle": "lifecycle",
    "Readiness": "lifecycle",
    "ReadinessState": "lifecycle",
    "ConnectionLimits": "limits",
    "BoundPort": "port",
    "Router": "routing",
    "BackgroundServer": "server",
    "ServerAddress": "server",
    "serve": "server",
    "ClosingStreamingResponse": "streaming",
    "cancel_on_disconnect": "streaming",
    "TlsConfig": "tls",
}

__all__ = [
    "BackgroundServer",
    "BoundPort",
    "ClosingStreamingResponse",
    "ConnectionLimits",
    "ErrorFormat",
    "ErrorInfo",
    "HttpConfig",
    "HttpError",
    "HttpRuntime",
    "Lifecycle",
    "Readiness",
    "ReadinessState",
    "Router",
    "ServerAddress",
    "TlsConfig",
    "cancel_on_disconnect",
    "create_app",
    "runtime_of",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlsys_core.lazy import resolve

    return resolve(f"{__name__}.{_MODULES[name]}:{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
