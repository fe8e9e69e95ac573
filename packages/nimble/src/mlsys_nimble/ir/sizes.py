"""Sizes as functions of the sizes that vary between calls: integers that remember how they were computed.

A :class:`Size` is an ``int``, its value at the *hint* (the example's sizes), with a polynomial over atoms: named
symbols, floors of quotients, addresses. Passes, layout and lowering compute with it as with any integer, and what they
compute is right for every size because of two rules:

- Two sizes are equal only if they are equal always. What differs at the hint, or somewhere, takes the general path.
- An order (``<``) is that of the hint. It may decide between two ways that are both right, never whether one is.

What a polynomial cannot express raises :class:`NotGeneral`. :func:`split` finds what depends on sizes alone. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from mlsys_nimble.ir.program import Operator, Program, ValueId

Monomial: TypeAlias = tuple["Atom", ...]  # factors, sorted; () is 1
Poly: TypeAlias = tuple[tuple[Monomial, int], ...]  # terms, sorted; coefficients are not 0


class NotGeneral(Exception):  # noqa: N818 - a decision, not a fault: the sizes are prepared one by one
    """Raised where one program cannot serve several sizes; the message says why. Never leaves a preparation."""


@dataclass(frozen=True, slots=True, order=True)
class Atom:
    """Number that is known when the sizes are: a symbol, the address of a value's memory, or a floor."""

    name: str  # a floor has its text for a name, which makes it unique
    dividend: Poly = ()  # floors only
    divisor: int = 0

    def value(self, known: dict[Atom, int]) -> int:
        """Return the atom's value; floors are computed from ``known`` and added to it."""
        if self not in known:
            if not self.divisor:
                raise NotGeneral(f"{self.name} is not known")
            known[self] = evaluate(self.dividend, known) // self.divisor
        return known[self]


def evaluate(poly: Poly, known: dict[Atom, int]) -> int:
    """Return a polynomial's value.

    Example:
        >>> n = symbol("n", 3)
        >>> evaluate((n * n + 1).poly, {Atom("n"): 5})
        26
    """
    total = 0
    for monomial, coefficient in poly:
        for atom in monomial:
            coefficient *= atom.value(known)
        total += coefficient
    return total


