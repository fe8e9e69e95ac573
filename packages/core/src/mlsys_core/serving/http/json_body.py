"""Strict JSON: what Python's parser lets pass, and its writer or a model would choke on later, is refused at once."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from mlsys_core.serving.http.errors import HttpError

MAX_DEPTH = 64  # nested arrays and objects; far below what makes recursive encoders fail


def parse_json(body: bytes, *, check_floats: bool = True) -> Any:
    """The value of a JSON text (RFC 8259) in UTF-8.

    Args:
        body: the text.
        check_floats: refuse numbers that are out of a double's range. It costs a call for each number that is no
            integer; whoever checks them anyway (a tensor's elements) leaves it out and gets them as infinity.

    Raises:
        HttpError: 400; ``invalid_encoding`` if it is not UTF-8, else ``malformed_json``: bad syntax, NaN or Infinity, a
            number out of range, a lone surrogate, a key that comes twice in its object, more than 64 levels.

    Example:
        >>> parse_json(b'{"prompt": "hello"}')
        {'prompt': 'hello'}
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HttpError(
            f"the body is not valid UTF-8: byte {error.start} cannot be decoded",
            http_status=400,
            error_code="invalid_encoding",
        ) from error
    try:
        value = (_STRICT if check_floats else _QUICK).decode(text)
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _malformed(f"nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # Python bounds the digits of an integer
        raise _malformed("a number has too many digits") from error
    # Both checks only walk a body that could fail them: tensors and chats do not pay for it.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _malformed(f"nested deeper than {MAX_DEPTH} levels")
    if (b"\\ud" in body or b"\\uD" in body) and _has_lone_surrogate(value):
        raise _malformed("a string has half of a surrogate pair")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [node for node in level if isinstance(node, dict | list)]
        if not containers:
            return False
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    return True


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _malformed("a number is too large for a double")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _malformed(f"{name} is not a JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # the parser would keep the last, and say nothing of the others
        keys = [key for key, _ in pairs]
        twice = next(key for key in value if keys.count(key) > 1)
        raise _malformed(f"the key {twice[:40]!r} comes twice in one object")
    return value


def _malformed(reason: str) -> HttpError:
    return HttpError(f"the body is not valid JSON: {reason}", http_status=400, error_code="malformed_json")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unique)
_QUICK = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)
