"""Guard against web pages in a visitor's browser: they change no state unless their origin was allowed.

A page can make its visitor's browser send requests to a server that only the visitor reaches. Three checks stop it:

- the Host header, for a server on a loopback address: a page whose own name was made to point here (DNS rebinding) is
  for its browser the same origin, but still sends that name;
- the Origin header of requests that may change state, and of WebSockets: browsers always send it across origins;
- the content type of a body: types that a page may send without asking the server first, and that no API here has.

Programs other than browsers send no Origin, so the checks do not affect them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address

from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.sockets import ServerAddress

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# The third, application/x-www-form-urlencoded, is what curl -d and urllib send by default: routes judge it.
_PAGE_TYPES = frozenset({b"text/plain", b"multipart/form-data"})
_MAX_SHOWN_CHARS = 100


class BrowserGuard:
    """Decides on requests that a browser may have sent.

    Args:
        cors_origins: origins whose pages may use the server; ``*``: all.
        allowed_hosts: names by which the server is reached beside this machine's own; ``*``: any.

    Example:
        >>> guard = BrowserGuard()
        >>> guard.check("POST", [(b"host", b"127.0.0.1:8000"), (b"origin", b"https://evil.example")])
        Traceback (most recent call last):
        mlsys_serving.http.errors.HttpError: pages of https://evil.example may not use this server; ...
    """

    def __init__(self, cors_origins: Iterable[str] = (), allowed_hosts: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in cors_origins)
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._checks_host = False

    def listens_on(self, address: ServerAddress) -> None:
        """Check the Host header from now on if ``address`` is a loopback one, or if names were given."""
        self._checks_host = "*" not in self._hosts and (address.is_loopback or bool(self._hosts))

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]], *, takes_forms: bool = False) -> None:
        """Check that the request may pass.

        Args:
            method: Of HTTP; ``WEBSOCKET`` for one.
            headers: All headers.
            takes_forms: The route takes uploads, which only the origin tells from those of a page.

        Raises:
            HttpError: 403 for a host or an origin, 415 for a content type.
        """
        host, origin, content_type, has_body = b"", None, None, False
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"content-type":
                content_type = value
            elif (name == b"content-length" and value != b"0") or name == b"transfer-encoding":
                has_body = True
        if self._checks_host and host and not self._is_known(host):
            raise HttpError(
                f"this server does not answer to the name {_shown(host)}; reach it by its address, or start it with "
                "--allowed-host NAME",
                http_status=403,
                error_code="host_not_allowed",
            )
        if method in _SAFE_METHODS:
            return
        if origin is not None and not self._may_use(origin, host):
            raise HttpError(
                f"pages of {_shown(origin)} may not use this server; start it with --cors-origin {_shown(origin)} "
                "if they should",
                http_status=403,
                error_code="origin_not_allowed",
            )
        if has_body and content_type is not None:
            media_type = content_type.partition(b";")[0].strip().lower()
            if media_type in _PAGE_TYPES and not (takes_forms and media_type == b"multipart/form-data"):
                raise HttpError(
                    f"a body of type {_shown(media_type)} is not taken; send the header 'Content-Type: "
                    "application/json' (application/octet-stream for binary tensors)",
                    http_status=415,
                    error_code="unsupported_media_type",
                )

    def _is_known(self, host: bytes) -> bool:
        return _is_this_machines(host) or _without_port(host) in self._hosts

    def _may_use(self, origin: bytes, host: bytes) -> bool:
        if b"*" in self._origins or origin in self._origins:
            return True
        # Its own pages (/docs). The scheme is left out: a proxy before the server may have ended TLS.
        return bool(host) and origin.partition(b"://")[2].lower() == host.lower()


@lru_cache(maxsize=64)  # parsing an address takes longer than all else here
def _is_this_machines(host: bytes) -> bool:
    """Return whether a Host header is ``localhost`` or an address: DNS rebinding takes a name."""
    name = _without_port(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name[1:-1] if name[:1] + name[-1:] == "[]" else name)
    except ValueError:
        return False
    return True


def _without_port(header: bytes) -> str:
    """Return a host without its port: ``localhost:8000`` as ``localhost``, ``[::1]:8000`` as ``[::1]``."""
    host = header.decode("latin-1").lower()
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdecimal() and not (name.count(":") and not name.endswith("]")) else host


def _shown(value: bytes) -> str:
    text = value[:_MAX_SHOWN_CHARS].decode("latin-1")
    return text if text.isprintable() else ascii(text)
