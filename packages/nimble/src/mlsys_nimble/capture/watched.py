"""Sizes that the model's Python code reads in a captured run, and what it asks about them.

``x.shape[0]`` comes back as an integer that notes comparisons: ``if n > 4`` is a branch that other sizes may take the
other way. :class:`Questions` lists them, each with its answer; a program serves a size only if all answers are the same
there. Torch's own code asks too: ``x[:, :20]`` takes 20 elements of 30, and all of 10. :func:`ask_cuts` notes these
questions as if the model's Python code asked them; quotients are computed for their note alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from mlsys_nimble.ir.sizes import NotGeneral

Term: TypeAlias = Any  # an int; ("read", number of the read); or (name of an operator, term, term)

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod")
_DIVISIONS = ("floordiv", "mod")


@dataclass(frozen=True, slots=True)
class Question:
    """Comparison of two terms, with its answer. ``"is"`` stands for any other use of a number: its answer is it."""

    name: str
    left: Term
    right: Term
    answer: int


@dataclass(slots=True)
class Questions:
    """Reads of sizes in one run, and what was asked about them."""

    reads: list[int] = field(default_factory=list)  # value of each read
    asked: dict[Question, None] = field(default_factory=dict)  # each once, in order
    divided: dict[Term, None] = field(default_factory=dict)  # quotients and remainders, and what was made of them

    def clear(self) -> None:
        """Forget all."""
        self.reads.clear()
        self.asked.clear()
        self.divided.clear()

    def wrapped(self, result: Any) -> Any:
        """Return what torch gave to the model's Python code, integers so that they note what is asked."""
        if type(result) is int:
            self.reads.append(result)
            return _made(self, result, ("read", len(self.reads) - 1))
        if isinstance(result, torch.Size) or (type(result) is tuple and all(type(part) is int for part in result)):
            return type(result)([self.wrapped(part) for part in result])
        return result

    def used(self, result: Any) -> None:
        """Note a size of which Python makes a plain integer, as ``len(x)`` does: only the same size gives the same."""
        self.reads.append(result)
        self.ask("is", ("read", len(self.reads) - 1), 0, result)

    def ask(self, name: str, left: Term, right: Term, answer: int) -> int:
        """Note a question and return its answer."""
        self.asked[Question(name, left, right, answer)] = None
        return answer


class Read(int):
    """Integer of torch's that notes what the model's Python code asks about it."""

    questions: Questions
    term: Term

    def __hash__(self) -> int:
        return hash(self.questions.ask("is", self.term, 0, int.__index__(self) + 0))

    def __bool__(self) -> bool:
        return bool(self.questions.ask("ne", self.term, 0, int.__ne__(self, 0)))


def _made(questions: Questions, value: int, term: Term) -> Read:
    made = int.__new__(Read, value)
    made.questions, made.term = questions, term
    return made


def _plain(number: int) -> int:
    return int.__add__(number, 0)


def _term(other: Any) -> Term:
    return other.term if isinstance(other, Read) else _plain(other)


def _comparison(name: str) -> Callable[[Read, Any], Any]:
    compare = getattr(operator, name)

    def method(self: Read, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, float):
                self.questions.ask("is", self.term, 0, _plain(self))
            return getattr(int, f"__{name}__")(self, other)
        return self.questions.ask(name, self.term, _term(other), compare(_plain(self), _plain(other)))

    return method


def _arithmetic(name: str, *, swapped: bool) -> Callable[[Read, Any], Any]:
    compute = getattr(operator, name)

    def method(self: Read, other: Any) -> Any:
        if not isinstance(other, int):
            return _use(f"__{'r' * swapped}{name}__")(self, other)
        terms, values = (self.term, _term(other)), (_plain(self), _plain(other))
        if swapped:
            terms, values = terms[::-1], values[::-1]
        term = (name, *terms)
        if name in _DIVISIONS or any(each in self.questions.divided for each in terms):
            self.questions.divided[term] = None
        return _made(self.questions, compute(*values), term)

    return method


def _use(method: str) -> Callable[..., Any]:
    plain = getattr(int, method)

    def used(self: Read, *args: Any) -> Any:
        """Compute with the number itself: only the same number gives the same."""
        self.questions.ask("is", self.term, 0, _plain(self))
        others = [_plain(other) if isinstance(other, Read) else other for other in args]
        return plain(_plain(self), *others)

    return used


for _name in _COMPARISONS:
    setattr(Read, f"__{_name}__", _comparison(_name))
for _name in _ARITHMETIC:
    setattr(Read, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(Read, f"__r{_name}__", _arithmetic(_name, swapped=True))
for _name in ("truediv", "rtruediv", "pow", "rpow", "divmod", "rdivmod", "and", "rand", "or", "ror", "xor", "rxor"):
    setattr(Read, f"__{_name}__", _use(f"__{_name}__"))
for _name in ("lshift", "rlshift", "rshift", "rrshift", "invert", "abs", "float", "int", "round", "str"):
    setattr(Read, f"__{_name}__", _use(f"__{_name}__"))
Read.__neg__ = lambda self: self * -1  # type: ignore[method-assign]


def value_of(term: Term, reads: Sequence[Any]) -> Any:
    """Return a term's value where the reads give ``reads``: integers, or sizes.

    Raises:
        NotGeneral: a read's value is not known (None).
    """
    if isinstance(term, int):
        return term
    if term[0] == "read":
        found = reads[term[1]]
        if found is None:
            raise NotGeneral("the model's Python code asks about a size that follows no rule")
        return found
    return getattr(operator, term[0])(value_of(term[1], reads), value_of(term[2], reads))


def holds(question: Question, reads: Sequence[int | None]) -> bool:
    """Return whether a question has the same answer where the reads give ``reads``."""
    left, right = value_of(question.left, reads), value_of(question.right, reads)
    if question.name == "is":
        return bool(left == question.answer)
    return bool(getattr(operator, question.name)(left, right)) == bool(question.answer)


def read_whole(index: Any, shape: Sequence[int]) -> tuple[Any, list[tuple[int, Any, Any]]]:
    """Return an index without slices that take all of a dimension by a size that was read, and these slices.

    ``table[:, :n]`` is no operator of torch's where n is the table's length; at other sizes it is one.

    Returns:
        The index, and (dimension of the result, start, stop) for each slice to be taken of the result.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts):
        return index, []
    if any(part is True or part is False for part in parts):
        return index, []
    num_taken = sum(part is not None and part is not Ellipsis for part in parts)
    found: list[tuple[int, Any, Any]] = []
    dim = made = 0
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dim, made = dim + len(shape) - num_taken, made + len(shape) - num_taken
        elif part is None:
            made += 1
        elif isinstance(part, int):
            dim += 1
        else:
            begin = 0 if part.start is None else _plain(part.start) if isinstance(part.start, int) else 1
            is_read = isinstance(part.stop, Read) and part.step in (None, 1)
            if is_read and begin == 0 and dim < len(shape) and _plain(part.stop) >= shape[dim]:
                parts[number] = slice(None)
                found.append((made, 0, _plain(part.stop)))
            dim, made = dim + 1, made + 1
    return tuple(parts), found


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
