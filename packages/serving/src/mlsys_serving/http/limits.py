"""Bounds on connections, for HTTP and gRPC alike. Plain data; importing this module imports no web framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import open_files_limit

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
