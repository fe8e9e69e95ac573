"""Bodies of requests with declared fields, and the types of texts and token ids that several protocols share.

Every field works or is refused by name. Fields of a protocol that mean nothing here are taken at the values that ask
for nothing; a field that no protocol has is an error. Numbers are numbers and not texts that look like some.

JSON is read strictly: invalid text is refused at once, and values on which a writer or a model would fail later. Its
parser is jiter, pydantic's own: strict about the standard, and several times quicker than Python's. Speed matters to
all clients: a parser keeps the interpreter's lock to its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import cache
from typing import Annotated, Any, ClassVar

import jiter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from mlsys_serving.http.errors import HttpError

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
