"""Bodies of requests with declared fields, and the types of texts and token ids that several protocols share.

Every field works or is refused by name. Fields of a protocol that mean nothing here are taken at the values that ask
for nothing; a field that no protocol has is an error. Numbers are numbers and not texts that look like some.

JSON is read strictly: invalid text is refused at once, and values on which a writer or a model would fail later. Its
parser is jiter, pydantic's own: strict about the standard, and several times quicker than Python's. Speed matters to
all clients: a parser keeps the interpreter's lock to its end. A middleware bounds the size of each body, and of all
together.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Annotated, Any, ClassVar

import jiter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlsys_serving.http.errors import HttpError
from mlsys_serving.http.streaming import LARGE

MAX_TEXTS = 2048  # of one request
_MAX_FIELDS = 256  # of an object; more than any has
Neutral = dict[str, tuple[Any, ...]]  # field -> the values at which it is taken, though nothing comes of it
Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at the first item that is wrong: a list of half a million may have as many.
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class NotImplementedFieldError(ValueError):
    """A field has a value that asks for what this server has not."""

    def __init__(self, param: str) -> None:
        super().__init__(f"{param!r} is not implemented by this server; leave it out")
        self.param = param


class Body(BaseModel):
    """A request's body: no unknown fields, no values of another type; a field that may be absent may be null.

    ``neutral`` names fields that are taken at null and at the values that ask for nothing; ``harmless`` those among the
    model's that change no answer at any value.

    Example:
        >>> class Ask(Body):
        ...     neutral: ClassVar[Neutral] = {"best_of": (1,)}
        ...     n: int = 1
        >>> Ask.model_validate({"n": None, "best_of": 1})
        Ask(n=1)
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Neutral] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > _MAX_FIELDS:
            raise ValueError(f"there are {len(values)} fields, and no object of this request has so many")
        rest = dict(values)
        if None in rest.values():
            rest = {name: value for name, value in rest.items() if value is not None or name not in _optional(cls)}
        for name, allowed in cls.neutral.items():
            if name in rest:
                given = rest.pop(name)
                if not any(_is_same(given, value) for value in allowed):
                    raise NotImplementedFieldError(name)
        return rest


@cache
def _optional(body: type[Body]) -> frozenset[str]:
    """Return the names of the fields that may be absent."""
    fields = body.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if not field.is_required()) | body.neutral.keys()


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


MAX_DEPTH = 64  # nested arrays and objects; far below what makes recursive encoders fail
_MAX_SHOWN_CHARS = 40  # of a key
_PIECE = 1 << 16  # elements looked at in one call


def parse_json(body: bytes, *, check_floats: bool = True) -> Any:
    """Return the value of a JSON text (RFC 8259) in UTF-8.

    Args:
        body: the text.
        check_floats: refuse numbers that are out of a double's range. It costs a walk through all values; whoever
            checks them anyway (a tensor's elements) leaves it out and gets them as infinity.

    Raises:
        HttpError: 400; ``invalid_encoding`` if it is not UTF-8, else ``malformed_json``: bad syntax, NaN or Infinity, a
            number out of range, a lone surrogate, a key that comes twice in its object, more than 64 levels.

    Example:
        >>> parse_json(b'{"prompt": "hello"}')
        {'prompt': 'hello'}
    """
    try:
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise _refusal(body, str(error)) from error
    # A tensor's body, which has few brackets, does not pay for the walk.
    if check_floats or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check(value, check_floats=check_floats)
    return value


async def plain_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        HttpError: 415, it is compressed.
    """
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            f"Content-Encoding {encoding[:_MAX_SHOWN_CHARS]!r} is not read here: send the body as it is",
            http_status=415,
            error_code="unsupported_encoding",
        )
    return await request.body()


def _check(value: Any, *, check_floats: bool) -> None:
    """Refuse infinite numbers if asked to, and nesting that is too deep."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    if not level and check_floats and value in (math.inf, -math.inf):
        raise _malformed("a number is too large for a double")
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for node in level:
            for piece in _pieces(node.values() if isinstance(node, dict) else node):
                kinds = set(map(type, piece))
                if check_floats and float in kinds and (math.inf in piece or -math.inf in piece):
                    raise _malformed("a number is too large for a double")
                if dict in kinds or list in kinds:
                    deeper += [child for child in piece if isinstance(child, dict | list)]
        if not deeper:
            return
        level = deeper
    raise _malformed(f"nested deeper than {MAX_DEPTH} levels")


def _pieces(values: Collection[Any]) -> Iterator[Collection[Any]]:
    """Yield ``values`` a part at a time, since a call keeps the interpreter's lock to its end."""
    if not isinstance(values, list) or len(values) <= _PIECE:
        yield values
        return
    for start in range(0, len(values), _PIECE):
        yield values[start : start + _PIECE]


