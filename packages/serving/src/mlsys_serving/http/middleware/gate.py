"""Admission: no new requests while the server drains, and only holders of a key if keys are set."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from mlsys_serving.http.answers import ErrorAnswers
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.lifecycle import Lifecycle, shutting_down

# An orchestrator watches the drain, by these paths or by those of the Open Inference Protocol.
_ALWAYS_OPEN = frozenset({"/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"})


class DrainGateMiddleware:
    """Answers 503 with ``Retry-After`` and ``Connection: close`` while the server drains; health and metrics stay.

    Args:
        app: the next ASGI app.
        lifecycle: knows whether it drains.
        answers: writes the refusal.
    """

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle, answers: ErrorAnswers) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        is_request = scope["type"] in ("http", "websocket")
        if is_request and self._lifecycle.is_draining and scope["path"] not in _ALWAYS_OPEN:
            error = shutting_down(
                "the server is shutting down and takes no new requests; try again, or another replica"
            )
            await self._answers.refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)


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


class ApiKeyMiddleware:
    """Lets in requests with a known key, in ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; others get 401.

    Args:
        app: the next ASGI app.
        api_keys: any of them will do.
        open_paths: paths that need none; ``/*`` at the end takes all below.
        answers: writes the refusal.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: Iterable[str], open_paths: Iterable[str], answers: ErrorAnswers
    ) -> None:
        self._app = app
        self._keys = KeyRing(api_keys)
        self._open_paths = OpenPaths(open_paths)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in self._open_paths:
            try:
                self._keys.check(presented_keys(scope["headers"]))
            except HttpError as error:
                await self._answers.refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


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
