"""One program for several sizes, from programs captured at some of them.

Where the same integer differs between captures, :class:`Fitter` looks for the function of the sizes that gives all of
them: a polynomial, or what a convolution or pool makes of its input. Two captures more than a function has
coefficients must agree with it. What no function gives is :class:`~mlsys_nimble.ir.sizes.NotGeneral`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch

from mlsys_nimble.capture import Captured
from mlsys_nimble.capture.watched import Question, Questions, Term, holds, value_of
from mlsys_nimble.ir.operators import Convolution, Pool
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.ir.sizes import Atom, NotGeneral, Poly, Size, evaluate, poly_of, sizes_in, symbol

SPARE = 2  # captures beyond the number of coefficients
_UNWATCHED = "a model in TorchScript, whose branches on sizes nothing shows"


@dataclass(frozen=True, slots=True)
class General:
    """Captured program whose sizes are functions of symbols, and what must hold for it to serve a size."""

    captured: Captured
    questions: tuple[Question, ...]  # about varying reads only
    reads: tuple[int | None, ...]  # integers or sizes; None: follows no rule, and no question asks about it
    quotients: tuple[tuple[Term, int], ...] = ()  # each with what it was at the captures
    windows: tuple[tuple[Poly, Poly], ...] = ()  # likewise
    least: tuple[tuple[Poly, int], ...] = ()  # sizes of the program's values, each with its least at the captures
    serves_one: bool = True  # False: a size of 1 makes another program, as where a dimension is then dropped

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the model's Python code takes the same way at these sizes."""
        if not self.serves_one and 1 in sizes.values():
            return False
        known = _known(sizes)
        if any(evaluate(made, known) != evaluate(found, known) for made, found in self.windows):
            return False
        if any(evaluate(size, known) < min(least, 2) for size, least in self.least):
            return False  # 0 and 1 are special to torch
        reads = [read if read is None else evaluate(poly_of(read), known) for read in self.reads]
        try:
            return all(holds(question, reads) for question in self.questions) and all(
                value_of(term, reads) == evaluate(poly_of(found), known) for term, found in self.quotients
            )
        except (NotGeneral, ZeroDivisionError):  # a read without a rule; or the model's own, which it shall raise
            return False


def _known(sizes: Mapping[str, int]) -> dict[Atom, int]:
    return {Atom(name): size for name, size in sizes.items()}


def generalise(
    sizes: Sequence[Mapping[str, int]], captures: Sequence[Captured], watched: Sequence[Questions]
) -> General:
    """Make one program of captures at several sizes; the first is the hint, whose decisions it takes over.

    A capture at which the model's Python code answered a question in another way is left out.

    Raises:
        NotGeneral: the programs differ in more than sizes, or no function gives one of them.
    """
    ways = [[(q.name, q.left, q.right, q.answer) for q in w.asked if q.name != "is"] for w in watched]
    same = [n for n, way in enumerate(ways) if way == ways[0] and len(watched[n].reads) == len(watched[0].reads)]
    for name in sizes[0]:
        tried, kept = {each[name] for each in sizes}, {sizes[n][name] for n in same}
        if len(kept) < min(len(tried), 1 + SPARE):
            raise NotGeneral("the model's Python code takes another way at most sizes")
    fitter = Fitter([sizes[n] for n in same])
    captured = fitter.captured([captures[n] for n in same])
    reads = [fitter.found(vector) for vector in zip(*(watched[n].reads for n in same), strict=True)]
    asked = [question for question in watched[0].asked if _asks(question, reads)]
    quotients = []
    for term in watched[0].divided:
        found = fitter.found([value_of(term, watched[n].reads) for n in same])
        if found is not None:  # else no program holds it: it follows no rule
            quotients.append((term, found))
    known = [_known(sizes[n]) for n in same]
    varying = dict.fromkeys(size.poly for type_ in captured.program.values for size in sizes_in(type_.shape))
    least = [(poly, min(evaluate(poly, each) for each in known)) for poly in varying]
    general = General(
        captured, tuple(asked), tuple(reads), tuple(quotients), tuple(dict.fromkeys(fitter.windows)), tuple(least)
    )
    if any(general.serves(each) != (number in same) for number, each in enumerate(sizes)):
        raise NotGeneral("the model's Python code takes another way where a size is cut off")
    return general


