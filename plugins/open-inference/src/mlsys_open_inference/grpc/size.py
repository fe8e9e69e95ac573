"""Size of typed contents in a gRPC message, found before it is parsed. Pure.

A message is parsed in one call, which keeps the interpreter's lock. Two million small integers take as long as the rest
of a server may wait. Raw bytes and packed floats of any size are only copied.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlsys_core.errors import InvalidInputError

MAX_CONTENTS = 2_000_000  # bytes of integers and booleans, and elements of BYTES, as contents of a request
_INPUTS = _CONTENTS = 5  # ModelInferRequest.inputs, and InferInputTensor.contents
_FLOATS = frozenset({6, 7})  # fp32_contents, fp64_contents
_BYTES = 8  # bytes_contents


def check_contents(message: bytes) -> None:
    """Check that a ``ModelInferRequest`` has not too much slow content; other messages pass.

    Raises:
        InvalidInputError: it has.
    """
    size = 0
    for number, start, stop in _fields(message, 0, len(message)):
        for inner, inner_start, inner_stop in _fields(message, start, stop) if number == _INPUTS else ():
            size += 1
            for kind, first, last in _fields(message, inner_start, inner_stop) if inner == _CONTENTS else ():
                size += 1 if kind == _BYTES or kind in _FLOATS else last - first
                if size > MAX_CONTENTS:
                    break
        size += 1
        if size > MAX_CONTENTS:
            raise InvalidInputError(
                f"the request has more than {MAX_CONTENTS} bytes of integers, or elements of BYTES, as contents: send "
                "raw_input_contents"
            )


def _fields(message: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field; stop where the message is malformed."""
    at = start
    while at < stop:
        tag, at = _varint(message, at, stop)
        kind = tag & 7
        begin = at
        if kind == 0:
            _, at = _varint(message, at, stop)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            length, begin = _varint(message, at, stop)
            at = begin + length
        else:  # groups are not used here
            return
        if at > stop:
            return
        yield tag >> 3, begin, at


def _varint(message: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return an integer and its end; past ``stop`` if it is malformed."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, stop + 1
