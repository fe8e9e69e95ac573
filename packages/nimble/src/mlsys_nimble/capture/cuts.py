"""Questions that torch's own code asks about sizes: where a slice ends, how many parts a split makes.

``x[:, :20]`` takes 20 elements of 30, and all of 10. Asked as the model's own Python code would ask, a program for many
sizes serves those alone at which the answers are the same (:mod:`mlsys_nimble.capture.watched`).
Quotients are computed for their note alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_nimble.capture.watched import Questions, Read

_WHOLE = 2**62  # "to the end", as torch says it


def ask_cuts(questions: Questions, name: str, shape: Sequence[int], arguments: Sequence[Any]) -> None:
    """Ask what an operator asks about its first argument's size.

    Args:
        questions: Where the questions are noted.
        name: Operator, as ``aten.slice.Tensor``.
        shape: Shape of the first argument.
        arguments: Further arguments.

    Example:
        >>> questions = Questions()
        >>> ask_cuts(questions, "aten.select.int", (2, 5), (1, -1))
        >>> [(each.name, each.answer) for each in questions.asked]
        [('lt', True), ('lt', True), ('ge', True)]
    """
    ask = _ASKS.get(name)
    if ask is not None and shape:
        ask(questions, shape, *arguments)


def ask_stops(questions: Questions, index: Any, shape: Sequence[int]) -> None:
    """Ask whether slices of an index that begin at 0 take all: then torch takes no slice (``x[:, :20]``)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (part is None or part is Ellipsis or type(part) in (int, slice, Read)) for part in parts):
        return
    dim = 0
    num_taken = sum(part is not None and part is not Ellipsis for part in parts)
    for part in parts:
        if isinstance(part, slice) and type(part.stop) is int and not part.start and dim < len(shape):
            bool(questions.wrapped(shape[dim]) > questions.wrapped(part.stop))
        dim += len(shape) - num_taken if part is Ellipsis else part is not None


def _slice(
    q: Questions, shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> None:
    size = q.wrapped(shape[dim])
    first = _bound(q, start or 0, size)
    last = size if end is None or abs(end) > _WHOLE else _bound(q, end, size)
    if first < last and step > 1:
        (last - first + (step - 1)) // step


def _bound(q: Questions, bound: int, size: Any) -> Any:
    """Return where a slice begins or ends, as torch computes it."""
    at = q.wrapped(bound)
    if at < 0:
        at = at + size
    return 0 if at < 0 else size if at > size else at


def _select(q: Questions, shape: Sequence[int], dim: int, index: int) -> None:
    at, size = q.wrapped(index), q.wrapped(shape[dim])
    bool(at < 0)
    bool(at < size)
    bool(at >= size * -1)


def _narrow(q: Questions, shape: Sequence[int], dim: int, start: int, length: int) -> None:
    at, size = q.wrapped(start), q.wrapped(shape[dim])
    bool((at + size if at < 0 else at) + q.wrapped(length) <= size)


def _split(q: Questions, shape: Sequence[int], part: Any, dim: int = 0) -> None:
    size = q.wrapped(shape[dim])
    if isinstance(part, int) and part > 0:
        bool((size + (part - 1)) // q.wrapped(part) == -(-shape[dim] // part))


def _chunk(q: Questions, shape: Sequence[int], parts: int, dim: int = 0) -> None:
    size = q.wrapped(shape[dim])
    part = (size + (parts - 1)) // parts
    if part > 0:
        bool((size + (part - 1)) // part == -(-shape[dim] // -(-shape[dim] // parts)))


def _tensor_split(q: Questions, shape: Sequence[int], parts: int, dim: int = 0) -> None:
    if isinstance(parts, int):
        q.wrapped(shape[dim]) // parts


def _unfold(q: Questions, shape: Sequence[int], dim: int, width: int, step: int) -> None:
    (q.wrapped(shape[dim]) - q.wrapped(width)) // q.wrapped(step)


def _roll(q: Questions, shape: Sequence[int], shifts: Any, dims: Any = ()) -> None:
    for shift, dim in zip(shifts, dims, strict=False):
        size = q.wrapped(shape[dim])
        if size > 0:
            q.wrapped(shift) % size


def _diagonal(q: Questions, shape: Sequence[int], offset: int = 0, one: int = 0, other: int = 1) -> None:
    at, rows, columns = q.wrapped(offset), q.wrapped(shape[one]), q.wrapped(shape[other])
    bool(rows > columns - at if at >= 0 else rows + at > columns)


_ASKS: dict[str, Any] = {
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": _narrow,
    "aten.split.Tensor": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.chunk.default": _chunk,
    "aten.unsafe_chunk.default": _chunk,
    "aten.tensor_split.sections": _tensor_split,
    "aten.unfold.default": _unfold,
    "aten.roll.default": _roll,
    "aten.diagonal.default": _diagonal,
}
