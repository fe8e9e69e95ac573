"""Check by value that a model keeps requests apart: an answer depends on its request alone, not on its batch.

Called when a model is loaded, before it serves anybody. Three comparisons are made, and none trusts the model's own
description:

- **Exchange.** Two batches of one size differ in some rows only. The other rows run through the same kernels at the
  same positions, so their answers must be equal to the last bit: however little a model mixes, this shows it.
- **Company.** A row of a batch against the same request alone. Kernels for other sizes sum in another order, so answers
  may differ by rounding: by :func:`rounding` of their dtype, relative to the answer's largest number.
- **Time.** A request alone, asked again at the end: this shows a model that remembers or draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_serving.isolation.compare import Array, Arrays, Draw, Kind, difference, equal, magnitude, rounding

Run = Callable[[list[Any]], Sequence[Arrays]]  # requests of one batch -> the arrays of each one's answer
_DRAWS = 3  # ordinary requests, and others of other lengths; of each other kind one
_SMALL_SIZES = (2, 3, 5)  # with neighbours of each kind in turn
_LARGE_SIZES = (8, 17, 32, 64)  # with neighbours of all kinds; doubled up to the largest batch
_SHORT_SIZES = (2, 3)  # for models that take long, and the largest
_SHARES = (0.5, 1.0)  # of a batch that is exchanged; at least one request stays, and one goes
_NEIGHBOURS = [*(kind for kind in Kind if kind is not Kind.ORDINARY), Kind.ORDINARY]
_OVERFLOWING = {Kind.HUGE, Kind.INFINITE, Kind.NAN, Kind.EXTREME_INTEGER}  # have no answers to compare
_USUAL = set(Kind) - _OVERFLOWING
# A sine of a large number makes of rounding what it likes.
_STEEP = {kind for kind in Kind if "LARGE" in kind.name or kind is Kind.NEGATIVE_INTEGER} | _OVERFLOWING

ADVICE = (
    "One client's answer would depend on others'; export the model in evaluation mode, without operations over its "
    "first dimension, or serve one request at a time"
)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A request that the model takes, and its answer alone."""

    kind: Kind
    request: Any
    alone: Arrays


def batch_sizes(largest: int, *, is_short: bool = False) -> list[int]:
    """Return the batch sizes to try, rising, the largest included.

    Example:
        >>> batch_sizes(20), batch_sizes(200)
        ([2, 3, 5, 8, 17, 20], [2, 3, 5, 8, 17, 32, 64, 128, 200])
        >>> batch_sizes(200, is_short=True)
        [2, 3, 200]
    """
    sizes = [*(_SHORT_SIZES if is_short else (*_SMALL_SIZES, *_LARGE_SIZES))]
    while sizes[-1] * 2 < largest and not is_short:
        sizes.append(sizes[-1] * 2)
    return [*(size for size in sizes if size < largest), *([largest] if largest > 1 else [])]


def require_isolated(
    name: str,
    run: Run,
    draw: Draw,
    *,
    largest: int = 64,
    num_inner: int = 0,
    is_short: bool = False,
    is_exact: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
) -> None:
    """Refuse a model whose answer to a request depends on anything but the request.

    Args:
        name: Subject of the error's sentence, like ``"model 'a'"``.
        run: Runs requests as one batch; an exception means that it takes no such batch.
        draw: Makes requests, like :func:`~mlsys_serving.isolation.draw_like`. The first must be acceptable.
        largest: Largest batch that will be served; 1 checks only that answers are not random and nothing is remembered.
        num_inner: Leading arrays of each answer that no client sees: only exchanges must leave them unchanged.
        is_short: Compute some 200 requests instead of 700, for models that take long: fewer batch sizes and neighbours.
        is_exact: Exchanges must not change a bit; False: by no more than rounding, where shapes within follow from the
            values of all requests, as with experts.
        tolerance: Relative difference between batch sizes that counts as rounding; None: :func:`rounding` of the dtype.
        seed: Of the requests.

    Raises:
        InvalidInputError: It mixes requests, remembers them, answers at random, or takes no batches.

    Example:
        >>> from mlsys_serving.isolation import draw_like
        >>> draw = draw_like([np.ones(4, np.float32)])
        >>> require_isolated("a sum", lambda batch: [(x.sum(keepdims=True),) for (x,) in batch], draw)
        >>> def centred(batch):
        ...     return [(x - np.mean([other for (other,) in batch], axis=0),) for (x,) in batch]
        >>> require_isolated("a centred row", centred, draw)
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: a centred row mixes requests: ...
    """
    check = _Check(run, np.random.default_rng(seed), tolerance, num_inner, is_short, is_exact)
    problem = check.problem(draw, batch_sizes(largest, is_short=is_short))
    if problem is not None:
        raise InvalidInputError(f"{name} {problem}")


