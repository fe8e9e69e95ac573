"""Listening sockets, with clear errors when none can be had."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from mlsys_core.errors import InvalidInputError, ServingError

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address that a server listens on.

    Example:
        >>> ServerAddress("::1", 8000).url
        'http://[::1]:8000'
    """

    host: str
    port: int
    scheme: str = "http"  # or "https"

    @property
    def url(self) -> str:
        """Base URL; for a server on all interfaces, one that works on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def listen(host: str, port: int, *, scheme: str = "http") -> tuple[socket.socket, ServerAddress]:
    """Return a listening TCP socket and its address; port 0 takes a free port.

    Raises:
        InvalidInputError, ServingError: as :func:`bind`.
    """
    bound, address = bind(host, port, scheme=scheme)
    try:
        bound.listen(_BACKLOG)
    except OSError as error:  # bound by another process that does not listen yet
        bound.close()
        raise _bind_error(error, host, port) from error
    return bound, address


def bind(host: str, port: int, *, scheme: str = "http", option: str = "--port") -> tuple[socket.socket, ServerAddress]:
    """Return a TCP socket that holds a port, and its address; port 0 takes a free port. It does not listen.

    Raises:
        InvalidInputError: the port is out of range, or the host is no address of this machine.
        ServingError: the port is taken, or needs privileges.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidInputError(f"a port is a number from 0 (any free one) to 65535, got {port!r}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(
            f"the host {host!r} cannot be resolved ({error}); use an address of this machine, "
            "127.0.0.1 for this machine only or 0.0.0.0 for all its networks"
        ) from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_error(error, host, port, option) from error
    name = bound.getsockname()
    return bound, ServerAddress(name[0], name[1], scheme)


def _bind_error(error: OSError, host: str, port: int, option: str = "--port") -> ServingError | InvalidInputError:
    if error.errno == errno.EADDRINUSE:
        return ServingError(
            f"port {port} on {host} is in use by another process; choose another port ({option}, 0 takes a free one), "
            "or stop that process"
        )
    if error.errno == errno.EACCES:
        return ServingError(f"port {port} on {host} needs privileges; choose a port from 1024 on ({option})")
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidInputError(
            f"{host} is not an address of this machine; use one of its own (--host), 127.0.0.1 for this machine only "
            "or 0.0.0.0 for all its networks"
        )
    return ServingError(f"cannot listen on {host}:{port}: {error.strerror or error}")
