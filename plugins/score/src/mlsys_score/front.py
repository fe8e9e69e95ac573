"""Routes of the score: the page at ``/``, its events, and recordings of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response
from mlsys_serving.extensions import Panel
from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.runtime import Router
from mlsys_serving.http.streaming import ClosingStreamingResponse

from mlsys_score.board import Board
from mlsys_score.page import live_page

_TICK_S = 0.1  # between two messages to a page
_QUIET_S = 5.0  # between two when there is nothing new
_GRACE_S = 5.0  # watching goes on so long without a viewer: a page is loaded again
_MAX_VIEWERS = 32


class ScoreFront:
    """Viewers of one app.

    Args:
        board: What they see.
        panels: Live figures of the server's extensions.
    """

    def __init__(self, board: Board, *, panels: Callable[[], Sequence[Panel]] = tuple) -> None:
        self._board, self._panels = board, panels
        self._resting: set[asyncio.Task[None]] = set()

    def router(self) -> Router:
        """Return the routes; none is in the OpenAPI document, as they are the page's."""
        router = Router(include_in_schema=False)

        @router.api_route("/", methods=["GET", "HEAD"])
        async def page(request: Request) -> Response:
            return _page(request)

        @router.get("/ui/score/events")
        async def events() -> Response:
            if self._board.num_viewers >= _MAX_VIEWERS:
                raise HttpError(f"{_MAX_VIEWERS} pages show the score already: close one", http_status=503)
            return ClosingStreamingResponse(
                self._events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )

        @router.get("/ui/score/panels")
        async def panels() -> list[tuple[str, dict[str, float | str]]]:
            return [(panel.title, dict(panel.figures())) for panel in self._panels()]

        @router.get("/ui/score/recording")
        async def recording(seconds: Annotated[float, Query(ge=0, le=300)] = 0.0) -> Response:
            self._board.look()
            try:
                await asyncio.sleep(seconds)
                body = json.dumps(self._board.snapshot(), separators=(",", ":"))
            finally:
                self._look_away()
            name = {"content-disposition": 'attachment; filename="score.json"', "cache-control": "no-store"}
            return Response(body, media_type="application/json", headers=name)

        return router

    async def _events(self) -> AsyncIterator[str]:
        board = self._board
        board.look()
        try:
            data, cursor, _ = board.read(None)
            yield _event("snapshot", data)
            quiet_s = 0.0
            while not board.is_closed:
                await asyncio.sleep(_TICK_S)
                data, latest, is_snapshot = board.read(cursor)
                quiet_s += _TICK_S
                if latest == cursor and quiet_s < _QUIET_S:
                    continue
                quiet_s, cursor = 0.0, latest
                yield _event("snapshot" if is_snapshot else "delta", data)
        finally:
            self._look_away()

    def _look_away(self) -> None:
        self._board.look_away()
        task = asyncio.get_running_loop().create_task(self._rest())
        self._resting.add(task)
        task.add_done_callback(self._resting.discard)

    async def _rest(self) -> None:
        await asyncio.sleep(0 if self._board.is_closed else _GRACE_S)
        self._board.rest()


def _page(request: Request) -> Response:
    page = live_page()
    headers = {
        "content-security-policy": page.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # asked for each time, answered 304 while it is the same
        "vary": "accept-encoding",
        "etag": page.etag,
    }
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    body = page.html
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = page.gzipped, "gzip"
    return Response(body, media_type="text/html; charset=utf-8", headers=headers)


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
