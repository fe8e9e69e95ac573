"""Work of the HTTP front beside the event loop: reading bodies, rendering, tokenising, writing answers.

Each :class:`ModelService` owns one :class:`Front`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from fastapi import Request, Response
from mlsys_serving.http.threads import LARGE, RequestThreads
from pydantic import BaseModel

_NUM_SMALL_THREADS = 2


class Front(RequestThreads):
    """Threads for the work of requests: two for small work, so that a chat does not wait for a megabyte."""

    def __init__(self) -> None:
        super().__init__("orca-front", num_small=_NUM_SMALL_THREADS)

    async def answer(self, make: Callable[[], BaseModel], *, size: int = 0) -> Response:
        """Return a JSON response of what ``make`` gives; both made and written in a thread of the front.

        Args:
            make: Builds the answer.
            size: Size of the work; see :meth:`run`.
        """
        return await self.run(lambda: Response(to_json(make()), media_type="application/json"), size=size)


def to_json(answer: BaseModel) -> bytes:
    """Return ``answer`` as JSON, piece by piece, so that no answer keeps the interpreter's lock for long.

    Example:
        >>> class Point(BaseModel):
        ...     x: int
        >>> to_json(Point(x=1))
        b'{"x":1}'
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return "".join(encoder.iterencode(answer)).encode()


def body_size(request: Request) -> int:
    """Return how many bytes a request's body has; :data:`LARGE` if it did not say so before."""
    return int(request.headers.get("content-length", LARGE))
