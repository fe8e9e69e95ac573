"""Ask an app's own routes from within its process: the answers of HTTP, without what belongs to clients."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from mlsys_core.errors import MlsysError
from mlsys_serving.http.bodies import body_too_large
from mlsys_serving.http.describe import describe
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.record import RequestRecord, attach
from mlsys_serving.http.runtime import runtime_of
from starlette.types import Message, Scope


@dataclass(frozen=True, slots=True)
class InsideAnswer:
    """Answer of a route."""

    status: int
    body: bytes


class InsideClient:
    """Client of an app's routes in its own process and event loop.

    Its requests need no key, have no deadline, and are in no log and no metric of HTTP; a drain does not wait for them.
    Errors are those of HTTP, in the app's format.

    Args:
        app: Made by :func:`mlsys_serving.http.create_app`; all its routes are there.

    Example:
        >>> from mlsys_serving.http import HttpConfig, create_app
        >>> inside = InsideClient(create_app(HttpConfig()))
        >>> asyncio.run(inside.post("/nothing", b"{}", request_id="a")).status
        404
    """

    def __init__(self, app: FastAPI) -> None:
        self._app, self._runtime = app, runtime_of(app)
        bare = copy.copy(app)
        bare.user_middleware = []
        self._call = bare.build_middleware_stack()

    async def post(
        self, path: str, body: bytes, *, request_id: str, extra: Mapping[str, Any] | None = None
    ) -> InsideAnswer:
        """Return the answer to ``POST path``, whole; cancelling the call cancels the route.

        Args:
            path: As in a URL.
            body: JSON.
            request_id: For errors and logs.
            extra: Further items of the request's scope, for the route.
        """
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {"request_id": request_id, "deadline": None},
            "app": self._app,
            **(extra or {}),
        }
        attach(scope, RequestRecord(request_id=request_id, received_at=self._runtime.clock.now()))
        if len(body) > self._runtime.config.max_body_nbytes:
            return self._refusal(body_too_large(self._runtime.config.max_body_nbytes), scope)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        started: list[Message] = []
        parts: list[bytes] = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.get_running_loop().create_future()  # this client never leaves
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self._call(scope, receive, send)
        except Exception as error:
            # The app has answered it before it let it pass.
            if not isinstance(error, MlsysError) and describe(error).status >= 500:
                self._runtime.logger.error("request failed", request_id=request_id, exc_info=error)
            if not started:
                raise
        return InsideAnswer(started[0]["status"], b"".join(parts))

    def _refusal(self, error: HttpError, scope: Scope) -> InsideAnswer:
        response = self._runtime.answers.response(self._runtime.answers.info(error, scope))
        return InsideAnswer(response.status_code, bytes(response.body))
