"""Admission: no pages of other sites, no new requests while the server drains, and, with keys, only their holders."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.describe import ErrorAnswers
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.lifecycle import Lifecycle, shutting_down
from mlsys_serving.http.middleware.browser import BrowserGuard

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
