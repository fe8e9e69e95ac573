"""Turn a request's bytes into a checked body, off the event loop and with bounds that hold before any parsing.

Routes made with :func:`intake_route` read their bodies through here: values are counted before they are parsed, and
both parsing and checking happen in a thread of the :class:`.service.Front`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from mlsys_serving.http import HttpError, runtime_of
from mlsys_serving.http.bodies import parse_json, plain_body
from mlsys_serving.http.describe import refused_body
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mlsys_orca.api.service import Front, ModelService

MAX_VALUES = 500_000  # of a body: texts, numbers and the like. Parsing that many takes the lock for some 10 ms
MAX_CONTAINERS = 20_000  # of a body: arrays and objects, each some hundred bytes of memory
MAX_KEYS = 50_000  # of a body: fields of all its objects
_SLICE = 1 << 16  # bytes


def bounded_json(body: bytes) -> Any:
    """Return the value of a JSON text, which has at most so many values; strict as ``parse_json``.

    Raises:
        HttpError: 400; as ``parse_json``, or ``too_many_values``.

    Example:
        >>> bounded_json(b'{"prompt": [1, 2]}')
        {'prompt': [1, 2]}
    """
    limits = (MAX_CONTAINERS, MAX_KEYS, MAX_VALUES)
    counts = _counts(body)
    if any(count > limit for count, limit in zip(counts, limits, strict=True)):
        counts = _counts_outside_texts(body, limits)
    for count, limit, what in zip(counts, limits, ("arrays and objects", "fields", "values"), strict=True):
        if count > limit:
            raise HttpError(
                f"the body has at least {count} {what}, and at most {limit} may be in one request: send several",
                http_status=400,
                error_code="too_many_values",
            )
    return parse_json(body)


def _counts(text: bytes) -> tuple[int, int, int]:
    """Count containers, fields and values; too many if texts hold the signs that part them, never too few."""
    num_containers = text.count(b"[") + text.count(b"{")
    return num_containers, text.count(b":"), text.count(b",") + num_containers + 1


def _counts_outside_texts(body: bytes, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    """Count like :func:`_counts`, without the inside of texts; stop where a limit is passed."""
    found, in_text, start = (0, 0, 0), 0, 0
    while start < len(body):  # in pieces, since a call keeps the interpreter's lock to its end
        piece = body[start : start + _SLICE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last character is escaped by what ends the piece
            piece = body[start : start + _SLICE + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        more = _counts(b"".join(parts[in_text::2]))
        found = (found[0] + more[0], found[1] + more[1], found[2] + more[2])
        in_text ^= (len(parts) - 1) & 1
        if any(count > limit for count, limit in zip(found, limits, strict=True)):
            break
    return found


def read_body(body: bytes, model: type[BaseModel], validation_status: int) -> BaseModel:
    """Return ``body`` as a ``model``.

    Raises:
        HttpError: it is no JSON, has too many values, or does not fit the model.
    """
    value = bounded_json(body)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        info = refused_body(error, value, validation_status=validation_status)
        raise HttpError(info.message, http_status=info.status, error_code=info.code, param=info.param) from None


def intake_route(service: ModelService) -> type[APIRoute]:
    """Return the class of routes over ``service``: a request that comes back to a stream is answered by its streams.

    Bodies of all others are read and checked by its front.
    """

    class IntakeRoute(APIRoute):
        """A route of FastAPI's whose body arrives checked."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            field = self.body_field
            model = None if field is None else field.field_info.annotation
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                return handler
            checked: type[BaseModel] = model

            async def read(request: Request) -> Response:
                if (rest := await service.streams.go_on(request)) is not None:
                    return rest
                return await handler(_CheckedRequest(request, service.front, checked))

            return read

    return IntakeRoute


class _CheckedRequest(Request):
    """A request whose JSON is the checked body."""

    def __init__(self, request: Request, front: Front, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._front, self._model = front, model

    async def json(self) -> Any:
        body = await plain_body(self)
        status = runtime_of(self.app).config.validation_status
        return await self._front.run(read_body, body, self._model, status, size=len(body))