def _refusal(body: bytes, reason: str) -> HttpError:
    """Return the client's message for the parser's ``reason``."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        return HttpError(
            f"the body is not valid UTF-8: byte {error.start} cannot be decoded",
            http_status=400,
            error_code="invalid_encoding",
        )
    what, _, where = reason.rpartition(" at line ")
    if what.startswith("Detected duplicate key"):
        key = what.partition('"')[2][:-1]  # with its escapes
        what = f"the key '{key[:_MAX_SHOWN_CHARS]}' comes twice in one object"
    elif what == "recursion limit exceeded":
        what = f"nested deeper than {MAX_DEPTH} levels"
    elif what == "number out of range":
        what = "a number has too many digits"
    elif "hex escape" in what:
        what = "a string has half of a surrogate pair, or a wrong \\u escape"
    elif b"NaN" in body or b"Infinity" in body:
        where += "; NaN and Infinity are no JSON values"
    return _malformed(f"{what} at line {where}")


def _malformed(reason: str) -> HttpError:
    return HttpError(f"the body is not valid JSON: {reason}", http_status=400, error_code="malformed_json")


MAX_WAITING_BODIES = 512  # large bodies that wait for room; one more is refused
_TRIMMED = 1024 * 1024  # bytes of large bodies from which on freed memory is given back to the system afterwards


class BodyBudget:
    """A number of bytes that large bodies share. Bodies wait for room in order, unread; small ones always have room.

    Belongs to the event loop's thread.

    Args:
        max_nbytes: sum of all large bodies in work; a larger one is admitted alone.
        on_idle: called when no large body is left, and those that were had a megabyte or more together.

    Example:
        >>> async def main():
        ...     async with BodyBudget(1 << 20).admitted(300_000):
        ...         return "read the body"
        >>> asyncio.run(main())
        'read the body'
    """

    def __init__(self, max_nbytes: int, *, on_idle: Callable[[], None] = lambda: None) -> None:
        self._max_nbytes = max_nbytes
        self._on_idle = on_idle
        self._held_nbytes = 0
        self._left_nbytes = 0  # of bodies that have left since the last call of on_idle
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_nbytes(self) -> int:
        """Bytes that are taken now."""
        return self._held_nbytes

    @asynccontextmanager
    async def admitted(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` for a body while its request is in work.

        Raises:
            HttpError: 503, too many others wait.
        """
        if nbytes < LARGE:
            yield
            return
        held = min(nbytes, self._max_nbytes)
        await self._acquire(held)
        try:
            yield
        finally:
            self._release(held)
            self._left_nbytes += nbytes
            if self._left_nbytes >= _TRIMMED and not self._held_nbytes:
                self._left_nbytes = 0
                # After this turn of the loop, when nothing refers to the body any more.
                asyncio.get_running_loop().call_soon(self._on_idle)

    async def _acquire(self, nbytes: int) -> None:
        if not self._waiting and self._held_nbytes + nbytes <= self._max_nbytes:
            self._held_nbytes += nbytes
            return
        if len(self._waiting) >= MAX_WAITING_BODIES:
            raise HttpError(
                f"the {self._max_nbytes} bytes that all requests' bodies may have together are taken, and "
                f"{MAX_WAITING_BODIES} requests wait: try again, or send less than {LARGE} bytes",
                http_status=503,
                error_code="too_many_large_requests",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # admitted, and cancelled in the same turn of the loop
                self._release(nbytes)
            else:
                self._waiting.remove((nbytes, turn))
                self._admit_waiting()
            raise

    def _release(self, nbytes: int) -> None:
        self._held_nbytes -= nbytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._held_nbytes + self._waiting[0][0] <= self._max_nbytes:
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._held_nbytes += nbytes
                turn.set_result(None)


class BodyLimitMiddleware:
    """Raises 413 for a body over the limit: at once if ``Content-Length`` says so, else when it has grown over it.

    A large body is not read before the budget of all bodies has room for it, and holds that room until its request is
    answered. Stands inside the supervisor, which answers. After 413 the connection is closed, so that nobody has to
    read the rest of the body.

    Args:
        app: the next ASGI app.
        max_body_nbytes: the largest body that passes.
        budget: of all bodies together.
        uploads: the largest body by path, where it goes to the disk as it comes and takes no part of the budget.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_nbytes: int, budget: BodyBudget, uploads: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._uploads = uploads or {}
        self._max_body_nbytes = max_body_nbytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload_nbytes = self._uploads.get(scope["path"]) if scope["method"] == "POST" else None
        limit_nbytes = self._max_body_nbytes if upload_nbytes is None else upload_nbytes
        received_nbytes = 0

        async def limited() -> Message:
            nonlocal received_nbytes
            message = await receive()
            received_nbytes += len(message.get("body", b""))
            if received_nbytes > limit_nbytes:
                raise body_too_large(limit_nbytes)
            return message

        expected_nbytes = _expected_nbytes(Headers(scope=scope), limit_nbytes)
        async with self._budget.admitted(expected_nbytes if upload_nbytes is None else 0):
            await self._app(scope, limited, send)


def _expected_nbytes(headers: Headers, limit_nbytes: int) -> int:
    """Return the largest possible size of the body.

    Raises:
        HttpError: 413, larger than allowed.
    """
    declared = headers.get("content-length", "")
    # A proxy or a test may declare nonsense, which is not ours to judge: what arrives is counted anyway.
    if not (declared.isascii() and declared.isdecimal()):
        return limit_nbytes if declared or "transfer-encoding" in headers else 0
    # More than 18 digits is too much whatever the limit; int() refuses thousands of them.
    if len(declared) > 18 or int(declared) > limit_nbytes:
        raise body_too_large(limit_nbytes)
    return int(declared)


def body_too_large(max_nbytes: int) -> HttpError:
    """Return the error 413."""
    return HttpError(
        f"the request's body is larger than {max_nbytes} bytes, the most this server takes",
        http_status=413,
        headers={"Connection": "close"},
    )
