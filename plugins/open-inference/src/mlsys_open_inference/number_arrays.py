"""Large arrays of numbers in a JSON body, read in pieces and without an object for each number.

A parser keeps the interpreter's lock to its end, so that one call for megabytes would hold up every client. Here each
``"data"`` that is an array of numbers, flat or nested, is taken out of the text first and read 64 KiB at a time; the
rest is small. Pure.
"""

from __future__ import annotations

import re
import secrets
from math import prod

import jiter
import numpy as np
from mlsys_serving.http import HttpError
from mlsys_serving.models.datatypes import Array

MAX_VALUES = 1_000_000  # of a JSON text beside its arrays of numbers. Parsing that many takes the lock for some 40 ms
_LEAST_NBYTES = 4096  # a shorter array stays where it is
_MAX_ARRAYS = 4096  # looked at
_PIECE = 1 << 16  # bytes
_DATA = b'"data"'
_OPENS = re.compile(rb'"data"[ \t\r\n]{0,99}:[ \t\r\n]{0,99}(?=\[)')
_NUMERIC = b"0123456789+-.eE \t\r\n"
_OTHER = re.compile(rb"[^0-9+\-.eE \t\r\n,\[\]]")
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")


def lifted(body: bytes) -> tuple[bytes, dict[str, Array]]:
    """Take large arrays of numbers out of a JSON text.

    Args:
        body: the text, which need not be valid.

    Returns:
        The text with a string in place of each array, and the arrays by these strings, which nobody can guess:
        int64 or float64, shaped as they were nested. The text is valid JSON if and only if ``body`` is.

    Raises:
        HttpError: 400; the text has too many values.

    Example:
        >>> text, arrays = lifted(b'{"data": [[' + b"1, " * 4000 + b"2], [" + b"3, " * 4000 + b"4]]}")
        >>> [array.shape for array in arrays.values()], len(text) < 60
        ([(2, 4001)], True)
    """
    nonce, arrays = secrets.token_hex(16), dict[str, Array]()
    parts, done, at = list[bytes](), 0, 0
    for _ in range(_MAX_ARRAYS):
        at = body.find(_DATA, at)
        if at < 0:
            break
        # Not after a backslash: so its quotes are no part of a string, and this is a key.
        opens = _OPENS.match(body, at) if body[at - 1 : at] != b"\\" else None
        at += len(_DATA)
        if opens is None:
            continue
        stop = _end(body, opens.end())
        array = _read(body, opens.end(), stop) if stop - opens.end() >= _LEAST_NBYTES else None
        if array is None:
            continue
        name = f"{nonce}-{len(arrays)}"
        arrays[name] = array
        parts += [body[done : opens.end()], f'"{name}"'.encode()]
        done = at = stop
    text = b"".join([*parts, body[done:]])
    check_values(text)
    return text, arrays


def check_values(text: bytes) -> None:
    """Refuse a JSON text with so many values that parsing it would delay other clients.

    Raises:
        HttpError: 400.
    """
    if (count := text.count(b",")) > MAX_VALUES:
        raise HttpError(
            f"the body has some {count} values beside large arrays of numbers, and at most {MAX_VALUES} may be in "
            "JSON: send tensors as binary data",
            http_status=400,
            error_code="too_many_values",
        )


def _end(body: bytes, start: int) -> int:
    """Return the end of the numbers, brackets and commas that begin at ``start``, behind the last bracket."""
    stop = start
    while stop < len(body):
        other = _OTHER.search(body, stop, stop + _PIECE)
        if other is not None:
            stop = other.start()
            break
        stop = min(stop + _PIECE, len(body))
    return body.rfind(b"]", start, stop) + 1


def _read(body: bytes, start: int, stop: int) -> Array | None:
    """Return the array at ``body[start:stop]``; None if it is no regular array of integers or of doubles."""
    shape = _shape(b"".join(body[at : min(at + _PIECE, stop)].translate(None, _NUMERIC) for at in _steps(start, stop)))
    if shape is None:
        return None
    pieces, at = list[Array](), start
    while at < stop:
        end = min(at + _PIECE, stop)
        if end < stop and (end := body.rfind(b",", at, end)) <= at:
            return None
        text = b"[%b]" % body[at:end].translate(_WITHOUT_BRACKETS)
        try:
            piece = np.array(jiter.from_json(text, allow_inf_nan=False))
        except ValueError:  # wrong, or an empty array among others: the parser of the whole says it
            return None
        is_integral = not any(sign in text for sign in (b".", b"e", b"E"))
        # numpy makes doubles of integers on both sides of 2**63, which a tensor of uint64 tells apart
        if not piece.size or piece.dtype != (np.int64 if is_integral else np.float64):
            return None
        pieces.append(piece)
        at = end + 1
    array = np.concatenate(pieces)
    return array.reshape(shape) if array.size == prod(shape) else None


def _steps(start: int, stop: int) -> range:
    return range(start, stop, _PIECE)


def _shape(skeleton: bytes) -> list[int] | None:
    """Return the shape of nested arrays from their brackets and commas; None if they are not nested evenly."""
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    row = skeleton[depth - 1 : skeleton.find(b"]") + 1]
    if row.count(b"[") != 1:
        return None
    shape = [row.count(b",") + 1]
    for level in range(depth - 2, -1, -1):
        num_rows, at = 1, level + 1 + len(row)
        while skeleton[at : at + 1] == b",":
            num_rows, at = num_rows + 1, at + 1 + len(row)
        row = b"[" + b",".join([row] * num_rows) + b"]"
        shape.insert(0, num_rows)
    return shape if row == skeleton else None
