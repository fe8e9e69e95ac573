"""Find out, by value, whether a program's requests may be padded to one length: an answer must equal its own run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_serving.isolation.compare import difference, magnitude, rounding, same

Array = npt.NDArray[Any]
Payload = tuple[Array, ...]  # one array for each input, without the batch dimension
Run = Callable[[Payload], Sequence[Array]]  # a request alone -> its answer

_DRAWS = 3  # requests of each pair of lengths
_SCALES = (1.0, 10.0, 0.1)  # factors of floating-point inputs


@dataclass(frozen=True, slots=True)
class Padding:
    """A way to pad requests that was tried and gave their own answers."""

    axes: tuple[tuple[int, ...], ...]  # by input: axes padded with zeros
    mask: int | None  # input that tells padding by zeros; None: no answer looks at what follows it
    cuts: tuple[tuple[int, ...], ...]  # by output: axes cut to the request's own length

    def allows(self, payload: Payload) -> bool:
        """Return whether this request may be padded: its mask is ones, then zeros, as in the trials."""
        if self.mask is None:
            return True
        mask = payload[self.mask]
        flat = mask.reshape(-1)
        num = int(np.count_nonzero(flat))
        return num > 0 and bool((flat[:num] == 1).all())

    def padded(self, payload: Payload, length: int, fills: Sequence[Array] | None = None) -> Payload:
        """Return a request padded to ``length``: with zeros, or with what ``fills``, of that length, have there."""
        found = []
        for number, (array, axes) in enumerate(zip(payload, self.axes, strict=True)):
            shape = tuple(length if axis in axes else size for axis, size in enumerate(array.shape))
            if shape == array.shape:
                found.append(array)
                continue
            wide = np.zeros(shape, array.dtype) if fills is None or number == self.mask else fills[number].copy()
            wide[tuple(slice(size) for size in array.shape)] = array
            found.append(wide)
        return tuple(found)

    def cut(self, answer: Sequence[Array], length: int) -> list[Array]:
        """Return an answer's arrays without what belongs to the padding."""
        return [
            array[tuple(slice(length) if axis in axes else slice(None) for axis in range(array.ndim))]
            for array, axes in zip(answer, self.cuts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one way to pad."""

    mask: str | None  # name of the input that told padding
    difference: float  # largest, of an answer from its own run, relative to the answer's largest number
    allowed: float  # relative difference: rounding of the program's coarsest dtype
    problem: str | None  # None: it may be used

    def describe(self) -> str:
        """Return a sentence's end about it."""
        how = "without a mask" if self.mask is None else f"with {self.mask!r} as the mask"
        if self.problem is not None:
            return f"{how}: {self.problem}"
        return (
            f"{how}: answers differ from their own run's by {self.difference:.1e} at most ({self.allowed:.1e} allowed)"
        )


class Tester:
    """Trials of one program.

    Args:
        run: Runs a request alone.
        names: Input names.
        axes: Length axes by input.
        draw: Makes arrays of a length: ordinary requests.
        lengths: To try, rising; two at least.
        tolerance: Relative difference that counts as rounding.
    """

    def __init__(
        self,
        run: Run,
        names: Sequence[str],
        axes: Sequence[Sequence[int]],
        draw: Callable[[np.random.Generator, int, float], Payload],
        lengths: Sequence[int],
        tolerance: float,
    ) -> None:
        self._run, self._names, self._draw = run, names, draw
        self._axes = tuple(map(tuple, axes))
        self._lengths, self._tolerance = lengths, tolerance
        self.trials: list[Trial] = []

    def masks(self, example: Payload) -> list[int]:
        """Return the inputs that may be masks: one dimension, the length, and not the only such input."""
        one = [number for number, axes in enumerate(self._axes) if axes == (0,) and example[number].ndim == 1]
        return one if sum(map(bool, self._axes)) > 1 else []

    def find(self, masks: Sequence[int | None]) -> Padding | None:
        """Try each mask (None: without) and return the first way that gives the requests' own answers."""
        for mask in masks:
            try:
                trial, padding = self._tried(mask)
            except Exception as error:  # noqa: BLE001 - the program does not take such requests
                trial, padding = Trial(self._name(mask), 0.0, self._tolerance, _line(error)), None
            self.trials.append(trial)
            if padding is not None:
                return padding
        return None

    def _tried(self, mask: int | None) -> tuple[Trial, Padding | None]:
        rng = np.random.default_rng(0)
        worst, seen = 0.0, []
        cuts = self._cuts(rng, mask)
        if cuts is None:
            return self._failed(mask, "an output's length is not the input's"), None
        padding = Padding(self._axes, mask, cuts)
        for own, wide in [*pairwise(self._lengths), (self._lengths[0], self._lengths[-1])]:
            for scale in _SCALES[:_DRAWS]:
                payload = self._masked(self._draw(rng, own, scale), mask, rng)
                alone = self._run(payload)
                filled = [
                    self._run(padding.padded(payload, wide, fills))
                    for fills in (None, self._draw(rng, wide, 1.0), self._draw(rng, wide, 100.0))
                ]
                first, *others = [padding.cut(each, own) for each in filled]
                seen.append(alone)
                for got, expected in zip(first, alone, strict=True):
                    by = difference(got, expected)
                    limit = self._tolerance if got.dtype.kind in "fc" else rounding(got.dtype)
                    worst = max(worst, by / max(magnitude(expected), 1e-30) if by else 0.0)
                    if by > limit * magnitude(expected):
                        return self._failed(mask, f"an answer at length {own} padded to {wide} differs", worst), None
                if not all(same(got, one) for other in others for got, one in zip(other, first, strict=True)):
                    return self._failed(mask, "what stands in the padding changes answers", worst), None
        if all(all(map(same, each, seen[0])) for each in seen[1:]):
            return self._failed(mask, "all answers were the same, which shows nothing"), None
        return Trial(self._name(mask), worst, self._tolerance, None), padding

    def _cuts(self, rng: np.random.Generator, mask: int | None) -> tuple[tuple[int, ...], ...] | None:
        """Return the axes of each output that are the length; None: one varies otherwise."""
        lengths = self._lengths[:2]
        answers = [self._run(self._masked(self._draw(rng, length, 1.0), mask, rng)) for length in lengths]
        cuts = []
        for one, other in zip(*answers, strict=True):
            if one.ndim != other.ndim:
                return None
            varying = [axis for axis in range(one.ndim) if one.shape[axis] != other.shape[axis]]
            if any((one.shape[axis], other.shape[axis]) != tuple(lengths) for axis in varying):
                return None
            cuts.append(tuple(varying))
        return tuple(cuts)

    def _masked(self, payload: Payload, mask: int | None, rng: np.random.Generator) -> Payload:
        """Return a request whose mask is ones, and in half of the draws then zeros."""
        if mask is None:
            return payload
        size = len(payload[mask])
        num = size if rng.random() < 0.5 else int(rng.integers(1, size + 1))
        ones = (np.arange(size) < num).astype(payload[mask].dtype)
        return tuple(ones if number == mask else array for number, array in enumerate(payload))

    def _failed(self, mask: int | None, problem: str, worst: float = 0.0) -> Trial:
        by = f" (by {worst:.1e}, {self._tolerance:.1e} allowed)" if worst > self._tolerance else ""
        return Trial(self._name(mask), worst, self._tolerance, problem + by)

    def _name(self, mask: int | None) -> str | None:
        return None if mask is None else self._names[mask]


def mask_number(name: str, names: Sequence[str], allowed: Sequence[int]) -> int:
    """Return the number of the input that the user named as the mask.

    Raises:
        InvalidInputError: There is none, or it cannot be one.
    """
    if name not in names or names.index(name) not in allowed:
        can = ", ".join(names[number] for number in allowed) or "none of this program"
        raise InvalidInputError(
            f"--mask {name!r}: a mask is an input of shape [requests, length] beside others of that length; {can}"
        )
    return list(names).index(name)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