class Size(int):
    """Integer that is a polynomial over atoms; see the module's docstring.

    Example:
        >>> n = symbol("n", 4)
        >>> (n * 6) // 2 == 3 * n, n == 4, (n * 6) % 3
        (True, False, 0)
    """

    poly: Poly

    def __add__(self, other: int) -> int:
        return _sum(self, other, 1)

    def __sub__(self, other: int) -> int:
        return _sum(self, other, -1)

    def __rsub__(self, other: int) -> int:
        return self * -1 + other

    def __neg__(self) -> int:
        return self * -1

    def __mul__(self, other: int) -> int:
        if not isinstance(other, int):
            return NotImplemented
        terms: dict[Monomial, int] = {}
        for one, a in self.poly:
            for two, b in poly_of(other):
                key = tuple(sorted((*one, *two)))
                terms[key] = terms.get(key, 0) + a * b
        return _made(terms, int.__mul__(self, other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        exact = _divided(self.poly, poly_of(other))
        if exact is not None:
            return _made(dict(exact), int.__floordiv__(self, other))
        if isinstance(other, Size) or other <= 0:
            raise NotGeneral(f"a size divided by {other}, which may leave a rest")
        return floor_of(self.poly, other, int.__floordiv__(self, other))

    def __mod__(self, other: int) -> int:
        if _divided(self.poly, poly_of(other)) is not None:
            return 0
        return self - self // other * other if not isinstance(other, Size) else symbol("rest", 1)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.poly == other.poly

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return True  # not 0 always

    def __abs__(self) -> int:
        return self

    def _lost(self, *_: Any) -> Any:
        raise NotGeneral("a computation with a size that no polynomial expresses")

    __rfloordiv__ = __rmod__ = __rdivmod__ = __pow__ = __rpow__ = __and__ = __or__ = __xor__ = _lost
    __rand__ = __ror__ = __rxor__ = __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = __invert__ = _lost
    __truediv__ = __rtruediv__ = __float__ = __int__ = __round__ = _lost


def symbol(name: str, hint: int) -> Size:
    """Return the size ``name``, whose value at the hint is ``hint``."""
    return _size(((Atom(name),), 1), hint)


def floor_of(dividend: Poly, divisor: int, value: int) -> Size:
    """Return the floor of a quotient; ``value`` is its value at the hint."""
    text = " + ".join(f"{c}*{'*'.join(a.name for a in m)}" for m, c in dividend)
    return _size(((Atom(f"({text})//{divisor}", dividend, divisor),), 1), value)


def poly_of(number: int) -> Poly:
    """Return an integer's polynomial."""
    if isinstance(number, Size):
        return number.poly
    return (((), number),) if number else ()


def sizes_in(tree: Any) -> Iterable[Size]:
    """Yield the sizes in nested tuples and lists."""
    if isinstance(tree, Size):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from sizes_in(part)


def is_varying(tree: Any) -> bool:
    """Return whether nested tuples and lists hold a size."""
    return any(True for _ in sizes_in(tree))


def _size(term: tuple[Monomial, int], value: int) -> Size:
    made = int.__new__(Size, value)
    made.poly = (term,)
    return made


def _made(terms: Mapping[Monomial, int], value: int) -> int:
    poly = tuple(sorted((monomial, c) for monomial, c in terms.items() if c))
    if not poly or (len(poly) == 1 and poly[0][0] == ()):
        return poly[0][1] if poly else 0
    made = int.__new__(Size, value)
    made.poly = poly
    return made


def _sum(one: Size, other: int, sign: int) -> int:
    if not isinstance(other, int):
        return NotImplemented
    terms = dict(one.poly)
    for monomial, coefficient in poly_of(other):
        terms[monomial] = terms.get(monomial, 0) + sign * coefficient
    return _made(terms, int.__add__(one, sign * int.__add__(other, 0)))


def _degree(monomial: Monomial) -> tuple[int, Monomial]:
    """Return a key that orders monomials so that multiplying two by a third keeps their order."""
    return len(monomial), monomial


def _divided(dividend: Poly, divisor: Poly) -> Poly | None:
    """Return the exact quotient of two polynomials; None if there is none with whole coefficients."""
    if not divisor:
        raise ZeroDivisionError("division of a size by 0")
    lead, by = max(divisor, key=lambda term: _degree(term[0]))
    rest, found = dict(dividend), dict[Monomial, int]()
    while rest:
        monomial = max(rest, key=_degree)
        factors = list(monomial)
        for atom in lead:
            if atom not in factors:
                return None
            factors.remove(atom)
        if rest[monomial] % by:
            return None
        quotient = tuple(factors), rest[monomial] // by
        found[quotient[0]] = quotient[1]
        for other, coefficient in divisor:
            key = tuple(sorted((*other, *quotient[0])))
            left = rest.get(key, 0) - coefficient * quotient[1]
            rest[key] = left
            if not left:
                del rest[key]
    return tuple(sorted(found.items()))


class Sheet:
    """Many polynomials, evaluated at once.

    Example:
        >>> n = symbol("n", 4)
        >>> Sheet([(n * n).poly, (n + 7).poly]).values({Atom("n"): 3}).tolist()
        [9, 10]
    """

    def __init__(self, polys: Sequence[Poly]) -> None:
        numbers: dict[Monomial, int] = {}
        indices: list[int] = []
        coefficients: list[int] = []
        starts: list[int] = []
        for poly in polys:
            starts.append(len(indices))
            for monomial, coefficient in poly or (((), 0),):
                indices.append(numbers.setdefault(monomial, len(numbers)))
                coefficients.append(coefficient)
        self._monomials = list(numbers)
        self._indices = np.array(indices, np.intp)
        self._coefficients = np.array(coefficients, np.int64)
        self._starts = np.array(starts, np.intp)

    def values(self, known: dict[Atom, int]) -> npt.NDArray[np.int64]:
        """Return the value of each."""
        if not len(self._starts):
            return np.zeros(0, np.int64)
        found = np.empty(len(self._monomials), np.int64)
        for number, monomial in enumerate(self._monomials):
            product = 1
            for atom in monomial:
                value = known.get(atom)
                product *= atom.value(known) if value is None else value
            found[number] = product
        return np.add.reduceat(self._coefficients * found[self._indices], self._starts)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """A program without what its sizes alone decide (masks, positions), which becomes inputs at its end."""

    main: Program
    tables: Program  # no inputs; its outputs are those inputs


def has_sizes(tree: Any) -> bool:
    """Return whether nested data holds a size."""
    if isinstance(tree, tuple | list):
        return any(map(has_sizes, tree))
    if dataclasses.is_dataclass(tree):
        return any(has_sizes(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return isinstance(tree, Size)


def at_sizes(tree: Any, value: Callable[[Size], int]) -> Any:
    """Return nested data in which ``value`` replaces every size."""
    if isinstance(tree, Size):
        return value(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(at_sizes(part, value) for part in tree) if has_sizes(tree) else tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and has_sizes(tree):
        made = {f.name: at_sizes(getattr(tree, f.name), value) for f in dataclasses.fields(tree)}
        return type(tree)(**made)
    return tree


def split(program: Program, is_random: Callable[[Any], bool]) -> Split:
    """Separate what depends on sizes and constants alone.

    Raises:
        NotGeneral: a result of the program does.
    """
    fixed = set(program.constants) - {old for old, _ in program.mutations}
    touched: set[ValueId] = set()
    tables: list[Operator] = []
    main: list[Operator] = []
    for operator in program.operators:
        if not fixed.issuperset(operator.inputs) or is_random(operator.kind):
            main.append(operator)
            continue
        fixed.update(operator.outputs)
        types = [program.values[value] for value in operator.outputs]
        if has_sizes(operator.kind) or has_sizes(types) or not touched.isdisjoint(operator.inputs):
            touched.update(operator.outputs)
            tables.append(operator)
        else:
            main.append(operator)
            tables.append(operator)  # both may read it
    wanted = {value for operator in main for value in operator.inputs if value in touched}
    if not touched.isdisjoint(program.kept()):
        raise NotGeneral("a result depends on sizes alone")
    given = tuple(sorted(wanted))
    made = _needed(replace(program, operators=tuple(tables), inputs=(), outputs=given, mutations=()))
    return Split(replace(program, operators=tuple(main), inputs=(*program.inputs, *given)), made)


def _needed(program: Program) -> Program:
    """Return the program without operators that its outputs do not need."""
    needed, kept = set(program.outputs), list[Operator]()
    for operator in reversed(program.operators):
        if not needed.isdisjoint(operator.outputs):
            needed.update(operator.inputs)
            kept.append(operator)
    constants = {value: tensor for value, tensor in program.constants.items() if value in needed}
    return replace(program, operators=tuple(reversed(kept)), constants=constants)


class AtSizes(Sequence[T]):
    """Items of a sequence at given sizes, each computed when asked for."""

    def __init__(self, items: Sequence[T], value: Callable[[Size], int]) -> None:
        self._items, self._value = items, value
        self._found: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._found:
            self._found[index] = at_sizes(self._items[index], self._value)
        return self._found[index]