def _asks(question: Question, reads: Sequence[int | None]) -> bool:
    """Return whether the answer to a question may depend on the sizes."""
    left, right = value_of(question.left, reads), value_of(question.right, reads)
    if question.name == "is" and isinstance(left, Size):
        raise NotGeneral("the model's Python code uses a size as more than a size")
    return isinstance(left, Size) or isinstance(right, Size)


class Fitter:
    """Search for functions of the sizes.

    Args:
        sizes: Sizes by symbol of each capture; the first are the hint's.
    """

    def __init__(self, sizes: Sequence[Mapping[str, int]]) -> None:
        self._number = len(sizes)
        self.windows: list[tuple[Poly, Poly]] = []  # window's result, and its value at the captures
        self._known: dict[tuple[int, ...], Size] = {}
        self._bases: list[tuple[int, tuple[int, ...]]] = [(1, (1,) * self._number)]
        for name in sizes[0]:
            vector = tuple(each[name] for each in sizes)
            if len(set(vector)) > 1:
                self._learn(symbol(name, vector[0]), vector)

    def _learn(self, size: Any, vector: tuple[int, ...]) -> None:
        self._known.setdefault(vector, size)
        self._bases.append((size, vector))

    def found(self, vector: Sequence[int]) -> int | None:
        """Return the number that is this at the captures: an integer or a size; None if no function gives it."""
        vector = tuple(map(_plain, vector))
        if len(set(vector)) == 1:
            return vector[0]
        if vector not in self._known:
            made = self._polynomial(vector)
            if made is None:
                return None
            self._known[vector] = made
        return self._known[vector]

    def _polynomial(self, vector: tuple[int, ...]) -> Size | None:
        one, *others = self._bases
        for degree in (1, 2):
            terms = [one]
            for count in range(1, degree + 1):
                for factors in combinations_with_replacement(others, count):
                    size: Any = 1
                    values = np.ones(self._number, np.int64)
                    for factor, at in factors:
                        size, values = size * factor, values * np.array(at)
                    terms.append((size, tuple(values.tolist())))
            if len(terms) + SPARE > self._number:
                return None
            table = np.array([values for _, values in terms], np.float64).T
            solved = np.linalg.lstsq(table / table.max(0), np.array(vector, np.float64), rcond=None)[0]
            whole = [round(float(c)) for c in solved / table.max(0)]
            made: Any = 0
            for coefficient, (size, _) in zip(whole, terms, strict=True):
                made = made + size * coefficient if coefficient else made
            at = np.array([values for _, values in terms]).T @ np.array(whole)
            if isinstance(made, Size) and tuple(at.tolist()) == vector:
                return made
        return None

    def captured(self, captures: Sequence[Captured]) -> Captured:
        """Return the program of all these captures.

        Raises:
            NotGeneral: see :func:`generalise`.
        """
        first = captures[0]
        programs = [captured.program for captured in captures]
        lengths = {(len(p.values), len(p.operators), p.inputs, p.outputs, p.mutations) for p in programs}
        if len(lengths) > 1:
            raise NotGeneral("the model does other operators at other sizes")
        if any(not c.results.is_plain for c in captures) or programs[0].mutations:
            raise NotGeneral("the model writes in place, or returns views of what it was given")
        if any(c.strides == "exact" for c in captures):
            raise NotGeneral("the model's Python code asks for strides")
        if len({(c.tensor_indices, repr(c.results.leaves), c.results.spec) for c in captures}) > 1:
            raise NotGeneral("what the model returns beside tensors depends on sizes")
        for program in programs[1:]:
            _check_constants(programs[0], program)
        values: dict[int, ValueType] = {}
        for value in (*programs[0].inputs, *programs[0].constants):
            values[value] = self._type([program.values[value] for program in programs])
        together = zip(*(program.operators for program in programs), strict=True)
        operators = [self._operator(found, programs, values) for found in together]
        types = tuple(values.get(value, type_) for value, type_ in enumerate(programs[0].values))
        program = replace(programs[0], values=types, operators=tuple(operators))
        return replace(first, program=program, reads_values=any(c.reads_values for c in captures))

    def _operator(
        self, found: Sequence[Operator], programs: Sequence[Program], values: dict[int, ValueType]
    ) -> Operator:
        first = found[0]
        if len({(operator.inputs, operator.outputs) for operator in found}) > 1:
            raise NotGeneral(f"{first.name} reads other values at other sizes")
        kind = self.merged([operator.kind for operator in found], first.source or first.name)
        for value in first.outputs:
            types = [program.values[value] for program in programs]
            if isinstance(kind, Convolution | Pool):
                self._learn_windows(kind, values, first, types)
            values[value] = self._type(types, first)
        return replace(first, kind=kind)

    def _learn_windows(
        self, kind: Any, values: Mapping[int, ValueType], operator: Operator, types: Sequence[ValueType]
    ) -> None:
        """Learn the sizes of space that windows make of an input's."""
        x = values[operator.inputs[0]].shape
        kernel = kind.kernel if isinstance(kind, Pool) else values[operator.inputs[1]].shape[2:]
        for dim, width in enumerate(kernel):
            vector = tuple(type_.shape[2 + dim] for type_ in types)
            before, after = kind.padding[dim]
            reach = x[2 + dim] + (before + after - kind.dilation[dim] * (width - 1) - 1)
            made = reach // kind.stride[dim] + 1
            found = self.found(vector)
            if found is None:
                self._learn(made, vector)
            elif isinstance(made, Size):
                self.windows.append((made.poly, poly_of(found)))

    def _type(self, types: Sequence[ValueType], operator: Operator | None = None) -> ValueType:
        if len({(type_.dtype, len(type_.shape)) for type_ in types}) > 1:
            raise NotGeneral("a tensor has another dtype or rank at other sizes")
        where = operator.source or operator.name if operator else "an input"
        return ValueType(self.merged([type_.shape for type_ in types], where), types[0].dtype)

    def merged(self, items: Sequence[Any], where: str) -> Any:
        """Return nested data whose integers are functions of the sizes.

        Raises:
            NotGeneral: it differs in more than integers, or an integer follows no rule.
        """
        first = items[0]
        if isinstance(first, int) and not isinstance(first, bool):
            found = self.found(items)
            if found is None:
                raise NotGeneral(f"{where}: {', '.join(map(str, items))} at the sizes tried follow no rule")
            return found
        if len({type(item) for item in items}) > 1:
            raise NotGeneral(f"{where}: another kind of argument at other sizes")
        if isinstance(first, tuple | list):
            if len({len(item) for item in items}) > 1:
                raise NotGeneral(f"{where}: more arguments at other sizes")
            return type(first)(self.merged(parts, where) for parts in zip(*items, strict=True))
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            fields = {f.name: [getattr(item, f.name) for item in items] for f in dataclasses.fields(first)}
            return type(first)(**{name: self.merged(parts, where) for name, parts in fields.items()})
        if any(item is not first and repr(item) != repr(first) for item in items):
            raise NotGeneral(f"{where}: {first} depends on a size")
        return first


def _plain(number: int) -> int:
    return int.__add__(number, 0)


def _check_constants(one: Program, other: Program) -> None:
    if one.constants.keys() != other.constants.keys():
        raise NotGeneral("the model holds other tensors at other sizes")
    for value, tensor in one.constants.items():
        found = other.constants[value]
        is_same = found is tensor or (found.data_ptr() == tensor.data_ptr() and found.shape == tensor.shape)
        if not is_same and not (found.shape == tensor.shape and torch.equal(found, tensor)):
            raise NotGeneral("a tensor that the model makes of Python numbers depends on a size")


def refuse_unwatched(model: Any) -> None:
    """Raise for a model whose branches on sizes cannot be watched.

    Raises:
        NotGeneral: it is, or holds, a TorchScript module.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else (model,)
    if any(isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction) for module in modules):
        raise NotGeneral(_UNWATCHED)
