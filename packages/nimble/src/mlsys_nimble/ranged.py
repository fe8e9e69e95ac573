"""Ranges of sizes that one preparation serves: what the user asks for, and the program that serves it.

``dynamic={"x": {0: (1, 512)}}`` becomes :class:`Ranges`; :func:`general_program` captures the model at some sizes of
the range and makes one program of them (``capture/general.py``).
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Generic, TypeVar

import torch
from mlsys_core.errors import InvalidInputError, KernelUnavailableError

from mlsys_nimble.backends.cpu.ranged import SizePlace
from mlsys_nimble.capture import Captured
from mlsys_nimble.capture.general import General, generalise
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import CaptureError, first_line
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.sizes import NotGeneral, Size

_LOG = logging.getLogger("mlsys_nimble")
P = TypeVar("P")
MAX_SYMBOLS = 3
MAX_SERVED = 65_536  # signatures that are remembered
STEPS = (1, 2, 4, 7)  # sizes tried, counted from the range's begin: even and odd ones
MORE_STEPS = (1, 2, 4, 7, 10, 13)  # steps tried where the ends of the range are not given
_ADVICE = (
    "Give {argument: {dimension: (least, most)}}, such as {'x': {0: (1, 512)}}; sizes that are always equal share a "
    "name: ('length', 1, 512), or torch.export.Dim('length', min=1, max=512)."
)

CaptureAt = Callable[
    [Sequence[Any], Mapping[str, Any], Questions, bool], Captured
]  # is_first: also check that it repeats


@dataclass(frozen=True, slots=True)
class VaryingDim:
    """Dimension of an argument whose size varies."""

    leaf: int  # index among the call's flattened arguments
    dim: int | None  # None: the leaf is an integer, the size itself
    symbol: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """Sizes that vary, and their bounds."""

    dims: tuple[VaryingDim, ...]
    bounds: Mapping[str, tuple[int, int]]  # (least, most) by symbol
    tries_ends: bool = True  # False: the model was captured before, with guards on sizes, and the range is open

    def sizes_of(self, leaves: Sequence[Any]) -> dict[str, int] | None:
        """Return a call's sizes by symbol; None if one is out of its range, or sizes of one symbol differ."""
        found: dict[str, int] = {}
        for each in self.dims:
            size = leaves[each.leaf] if each.dim is None else leaves[each.leaf].shape[each.dim]
            least, most = self.bounds[each.symbol]
            if not least <= size <= most or found.setdefault(each.symbol, size) != size:
                return None
        return found

    def frame_of(self, flat: trees.Flat) -> Any:
        """Return what calls must have in common: everything but the sizes that vary; None for other arguments."""
        varying: dict[int, list[int | None]] = {}
        for each in self.dims:
            varying.setdefault(each.leaf, []).append(each.dim)
        keys = []
        for index, leaf in enumerate(flat.leaves):
            dims = varying.get(index)
            if dims is None:
                keys.append(trees.key_of(leaf, lambda tensor: (tensor.shape, tensor.dtype, tensor.device)))
            elif dims == [None]:
                keys.append(int)
            elif not isinstance(leaf, torch.Tensor) or any(dim is None or dim >= leaf.dim() for dim in dims):
                return None
            else:
                shape = tuple(None if dim in dims else size for dim, size in enumerate(leaf.shape))
                keys.append((shape, leaf.dtype, leaf.device))
        return flat.spec, tuple(keys)

    def resized(self, leaves: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
        """Return arguments of other sizes: elements are repeated, or left out."""
        made = list(leaves)
        for each in self.dims:
            if each.dim is None:
                made[each.leaf] = sizes[each.symbol]
                continue
            tensor = made[each.leaf].detach()
            indices = torch.arange(sizes[each.symbol], device=tensor.device) % tensor.shape[each.dim]
            made[each.leaf] = tensor.index_select(each.dim, indices)
        return made

    def places(self, tensor_indices: Sequence[int]) -> tuple[SizePlace, ...]:
        """Return a place among a program's inputs for each symbol.

        Raises:
            NotGeneral: only an integer shows one.
        """
        found: dict[str, SizePlace] = {}
        for each in self.dims:
            if each.dim is not None and each.leaf in tensor_indices:
                found.setdefault(each.symbol, SizePlace(each.symbol, tensor_indices.index(each.leaf), each.dim))
        if found.keys() != self.bounds.keys():
            raise NotGeneral("a size that no tensor among the inputs has")
        return tuple(found[symbol] for symbol in self.bounds)


def parse_ranges(
    dynamic: Mapping[Any, Mapping[int, Any]], model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Ranges:
    """Read ``dynamic`` as :meth:`mlsys_nimble.module.Nimble.prepare` takes it.

    Raises:
        InvalidInputError: it names no tensor among the arguments, or no range that holds the example's size.
    """
    if not isinstance(dynamic, Mapping) or not all(isinstance(ranges, Mapping) for ranges in dynamic.values()):
        raise InvalidInputError(f"dynamic is {dynamic!r}. {_ADVICE}")
    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    leaves = trees.flatten((tuple(args), dict(kwargs))).leaves
    dims: list[VaryingDim] = []
    bounds: dict[str, tuple[int, int]] = {}
    for argument, ranges in dynamic.items():
        is_position = isinstance(argument, int) and argument < len(args)
        tensor = args[argument] if is_position else {**named.get("kwargs", {}), **named}.get(argument)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(f"dynamic names {argument!r}, which is no tensor among the arguments. {_ADVICE}")
        leaf = next(index for index, item in enumerate(leaves) if item is tensor)
        for dim, given in ranges.items():
            if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
                raise InvalidInputError(f"dynamic: {argument!r} has no dimension {dim!r}. {_ADVICE}")
            symbol, bound = _bound(given, f"{argument}.{dim % tensor.dim()}")
            if bounds.setdefault(symbol, bound) != bound:
                raise InvalidInputError(f"dynamic: {symbol!r} has two ranges, {bounds[symbol]} and {bound}")
            dims.append(VaryingDim(leaf, dim % tensor.dim(), symbol))
    found = Ranges(tuple(dims), bounds)
    if not 0 < len(bounds) <= MAX_SYMBOLS:
        raise InvalidInputError(
            f"dynamic has {len(bounds)} sizes that vary; there may be 1 to {MAX_SYMBOLS}. {_ADVICE}"
        )
    for leaf in {each.leaf for each in dims}:
        largest = list(leaves[leaf].shape)
        for each in dims:
            if each.leaf == leaf and each.dim is not None:
                largest[each.dim] = bounds[each.symbol][1]
        nbytes = prod(largest) * leaves[leaf].element_size()
        if nbytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            what = f"dynamic: an argument of the largest sizes, {largest}, takes {nbytes:,} bytes"
            raise InvalidInputError(f"{what}, more than this machine's memory. Give smaller ranges.")
    if found.sizes_of(leaves) is None:
        raise InvalidInputError(f"the example's sizes do not lie in {dict(bounds)}, or differ where they share a name")
    return found


def _bound(given: Any, own: str) -> tuple[str, tuple[int, int]]:
    if hasattr(given, "min") and hasattr(given, "max") and hasattr(given, "__name__"):
        given = given.__name__, given.min, given.max
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        name, least, most = given if len(given) == 3 else (own, *given)
        if isinstance(name, str) and isinstance(least, int) and isinstance(most, int) and 1 <= least <= most:
            return name, (least, most)
        if least == 0:
            raise InvalidInputError(f"dynamic has the range {given!r}: it begins at 1; size 0 is prepared by itself")
    raise InvalidInputError(f"dynamic has the range {given!r}. {_ADVICE}")


def sizes_to_try(
    bounds: Mapping[str, tuple[int, int]], hint: Mapping[str, int], *, ends: bool = True
) -> list[dict[str, int]]:
    """Return the sizes at which a model is captured, the hint first: ends of ranges, and small ones near each other.

    Example:
        >>> [each["n"] for each in sizes_to_try({"n": (1, 512)}, {"n": 16})]
        [16, 3, 4, 6, 9, 1, 512]
    """
    names = list(bounds)
    first = {name: max(hint[name], min(2, bounds[name][1])) for name in names}  # 1 is special to torch
    small = {}
    for name, (least, most) in bounds.items():
        start = max(least, 2)
        small[name] = [start + step for step in (STEPS if ends else MORE_STEPS) if start + step <= most] or [
            first[name]
        ]
        if most - least < 2 * len(STEPS):
            small[name] = list(range(max(least, min(2, most)), most + 1))
    tried = [first]
    if len(names) == 1:
        tried += [{names[0]: size} for size in small[names[0]]]
    else:  # numbers of steps that no common factor ties together
        for each in list(product(*small.values()))[:: max(1, len(names) - 1)][:16]:
            tried.append(dict(zip(names, each, strict=True)))
    for name in names if ends else ():
        tried += [{**{other: small[other][0] for other in names}, name: end} for end in bounds[name]]
    return list({tuple(each.items()): each for each in tried}.values())


def general_program(ranges: Ranges, flat: trees.Flat, capture_at: CaptureAt) -> General:
    """Capture a model at some sizes, and make one program of the captures.

    Raises:
        NotGeneral: none serves them.
        CaptureError: the model cannot be captured at the hint.
    """
    hint = ranges.sizes_of(flat.leaves)
    assert hint is not None
    captures = _Captures(ranges, flat, capture_at)
    for sizes in sizes_to_try(ranges.bounds, hint, ends=ranges.tries_ends):
        captures.add(sizes)
    try:
        return captures.general()
    except NotGeneral:
        if not any(1 in sizes.values() for sizes in captures.tried):
            raise
    captures.drop_ones()
    for name, (least, most) in ranges.bounds.items():  # the least that is left: where a slice takes all there is
        if least == 1 < most:
            captures.add({**captures.tried[1 % len(captures.tried)], name: 2})
    return replace(captures.general(), serves_one=False)


class _Captures:
    """Captures of one model at some sizes."""

    def __init__(self, ranges: Ranges, flat: trees.Flat, capture_at: CaptureAt) -> None:
        self._ranges, self._flat, self._capture_at = ranges, flat, capture_at
        self.tried: list[dict[str, int]] = []
        self._captured: list[Captured] = []
        self._watched: list[Questions] = []

    def add(self, sizes: dict[str, int]) -> None:
        """Capture at these sizes; the first ones are the hint."""
        if sizes in self.tried:
            return
        is_first = not self._captured
        args, kwargs = trees.unflatten(self._ranges.resized(self._flat.leaves, sizes), self._flat.spec)
        questions = Questions()
        try:
            self._captured.append(self._capture_at(args, kwargs, questions, is_first))
        except CaptureError:
            if is_first:
                raise
            raise NotGeneral(f"at {sizes} it cannot be captured") from None
        except Exception as error:
            if is_first:
                raise
            raise NotGeneral(f"at {sizes} the model raises {type(error).__name__}: {first_line(error)}") from None
        self.tried.append(sizes)
        self._watched.append(questions)

    def drop_ones(self) -> None:
        """Leave out captures at which a size is 1."""
        larger = [number for number, sizes in enumerate(self.tried) if 1 not in sizes.values()]
        self.tried = [self.tried[number] for number in larger]
        self._captured = [self._captured[number] for number in larger]
        self._watched = [self._watched[number] for number in larger]

    def general(self) -> General:
        """Return one program of all captures; raise NotGeneral if there is none."""
        return _following(self._ranges, generalise(self.tried, self._captured, self._watched))


def _following(ranges: Ranges, found: General) -> General:
    """Return a program for many sizes, whose inputs vary as the ranges say; else raise NotGeneral."""
    program, indices = found.captured.program, found.captured.tensor_indices
    for each in ranges.dims:
        least, most = ranges.bounds[each.symbol]
        if each.dim is None or each.leaf not in indices or least == most:
            continue
        if not isinstance(program.values[program.inputs[indices.index(each.leaf)]].shape[each.dim], Size):
            raise NotGeneral(f"its program has one size of {each.symbol!r} alone")
    return found


@dataclass(frozen=True, slots=True)
class Ranged:
    """Places from which an executor reads the sizes of a program for many sizes."""

    places: tuple[SizePlace, ...]
    largest: tuple[int, ...]  # by place: largest size


class RangedCalls(Generic[P]):
    """Calls of one model that preparations for many sizes serve.

    Args:
        ranges: Sizes that vary.
        capture_at: Capture the model; see :data:`CaptureAt`.
        make: Make what serves the program.
    """

    def __init__(self, ranges: Ranges, capture_at: CaptureAt, make: Callable[[Captured, Ranged], P]) -> None:
        self._ranges, self._capture_at, self._make = ranges, capture_at, make
        self._families: dict[Any, tuple[General, P] | None] = {}  # None: each size is prepared on its own
        self._served: dict[Any, P] = {}
        self.reason = ""  # why the last family could not be made

    @property
    def all(self) -> list[P]:
        """Return all preparations."""
        return [family[1] for family in self._families.values() if family is not None]

    def clear(self) -> None:
        """Forget all preparations."""
        self._families.clear()
        self._served.clear()

    def known(self, signature: Any) -> P | None:
        """Return what has served a call of this signature."""
        return self._served.get(signature)

    def find(self, signature: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> P | None:
        """Return what serves a call, made first if need be; None if its sizes must be prepared on their own."""
        flat = trees.flatten((tuple(args), dict(kwargs)))
        frame = self._ranges.frame_of(flat)
        sizes = None if frame is None else self._ranges.sizes_of(flat.leaves)
        if sizes is None:
            return None
        if frame not in self._families:
            self._families[frame] = self._family(flat)
        family = self._families[frame]
        if family is None or not family[0].serves(sizes):
            return None
        if len(self._served) > MAX_SERVED:
            self._served.clear()
        self._served[signature] = family[1]
        return family[1]

    def _family(self, flat: trees.Flat) -> tuple[General, P] | None:
        try:
            general = general_program(self._ranges, flat, self._capture_at)
            places = self._ranges.places(general.captured.tensor_indices)
            ends = 1 if self._ranges.tries_ends else 0
            largest = tuple(self._ranges.bounds[place.symbol][ends] for place in places)
            return general, self._make(general.captured, Ranged(places, largest))
        except NotGeneral as error:
            self.reason = str(error)
            _LOG.warning("each size is prepared on its own: %s", error)
            return None
        except KernelUnavailableError:
            self.reason = "there are no native kernels"
            return None
