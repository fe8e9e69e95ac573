"""Admission: no pages of other sites, no new requests while the server drains, and, with keys, only their holders."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.describe import ErrorAnswers
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.lifecycle import Lifecycle, shutting_down
from mlsys_serving.http.sockets import ServerAddress

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
# The third, application/x-www-form-urlencoded, is what curl -d and urllib send by default: routes judge it.
_PAGE_TYPES = frozenset({b"text/plain", b"multipart/form-data"})
_MAX_SHOWN_CHARS = 100


class BrowserGuard:
    """Guard against web pages in a visitor's browser: they change no state unless their origin was allowed.

    A page can make its visitor's browser send requests to a server that only the visitor reaches. Three checks stop it:

    - the Host header, for a server on a loopback address: a page whose own name was made to point here (DNS rebinding)
      is for its browser the same origin, but still sends that name;
    - the Origin header of requests that may change state, and of WebSockets: browsers always send it across origins;
    - the content type of a body: types that a page may send without asking the server first, and that no API here has.

    Programs other than browsers send no Origin, so the checks do not affect them.

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


# An orchestrator watches the drain, by these paths or by those of the Open Inference Protocol.
_ALWAYS_OPEN = frozenset({"/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"})


class KeyRing:
    """The keys that open a server.

    They are compared as SHA-256 digests, in constant time and each with all: the time reveals neither a key's length
    nor the correct part of a guess.

    Args:
        api_keys: any of them will do.
    """

    def __init__(self, api_keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in api_keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, presented: list[bytes]) -> None:
        """Check that one of the keys ``presented`` is known.

        Raises:
            HttpError: 401, none is.
        """
        known = False
        for key in presented:
            digest = _digest(key)
            for expected in self._digests:
                known |= secrets.compare_digest(digest, expected)  # no early exit: all are always compared
        if not known:
            raise _unauthorized(has_key=bool(presented))


class OpenPaths:
    """Set of paths: each by itself, or with ``/*`` at the end and all below.

    Example:
        >>> "/health/live" in OpenPaths(["/health/*"]), "/health" in OpenPaths(["/health/*"])
        (True, False)
    """

    def __init__(self, paths: Iterable[str]) -> None:
        paths = tuple(paths)
        self._prefixes = tuple(path[:-1] for path in paths if path.endswith("/*"))
        self._paths = frozenset(path for path in paths if not path.endswith("/*"))

    def __contains__(self, path: str) -> bool:
        return path in self._paths or path.startswith(self._prefixes)


class AdmissionMiddleware:
    """Refuses pages of other sites, all but health and metrics while the server drains, and requests without a key.

    Args:
        app: the next ASGI app.
        guard: decides on requests that a browser may have sent.
        uploads: paths of routes that take files as forms.
        lifecycle: knows whether the server drains: 503 with ``Retry-After`` and ``Connection: close``.
        api_keys: any of them will do, in ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; none: all are let in.
        open_paths: paths that need no key; ``/*`` at the end takes all below.
        answers: writes the refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        guard: BrowserGuard,
        uploads: Collection[str],
        lifecycle: Lifecycle,
        api_keys: Iterable[str],
        open_paths: Iterable[str],
        answers: ErrorAnswers,
    ) -> None:
        self._app, self._guard, self._uploads, self._lifecycle = app, guard, uploads, lifecycle
        self._keys, self._open_paths, self._answers = KeyRing(api_keys), OpenPaths(open_paths), answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(scope)
            except HttpError as error:
                await self._answers.refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise the refusal of a request that is not let in."""
        path, headers = scope["path"], scope["headers"]
        self._guard.check(scope.get("method", "WEBSOCKET"), headers, takes_forms=path in self._uploads)
        if self._lifecycle.is_draining and path not in _ALWAYS_OPEN:
            raise shutting_down()
        if self._keys and path not in self._open_paths:
            self._keys.check(presented_keys(headers))


def presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys of a request, in its headers' order.

    Example:
        >>> presented_keys([(b"authorization", b"Bearer one"), (b"x-api-key", b"two")])
        [b'one', b'two']
    """
    keys = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                keys.append(token.strip())
        elif name == b"x-api-key" and value.strip():
            keys.append(value.strip())
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(*, has_key: bool) -> HttpError:
    if has_key:
        message, challenge = "the API key is not known here", 'Bearer error="invalid_token"'
    else:
        message, challenge = "an API key is needed: send the header 'Authorization: Bearer KEY'", "Bearer"
    return HttpError(
        message,
        http_status=401,
        error_code="invalid_api_key" if has_key else "missing_api_key",
        headers={"WWW-Authenticate": challenge},
    )


def check_model_control(model_control: bool) -> None:
    """Refuse what changes the server unless the operator allowed it.

    Raises:
        HttpError: 403.
    """
    if not model_control:
        raise HttpError(
            "clients may not load or unload models here; the server's operator allows it with --model-control",
            http_status=403,
            error_code="model_control_off",
        )
