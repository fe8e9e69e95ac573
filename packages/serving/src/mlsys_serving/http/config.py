"""Settings of an HTTP front, given once when it is made, and bounds on connections, which hold for gRPC too.

Plain data; importing this module imports no web framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from mlsys_core import __version__
from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import open_files_limit

if TYPE_CHECKING:
    from mlsys_serving.http.tls import TlsConfig
    from mlsys_serving.tracing.config import TraceConfig

_SPARE_FILES = 96  # beside connections: logs, journals, workers
MAX_HEADER_NBYTES = 64 * 1024  # of a request's line and headers, of trailers, and of what frames a body


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on a server's number of connections, and on its seconds of waiting for a slow or silent client.

    Raises:
        InvalidInputError: a value is out of its range; the message names it and what is allowed.

    Example:
        >>> ConnectionLimits(max_connections=0)
        Traceback (most recent call last):
        mlsys_core.errors.InvalidInputError: max_connections is a number of connections, 1 or more, got 0
    """

    max_connections: int = 1000  # held at a time; one more is answered 503 and closed
    header_timeout_s: float = 10.0  # from the connection, or the first byte of a further request, to its last header
    body_timeout_s: float = 60.0  # from the last header to the last byte of the body
    write_timeout_s: float = 60.0  # a client that takes nothing of a waiting response for so long is cut
    keep_alive_timeout_s: float = 75.0  # between two requests; load balancers close after 60 s, and should be first

    def __post_init__(self) -> None:
        count = self.max_connections
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInputError(f"max_connections is a number of connections, 1 or more, got {count!r}")
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_timeout_s"):
            value = getattr(self, name)
            if not is_duration(value):
                raise InvalidInputError(f"{name} is a finite number of seconds above 0, got {value!r}")


def within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Return ``limits`` with no more connections than this process may open files for, with some to spare.

    A server without descriptors could neither refuse a client nor take the socket of a new worker. The soft limit is
    raised towards the hard one if that helps.
    """
    most = open_files_limit(limits.max_connections + _SPARE_FILES)
    if most is None or most >= limits.max_connections + _SPARE_FILES:
        return limits
    return replace(limits, max_connections=max(1, most - _SPARE_FILES))


def is_duration(value: float) -> bool:
    """Return whether ``value`` is a finite number of seconds above zero."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings of one app, checked when they are made.

    Raises:
        InvalidInputError: a value is out of its range; the message names it and what is allowed.

    Example:
        >>> HttpConfig(api_keys=frozenset({"secret"}), request_timeout_s=60)  # doctest: +ELLIPSIS
        HttpConfig(title='mlsys', ..., request_timeout_s=60, ...)
    """

    title: str = "mlsys"  # of the OpenAPI document
    version: str = __version__
    api_keys: frozenset[str] = field(
        default=frozenset(), repr=False
    )  # any one of them opens the app; empty: open to all
    open_paths: tuple[str, ...] = ("/health/*", "/metrics")  # need no key; "/*" at the end takes everything below
    max_body_nbytes: int = 16 * 1024 * 1024  # of a request's body, as it is sent
    max_bodies_nbytes: int | None = None  # of the large bodies of all requests in work; None: four of the largest
    uploads: Mapping[str, int] = field(default_factory=dict)  # largest body by path, of those that go to the disk
    request_timeout_s: float | None = None  # deadline of a request that asks for none; None: no deadline
    max_request_timeout_s: float | None = None  # cap of X-Request-Timeout-S; None: request_timeout_s, if there is one
    drain_timeout_s: float = 30.0  # time that running requests may take after SIGTERM
    cors_origins: tuple[str, ...] = ()  # e.g. "https://example.org" or "*"; empty: no CORS headers
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header beside this machine's own; "*": any
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: TlsConfig | None = None  # None: plain HTTP
    traces: TraceConfig | None = None  # None: requests are not traced
    log_format: Literal["json", "console"] = "json"
    log_level: LogLevel = "info"  # "info" has a line for each request
    validation_status: Literal[400, 422] = 422  # of a body, query or header that does not fit its schema

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not isinstance(key, str) or not key or any(c.isspace() or not c.isprintable() for c in key):
                raise InvalidInputError(
                    "an API key is empty or has white space or control characters in it; "
                    "use printable characters without spaces"
                )
        for name in ("open_paths", "cors_origins", "allowed_hosts"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                raise InvalidInputError(f"{name} is a tuple of non-empty strings, got {values!r}")
        for origin in self.cors_origins:
            check_origin(origin)
        for host in self.allowed_hosts:
            check_host(host)
        if not isinstance(self.max_body_nbytes, int) or self.max_body_nbytes < 0:
            raise InvalidInputError(f"max_body_nbytes is a number of bytes, 0 or more, got {self.max_body_nbytes!r}")
        total = self.max_bodies_nbytes
        if total is not None and (isinstance(total, bool) or not isinstance(total, int) or total < 1):
            raise InvalidInputError(f"max_bodies_nbytes is a number of bytes, 1 or more, or None, got {total!r}")
        _check_seconds("request_timeout_s", self.request_timeout_s)
        _check_seconds("max_request_timeout_s", self.max_request_timeout_s)
        if not (self.drain_timeout_s == 0 or is_duration(self.drain_timeout_s)):
            raise InvalidInputError(f"drain_timeout_s is 0 or more seconds, got {self.drain_timeout_s!r}")
        if self.log_format not in ("json", "console"):
            raise InvalidInputError(f"log_format is 'json' or 'console', got {self.log_format!r}")
        if self.log_level not in get_args(LogLevel):
            raise InvalidInputError(f"log_level is one of {', '.join(get_args(LogLevel))}, got {self.log_level!r}")
        if self.validation_status not in (400, 422):
            raise InvalidInputError(f"validation_status is 400 or 422, got {self.validation_status!r}")

    @property
    def bodies_nbytes(self) -> int:
        """Bytes that the large bodies of all requests in work may have together."""
        return 4 * max(1, self.max_body_nbytes) if self.max_bodies_nbytes is None else self.max_bodies_nbytes

    @property
    def timeout_cap_s(self) -> float | None:
        """The longest deadline a client may ask for, in seconds; None if there is no bound."""
        return self.request_timeout_s if self.max_request_timeout_s is None else self.max_request_timeout_s


def check_origin(origin: str) -> None:
    """Refuse a value that no browser sends as its ``Origin``.

    Raises:
        InvalidInputError: it is neither ``*`` nor ``scheme://host[:port]`` in lower case.
    """
    scheme, separator, host = origin.partition("://")
    if origin != "*" and (not (scheme and separator and host) or set(host) & set("/ *@?#") or origin != origin.lower()):
        raise InvalidInputError(
            f"cors_origin {origin!r} is no origin; write scheme://host or scheme://host:port in lower case and "
            "without a path, like https://example.org, or * for all"
        )


def check_host(host: str) -> None:
    """Refuse a value that no client sends as its ``Host``, leaving a port aside.

    Raises:
        InvalidInputError: it is neither ``*`` nor a name.
    """
    if host != "*" and set(host) & set("/:@?#* \t"):
        raise InvalidInputError(
            f"allowed_host {host!r} is no name of a host; write it without scheme, port and path, like "
            "example.org, or * for all"
        )


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not is_duration(value):
        raise InvalidInputError(f"{name} is a finite number of seconds above 0, or None, got {value!r}")
