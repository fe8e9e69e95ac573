"""A program in stages whose requests have several sizes: lengths of texts, heights and widths of images.

Requests run together only where each gets the answer of its own run: those of one size, and, where a trial by value has
shown that padding changes nothing, those of several lengths, padded to the longest (:mod:`.padding`). Those of sizes
beyond all that were tried run alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.queue import ServeRequest
from mlsys_dvabatch.stages.activations import Padded, to_host
from mlsys_dvabatch.stages.model import IsolationCheck
from mlsys_dvabatch.stages.slicing.padding import Padding, Tester, Trial, mask_number
from mlsys_dvabatch.stages.slicing.program import Program
from mlsys_dvabatch.stages.slicing.shapes import Sizes, Values, units_of, vocabularies
from mlsys_dvabatch.stages.slicing.sliced import THOROUGH_FLOPS, SlicedModel, several
from mlsys_serving.isolation import Draw, Kind
from torch import Tensor

_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # units of the sizes that are measured, over the example's
_FEW_SCALES = (0.5, 1.0, 2.0)  # for slow programs
_LEAST, _GREATEST = 1e-9, 16.0  # scales of the sizes that are tried beside: the least, and the greatest of them
_MOST_FLOPS = 8_000_000_000  # FLOP of a request of the greatest size
_MOST_FOLLOWED_FLOPS = 1_000_000_000  # FLOP of the request that is followed through the operators, of a large size


@dataclass(frozen=True, slots=True)
class Member:
    """A request's place: its group, its row there, and its own sizes, which padding may have enlarged."""

    group: Values  # and a number, where the request is alone
    row: int
    own: Values