class _Check:
    """One run of the check; a fault is returned as the end of a sentence."""

    def __init__(
        self,
        run: Run,
        rng: np.random.Generator,
        tolerance: float | None,
        num_inner: int,
        is_short: bool,
        is_exact: bool,
    ) -> None:
        self._run = run
        self._rng = rng
        self._tolerance = tolerance
        self._num_inner = num_inner
        self._is_short = is_short
        self._is_exact = is_exact
        self._probes: list[_Probe] = []
        self._typical: list[float] = []  # by array of an answer: the median of ordinary answers' largest numbers

    def problem(self, draw: Draw, sizes: Sequence[int]) -> str | None:
        """Return the first fault found, or None."""
        return self._collect(draw) or self._in_batches(sizes) or self._again()

    def _collect(self, draw: Draw) -> str | None:
        """Draw requests and keep those that the model takes alone."""
        for kind in [Kind.ORDINARY, Kind.OTHER_LENGTH] * _DRAWS + _NEIGHBOURS:
            request = draw(self._rng, kind)
            if request is None:
                continue
            try:
                alone = self._answers([request])[0]
            except Exception as error:  # noqa: BLE001 - of unlikely requests; the first must run
                if not self._probes:
                    return f"does not run with 1 request: {_line(error)}"
                continue
            self._probes.append(_Probe(kind, request, alone))
        if len(self._probes) < 2:
            return "takes no other request than its example, so nothing shows that it keeps requests apart"
        ordinary = [probe.alone for probe in self._probes if probe.kind is Kind.ORDINARY]
        outer = range(self._num_inner, len(ordinary[0]))
        self._typical = [float(np.median([magnitude(answer[number]) for answer in ordinary])) for number in outer]
        return self._again()

    def _again(self) -> str | None:
        """Ask the first requests alone once more."""
        for probe in self._probes[:_DRAWS]:
            if (by := self._distance(self._answers([probe.request])[0], probe.alone)) is not None:
                return (
                    f"answers the same request differently when it is asked again (by {by:.2g}): it draws random "
                    "numbers or remembers earlier requests; export it in evaluation mode, without state"
                )
        return None

    def _in_batches(self, sizes: Sequence[int]) -> str | None:
        kinds = [kind for kind in _NEIGHBOURS if self._of({kind})]
        for size in sizes:
            each = size == 2 or (size <= _SMALL_SIZES[-1] and not self._is_short)
            groups = [{kind} for kind in kinds] if each else [set(kinds)]
            for group in groups:
                if (problem := self._batch(size, group)) is not None:
                    return problem
        return None

    def _batch(self, size: int, kinds: set[Kind]) -> str | None:
        """Compare a batch with its requests alone, and with itself after exchanging half, then all but one, of them."""
        first = [self._any({Kind.ORDINARY} if self._rng.random() < 0.7 else _USUAL) for _ in range(size)]
        try:
            before = self._answers([probe.request for probe in first])
            for position, (probe, answer) in enumerate(zip(first, before, strict=True)):
                if probe.kind not in _STEEP and (by := self._distance(answer, probe.alone)) is not None:
                    return _mixes(by, f"between the request alone and as number {position + 1} of a batch of {size}")
            for share in _SHARES[:1] if self._is_short or size == 2 else _SHARES:
                exchanged = self._rng.random(size) < share
                exchanged[self._rng.permutation(size)[:2]] = [True, False]  # one at least of each
                by = self._exchange(first, before, exchanged.tolist(), kinds)
                if by is not None:
                    others = " or ".join(sorted(kind.name.lower().replace("_", " ") for kind in kinds))
                    return _mixes(by, f"when others of its batch of {size} were exchanged ({others} ones)")
        except Exception as error:  # noqa: BLE001 - each of them runs alone
            return f"does not run with {size} requests that it takes one by one: {_line(error)}"
        return None

    def _exchange(
        self, first: list[_Probe], before: list[list[Array]], exchanged: list[bool], kinds: set[Kind]
    ) -> float | None:
        """Return the change of an unchanged request's answer when the requests ``exchanged`` are others."""
        second = [self._any(kinds) if is_other else probe for probe, is_other in zip(first, exchanged, strict=True)]
        after = self._answers([probe.request for probe in second])
        for position, is_other in enumerate(exchanged):
            if not is_other and not equal(before[position], after[position]):
                by = self._influence(first, second, position)
                if by is not None:
                    return by
        return None

    def _influence(self, first: list[_Probe], second: list[_Probe], position: int) -> float | None:
        """Return the difference that the exchange makes, if it exceeds the noise of the kernels.

        Where padding follows the longest request, other neighbours mean other shapes, so rounding is tolerated.
        """
        runs = [
            [self._answers([probe.request for probe in batch])[position] for batch in (first, second)] for _ in range(3)
        ]
        (before, after), *more = runs
        is_steady = all(equal(before, other[0]) and equal(after, other[1]) for other in more)
        if self._is_exact and is_steady and _forms(first) == _forms(second):
            return None if equal(before, after) else max(map(difference, before, after))
        return self._distance(after, before)

    def _of(self, kinds: set[Kind]) -> list[_Probe]:
        return [probe for probe in self._probes if probe.kind in kinds]

    def _any(self, kinds: set[Kind]) -> _Probe:
        probes = self._of(kinds)
        return probes[int(self._rng.integers(len(probes)))]

    def _answers(self, requests: list[Any]) -> list[list[Array]]:
        """Run one batch; answers are copied, as some executors use their outputs again."""
        with np.errstate(all="ignore"):
            answers = [[np.array(array) for array in answer] for answer in self._run(requests)]
        if len(answers) != len(requests):
            raise InvalidInputError(f"{len(answers)} answers to {len(requests)} requests: outputs need a row for each")
        return answers

    def _distance(self, answer: Arrays, alone: Arrays) -> float | None:
        """Return the difference of ``answer`` from the one alone, if it exceeds rounding."""
        if len(answer) != len(alone):
            return float("inf")
        pairs = [*zip(answer, alone, strict=True)][self._num_inner :]
        for (own, other), typical in zip(pairs, self._typical or [0.0] * len(pairs), strict=True):
            relative = rounding(own.dtype) if self._tolerance is None or own.dtype.kind not in "fc" else self._tolerance
            by = difference(own, other)
            if by > relative * max(magnitude(other), typical):
                return by
        return None


def _mixes(by: float, when: str) -> str:
    return f"mixes requests: an answer differed by {by:.2g} {when}. {ADVICE}"


def _forms(batch: list[_Probe]) -> list[Any]:
    """Return the shapes of each request's arrays."""
    return [
        [np.shape(array) for array in probe.request] if isinstance(probe.request, tuple) else np.shape(probe.request)
        for probe in batch
    ]


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
