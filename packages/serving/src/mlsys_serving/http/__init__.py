"""The HTTP serving base: one FastAPI factory, and the services that a model server needs around it (``docs/http.md``).

Orca's OpenAI front and the Open Inference Protocol front bring routers; this package brings request ids, API keys,
limits, deadlines, one error shape, health, metrics, logs and a server that drains. Names are imported when they are
asked for, so that importing the package stays cheap.

Example:
    >>> from mlsys_serving.http import HttpConfig
    >>> HttpConfig(max_body_nbytes=1024).max_body_nbytes
    1024
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_serving.http.app import create_app
    from mlsys_serving.http.config import ConnectionLimits, HttpConfig
    from mlsys_serving.http.errors import ErrorFormat, ErrorInfo, HttpError
    from mlsys_serving.http.lifecycle import Lifecycle, Readiness, ReadinessState
    from mlsys_serving.http.port import BoundPort
    from mlsys_serving.http.runtime import HttpRuntime, Router, runtime_of
    from mlsys_serving.http.server import BackgroundServer, ServerAddress, serve
    from mlsys_serving.http.streaming import ClosingStreamingResponse, cancel_on_disconnect
    from mlsys_serving.http.tls import TlsConfig


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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "app": ["create_app"],
        "runtime": ["HttpRuntime", "Router", "runtime_of"],
        "config": ["ConnectionLimits", "HttpConfig"],
        "errors": ["ErrorFormat", "ErrorInfo", "HttpError"],
        "lifecycle": ["Lifecycle", "Readiness", "ReadinessState"],
        "port": ["BoundPort"],
        "server": ["BackgroundServer", "ServerAddress", "serve"],
        "streaming": ["ClosingStreamingResponse", "cancel_on_disconnect"],
        "tls": ["TlsConfig"],
    },
)