@dataclass(frozen=True, slots=True)
class Grouped:
    """Requests in their order, each with a row of the group of its size. Only requests of one group run together."""

    groups: Mapping[Values, Padded]
    members: tuple[Member, ...]

    @property
    def num(self) -> int:
        """Requests."""
        return len(self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(group.nbytes for group in self.groups.values())

    def select(self, rows: Sequence[int]) -> Grouped:
        """Return the given requests, in the order given."""
        taken: dict[Values, list[int]] = {}
        members = []
        for row in rows:
            member = self.members[row]
            places = taken.setdefault(member.group, [])
            members.append(Member(member.group, len(places), member.own))
            places.append(member.row)
        return Grouped({key: self.groups[key].select(places) for key, places in taken.items()}, tuple(members))

    def join(self, others: Sequence[Grouped]) -> Grouped:
        """Return one batch of all requests; groups of one size become one."""
        parts: dict[Values, list[Padded]] = {}
        members: list[Member] = []
        for each in (self, *others):
            before = {key: sum(part.num for part in parts.get(key, [])) for key in each.groups}
            members += [Member(one.group, one.row + before[one.group], one.own) for one in each.members]
            for key, group in each.groups.items():
                parts.setdefault(key, []).append(group)
        return Grouped({key: each[0].join(each[1:]) for key, each in parts.items()}, tuple(members))

    def mapped(self, run: Callable[[Padded], Padded]) -> Grouped:
        """Return the same requests after ``run`` on each group."""
        return Grouped({key: run(group) for key, group in self.groups.items()}, self.members)


class SizedModel:
    """A sliced model for requests of several sizes; see :class:`~mlsys_dvabatch.stages.model.StageModel`.

    Payloads and results are those of :class:`~mlsys_dvabatch.stages.slicing.sliced.SlicedModel`, of any size that the
    program allows. A request's length is its units: the product of its dynamic dimensions.

    Args:
        inner: Cut at the example's sizes; its program has ``sizes``.
        mask: Name of the input that is 0 in padding, as the user gave it; None: found by trying.

    Attributes:
        inner: The sliced model of one size.
        trials: Ways to pad that were tried.
        padding: The one that is used; None: only requests of one size run together.

    Raises:
        InvalidInputError: The stages do not give what the whole program gives at another size, or the mask does not
            keep padding out of the answers.
    """

    def __init__(self, inner: SlicedModel, *, mask: str | None = None) -> None:
        assert inner.program.sizes is not None
        self.inner = inner
        self.sizes: Sizes = inner.program.sizes
        self.program: Program = inner.program
        self.cuts, self.num_stages, self.input_names = inner.cuts, inner.num_stages, inner.input_names
        self.example = inner.example
        self.may_be_missing = [np.zeros(array.shape, np.bool_) for array in inner.example]
        self._highs = vocabularies(inner.program.module)
        self._allowed = lru_cache(maxsize=4096)(self._values)
        self._samples = self._runnable()
        self._tried = [(min(axis), max(axis)) for axis in zip(*self._samples, strict=True)]
        self._serial = itertools.count()
        usual = {self.sizes.scaled(scale) for scale in _SCALES}  # to measure the others would take long
        self.lengths = tuple(sorted({units_of(values) for values in self._samples if values in usual}))
        self.trials: list[Trial] = []
        self.padding: Padding | None = self._find_padding(mask)
        self.isolation = IsolationCheck(
            "the model",
            self,
            is_short=inner.program.flops > THOROUGH_FLOPS,
            followed=(inner.program.followed[0], self._long_example()),
        )
        if hasattr(inner, "inspect"):
            self.inspect: Callable[..., Any] = self._inspect

    @property
    def tolerance(self) -> float:
        """Tolerance of the isolation check; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        return self.inner.tolerance

    def draw(self) -> Draw:
        """Draw requests of the example's sizes, and others; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        others = [values for values in self._samples if values != self.sizes.example]
        ordinary, ends = self.inner.draw(), itertools.cycle([others[0], others[-1]] if others else ())

        def draw(rng: np.random.Generator, kind: Kind) -> Any:
            if kind is Kind.OTHER_LENGTH:
                return self._drawn(rng, next(ends), 1.0) if others else None
            return ordinary(rng, kind)

        return draw

    def answers(self, payloads: Sequence[Any]) -> list[list[npt.NDArray[Any]]]:
        """Return each request's answer; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        values = self.collate([ServeRequest(str(number), each) for number, each in enumerate(payloads)], 1)
        for stage in range(self.num_stages):
            values = self.run(stage, values)
        for group in values.groups.values():
            shapes = [list(tensor.shape) for tensor in group.tensors.values()]
            num = sum(values.groups[member.group] is group for member in values.members)
            if any(not shape or shape[0] != num for shape in shapes):
                raise InvalidInputError(f"outputs {shapes} of {num} requests: each needs a row for each request")
        return [list(each) if isinstance(each, tuple) else [each] for each in self._plain(values)]

    def check(self, payload: Any) -> int:
        """Check that a request fits the program; return its units.

        Raises:
            InvalidInputError: Number, dtype, shape or values are wrong.
        """
        if not isinstance(payload, tuple) or len(payload) != len(self.example):
            raise InvalidInputError(f"a request is a tuple of {len(self.example)} arrays, got {type(payload).__name__}")
        for name, value, like in zip(self.input_names, payload, self.example, strict=True):
            if not isinstance(value, np.ndarray) or value.dtype != like.dtype:
                got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise InvalidInputError(f"input {name!r} takes {like.dtype}, got {got}")
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise InvalidInputError(f"input {name!r} holds NaN, or infinity: only finite values are taken")
        return units_of(self._allowed(tuple(array.shape for array in payload)))

    def group_of(self, payload: Any) -> Values | None:
        """Return the sizes that all requests of this one's batch must have; None: it may be padded with others."""
        own = self._allowed(tuple(array.shape for array in payload))
        return None if self._may_pad(payload, own) else own

    def collate(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> Grouped:
        """Return the requests stacked in groups: by size, and in one those that may be padded, to its longest.

        One of a size beyond those that were tried is a group of its own.
        """
        payloads = [request.payload for request in requests]
        own = [self._allowed(tuple(array.shape for array in payload)) for payload in payloads]
        may_pad = [self._may_pad(*each) for each in zip(payloads, own, strict=True)]
        longest = max((values for values, may in zip(own, may_pad, strict=True) if may), default=())
        rows: dict[Values, list[Any]] = {}
        members = []
        for payload, values, may in zip(payloads, own, may_pad, strict=True):
            key = longest if may else values if self._is_tried(values) else (*values, next(self._serial))
            if self.padding is not None and may and values != key:
                payload = self.padding.padded(payload, key[0])
            members.append(Member(key, len(rows.setdefault(key, [])), values))
            rows[key].append(payload)
        return Grouped({key: self.inner.stacked(each) for key, each in rows.items()}, tuple(members))

    def run(self, stage: int, values: Grouped) -> Grouped:
        """Run one stage, group after group."""
        return values.mapped(lambda group: self.inner.run(stage, group))

    def results(self, values: Grouped) -> list[Any]:
        """Return each request's answer, without what belongs to its padding."""
        return self._cut(values, {key: self.inner.results(group) for key, group in values.groups.items()})

    def example_of(self, units: int) -> Any:
        """Return a payload of one of :attr:`lengths`."""
        values = next(values for values in self._samples if units_of(values) == units)
        payload = self._drawn(np.random.default_rng(units), values, 1.0)
        if self.padding is not None and (mask := self.padding.mask) is not None:
            payload = tuple(np.ones_like(each) if number == mask else each for number, each in enumerate(payload))
        return payload

    def input_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each input of one request, -1 where it is dynamic."""
        return [tuple(axis if isinstance(axis, int) else -1 for axis in axes) for axes in self.sizes.axes]

    def outputs(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return dtype and shape of each output of one request, -1 where it follows from the request's sizes."""
        answers = []
        for units in self.lengths:
            (answer,) = self.results(self._through([self.example_of(units)]))
            answers.append(answer if isinstance(answer, tuple) else (answer,))
        return [
            (
                columns[0].dtype,
                tuple(
                    sizes[0] if len(set(sizes)) == 1 else -1
                    for sizes in zip(*(each.shape for each in columns), strict=True)
                ),
            )
            for columns in zip(*answers, strict=True)
        ]

    def _inspect(self, stage: int, values: Grouped) -> tuple[Mapping[int, Any], Mapping[int, int]]:
        """Return the early exits and skips of all groups, by the requests' positions."""
        inner: Any = self.inner
        found = {key: inner.inspect(stage, group) for key, group in values.groups.items()}
        exits, skips = {}, {}
        for position, member in enumerate(values.members):
            group_exits, group_skips = found[member.group]
            if member.row in group_exits:
                exits[position] = group_exits[member.row]
            elif member.row in group_skips:
                skips[position] = group_skips[member.row]
        return exits, skips

    def _may_pad(self, payload: Any, own: Values) -> bool:
        return self.padding is not None and self._is_tried(own) and self.padding.allows(payload)

    def _is_tried(self, values: Values) -> bool:
        """Return whether sizes lie within those that were tried: what lies beyond is not promised."""
        return all(least <= value <= most for value, (least, most) in zip(values, self._tried, strict=True))

    def _cut(self, values: Grouped, results: Mapping[Values, list[Any]]) -> list[Any]:
        found = []
        for member in values.members:
            answer = results[member.group][member.row]
            if self.padding is not None and member.own != member.group and any(self.padding.cuts):
                arrays = answer if isinstance(answer, tuple) else (answer,)
                cut = self.padding.cut(arrays, member.own[0])
                answer = tuple(cut) if isinstance(answer, tuple) else cut[0]
            found.append(answer)
        return found

    def _plain(self, values: Grouped) -> list[Any]:
        """Return the answers as the program gives them, whatever exits there are."""
        return self._cut(values, {key: SlicedModel.results_of(group) for key, group in values.groups.items()})

    def _through(self, payloads: Sequence[Any]) -> Grouped:
        values = self.collate([ServeRequest(str(number), each) for number, each in enumerate(payloads)], 1)
        with torch.inference_mode():
            for stage in range(self.num_stages):
                values = self.run(stage, values)
        return values

    def _values(self, shapes: tuple[tuple[int, ...], ...]) -> Values:
        """Return the sizes of a request's shapes, which the program's own guards must allow."""
        values = self.sizes.values(shapes)
        if self.program.guards is not None:
            try:
                self.program.guards(*(torch.empty((2, *shape), device="meta") for shape in shapes))
            except AssertionError as error:
                raise InvalidInputError(f"a request of shapes {list(map(list, shapes))}: {error}") from error
        return values

    def _drawn(self, rng: np.random.Generator, values: Values, scale: float) -> tuple[npt.NDArray[Any], ...]:
        """Return an ordinary request of some sizes: normal numbers, ids of the vocabulary, zeros and ones."""
        found = []
        for like, shape, high in zip(self.example, self.sizes.shapes(values), self._highs, strict=True):
            if like.dtype.kind in "fc":
                found.append((rng.standard_normal(shape) * scale).astype(like.dtype))
            else:
                found.append(rng.integers(0, high or 2, shape).astype(like.dtype))
        return tuple(found)

    def _long_example(self) -> tuple[Tensor, ...]:
        """Return inputs of one request of the greatest size tried that does not take long, in host memory."""
        each = self.program.flops / units_of(self.sizes.example)
        values = [one for one in self._samples if each * units_of(one) <= _MOST_FOLLOWED_FLOPS]
        example = self.program.followed[1]
        if not values:
            return example
        drawn = self._drawn(np.random.default_rng(0), values[-1], 1.0)
        return tuple(torch.from_numpy(array)[None].to(like.dtype) for array, like in zip(drawn, example, strict=True))

    def _runnable(self) -> list[Values]:
        """Return the sizes to try: the program runs with them, and its stages give what it gives."""
        scales = _FEW_SCALES if self.program.flops > THOROUGH_FLOPS else _SCALES
        greatest = max(min(_GREATEST, _MOST_FLOPS / max(self.program.flops, 1)), scales[-1])
        found = {self.sizes.example: None}
        for scale in (_LEAST, *scales, greatest):
            values = self.sizes.scaled(scale)
            try:
                self._allowed(tuple(self.sizes.shapes(values)))
                payloads = [self._drawn(np.random.default_rng(number), values, 1.0) for number in range(2)]
                with torch.inference_mode():
                    expected = self.program.module(*self.inner.stacked(payloads).tensors.values())
            except Exception:  # noqa: BLE001 - it does not run at such a size: nothing to measure
                continue
            got = self._staged(payloads)
            if not all(
                torch.allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
                for one, other in zip(got.tensors.values(), several(expected), strict=True)
            ):
                raise InvalidInputError(
                    f"the {self.num_stages} stages do not give what the whole model gives at sizes {list(values)}: "
                    "slice it elsewhere"
                )
            found[values] = None
        return sorted(found, key=units_of)

    def _staged(self, payloads: Sequence[Any]) -> Padded:
        values = self.inner.stacked(payloads)
        with torch.inference_mode():
            for stage in range(self.num_stages):
                values = self.inner.run(stage, values)
        return values

    def _find_padding(self, mask: str | None) -> Padding | None:
        axes = self.sizes.length_axes
        if axes is None or len(self._samples) < 2:
            if mask is not None:
                raise InvalidInputError(f"--mask {mask!r}: only programs with one dynamic dimension are padded")
            return None

        def alone(payload: Any) -> list[npt.NDArray[Any]]:
            return [to_host(each)[0] for each in self._staged([payload]).tensors.values()]

        tester = Tester(
            alone,
            self.input_names,
            axes,
            lambda rng, length, scale: self._drawn(rng, (length,), scale),
            [values[0] for values in self._samples],
            self.tolerance,
        )
        masks = [number for number in tester.masks(self.example) if self._highs[number] is None]  # ids are no mask
        named = None if mask is None else mask_number(mask, self.input_names, masks)
        found = tester.find([named] if named is not None else [None, *masks])
        self.trials = tester.trials
        if found is None and mask is not None:
            raise InvalidInputError(
                f"--mask {mask!r}: padded requests would get other answers than alone; {self.trials[0].describe()}"
            )
        return found
