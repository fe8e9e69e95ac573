"""Isolation: models that mix requests are found out, however little; those that do not are let through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_serving.isolation import (
    Kind,
    batch_sizes,
    draw_like,
    is_finite,
    require_isolated,
    rounding,
    run_in_halves,
)
from mlsys_serving.isolation.compare import difference, magnitude, same

WIDTH = 6
Array = np.ndarray[Any, Any]
Step = Callable[[Array], Array]  # [rows, WIDTH] -> [rows, WIDTH]


def linear(seed: int) -> Step:
    weights = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return lambda x: x @ weights


def softmax(x: Array, axis: int) -> Array:
    exps = np.exp(x - x.max(axis, keepdims=True))
    return exps / exps.sum(axis, keepdims=True)


BY_ROW: dict[str, Step] = {
    "linear": linear(1),
    "another": linear(2),
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "softmax": lambda x: softmax(x, 1),
    "centred": lambda x: x - x.mean(1, keepdims=True),
    "sorted": lambda x: np.sort(x, axis=1),
    "shifted": lambda x: x + np.float32(3),
    "normed": lambda x: x / (1 + np.abs(x).max(1, keepdims=True)),
}


def quantised(x: Array) -> Array:
    """One scale for the whole batch, as dynamically quantised layers have: it mixes little."""
    scale = np.float32(np.abs(x).max() / 127 + 1e-9)
    return np.round(x / scale) * scale


MIXING: dict[str, Step] = {
    "mean": lambda x: x - x.mean(0),
    "a billionth": lambda x: x + np.float32(1e-9) * x.sum(0),
    "softmax over requests": lambda x: softmax(x, 0),
    "running sum": lambda x: np.cumsum(x, axis=0),
    "the next request": lambda x: np.roll(x, 1, axis=0),
    "the one after it": lambda x: x + np.roll(x, 2, axis=0) * np.float32(0.01 if len(x) > 2 else 0),
    "largest of all": lambda x: np.minimum(x, x.max() * np.float32(0.5)),
    "ranks": lambda x: np.argsort(np.argsort(x, axis=0), axis=0).astype(np.float32),
    "position in the batch": lambda x: x + np.arange(len(x), dtype=np.float32)[:, None],
    "size of the batch": lambda x: x / np.float32(len(x)),
    "NaN spills": lambda x: x + np.float32(0) * x.sum(0),
    "large ones only": lambda x: np.where(np.abs(x).max() > 500, x.mean(0) + 0 * x, x),
    "small ones only": lambda x: x.mean(0) + 0 * x if len(x) > 1 and np.abs(x[1:]).max() < 0.1 else x,
    "negative ones only": lambda x: np.where((x < 0).all(1).any(), x * np.float32(1.5), x),
    "a scale for all": quantised,
}


def program(steps: list[Step]) -> Callable[[list[Any]], list[tuple[Array]]]:
    def run(batch: list[Any]) -> list[tuple[Array]]:
        x = np.stack([row for (row,) in batch])
        for step in steps:
            x = np.asarray(step(x), np.float32)
        return [(row,) for row in x]

    return run


def example(seed: int = 0) -> list[Array]:
    return [np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)]


@settings(max_examples=60)
@given(steps=st.lists(st.sampled_from(sorted(BY_ROW)), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_models_that_keep_requests_apart_are_let_through(steps: list[str], seed: int):
    require_isolated("it", program([BY_ROW[name] for name in steps]), draw_like(example(seed)))


@pytest.mark.parametrize("name", sorted(MIXING))
def test_each_way_of_mixing_is_found(name: str):
    with pytest.raises(InvalidInputError, match="it mixes requests: an answer differed by"):
        require_isolated("it", program([MIXING[name]]), draw_like(example()))


INVERTIBLE = ["linear", "another", "shifted"]  # what was mixed before is still to be seen


@settings(max_examples=60)
@given(
    before=st.lists(st.sampled_from(INVERTIBLE), max_size=2),
    mixing=st.sampled_from(
        ["mean", "softmax over requests", "running sum", "the next request", "position in the batch"]
    ),
    after=st.lists(st.sampled_from(INVERTIBLE), max_size=3),
    seed=st.integers(0, 99),
)
def test_mixing_anywhere_in_a_model_is_found(before: list[str], mixing: str, after: list[str], seed: int):
    steps = [*(BY_ROW[name] for name in before), MIXING[mixing], *(BY_ROW[name] for name in after)]
    with pytest.raises(InvalidInputError, match="mixes requests"):
        require_isolated("it", program(steps), draw_like(example(seed)))


@pytest.mark.parametrize("least", [3, 6, 18, 33, 64, 100])
def test_mixing_above_a_batch_size_is_found(least: int):
    run = program([lambda x: x - x.mean(0) if len(x) >= least else x])
    require_isolated("it", run, draw_like(example()), largest=least - 1)
    with pytest.raises(InvalidInputError, match="mixes requests"):
        require_isolated("it", run, draw_like(example()), largest=max(64, least))


def test_rounding_between_batch_sizes_is_allowed_and_more_is_not():
    def run(batch: list[Any], by: float) -> list[tuple[Array]]:
        return [(row * np.float32(1 + by * (len(batch) > 1)),) for (row,) in batch]

    require_isolated("it", lambda batch: run(batch, 1e-5), draw_like(example()))
    with pytest.raises(InvalidInputError, match="between the request alone and as number"):
        require_isolated("it", lambda batch: run(batch, 1e-3), draw_like(example()))
    require_isolated("it", lambda batch: run(batch, 1e-3), draw_like(example()), tolerance=1e-2)


def test_noise_of_kernels_is_no_mixing():
    """A kernel that sums in another order each time is within rounding; the exchange alone proves nothing there."""
    noise = np.random.default_rng(5)

    def run(batch: list[Any]) -> list[tuple[Array]]:
        return [(row * np.float32(1 + 1e-6 * noise.random()),) for (row,) in batch]

    require_isolated("it", run, draw_like(example()))


def test_models_that_remember_or_guess_are_found():
    last = [np.zeros(WIDTH, np.float32)]

    def remembers(batch: list[Any]) -> list[tuple[Array]]:
        answers = [(row + last[0],) for (row,) in batch]
        last[0] = batch[-1][0]
        return answers

    random = np.random.default_rng(1)
    for run in (remembers, lambda batch: [(row * (random.random(WIDTH) > 0.5),) for (row,) in batch]):
        with pytest.raises(InvalidInputError, match="when it is asked again"):
            require_isolated("it", run, draw_like(example()), largest=1)


def test_a_model_that_batches_change_for_good_is_found():
    """Alone it answers as before until it has seen many batches: what it is asked at the end shows it."""
    num_batches = 0

    def worn(batch: list[Any]) -> list[tuple[Array]]:
        nonlocal num_batches
        num_batches += len(batch) > 1
        return [(row + (num_batches > 9 and len(batch) == 1),) for (row,) in batch]

    with pytest.raises(InvalidInputError, match="when it is asked again"):
        require_isolated("it", worn, draw_like(example()))


def test_a_model_that_takes_no_batches_is_refused():
    def fails_at(num: int) -> Callable[[list[Any]], Any]:
        def run(batch: list[Any]) -> Any:
            if len(batch) == num:
                raise ValueError("no such batch\nand more lines")
            return batch

        return run

    for num, says in ((1, "it does not run with 1 request: no such batch$"), (8, "does not run with 8 requests that")):
        with pytest.raises(InvalidInputError, match=says):
            require_isolated("it", fails_at(num), draw_like(example()))
    with pytest.raises(InvalidInputError, match="1 answers to 2 requests"):
        require_isolated("it", lambda batch: batch[:1], draw_like(example()))
    with pytest.raises(InvalidInputError, match="no other request than its example"):
        require_isolated("it", lambda batch: batch, lambda rng, kind: None if kind is not Kind.ORDINARY else once())


def once(given: list[int] = []) -> Any:  # noqa: B006 - it is to be kept
    given.append(1)
    return (np.ones(1),) if len(given) == 1 else None


def test_requests_that_a_model_refuses_alone_are_not_held_against_it():
    def run(batch: list[Any]) -> Any:
        if any(not np.isfinite(row).all() or np.abs(row).max() > 100 for (row,) in batch):
            raise ValueError("out of range")
        return batch

    require_isolated("it", run, draw_like(example()))


def test_integers_are_exchanged_too():
    words = [np.array([3, 4, 4], np.int64)]
    require_isolated("it", lambda batch: [(row * 2,) for (row,) in batch], draw_like(words))
    with pytest.raises(InvalidInputError, match="mixes requests"):
        require_isolated("it", lambda batch: [(batch[0][0],) for _ in batch], draw_like(words, [9]))


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4"]),
    depth=st.floats(0, 0.9),
    is_low=st.booleans(),
    shows=st.booleans(),
    has_floats=st.booleans(),
)
def test_integers_mix_anywhere_in_the_range_of_their_dtype(
    dtype: str, depth: float, is_low: bool, shows: bool, has_floats: bool
):
    """A bound is passed only by requests far from an example of zeros, and only then the others change."""
    kind = np.dtype(dtype)
    is_low = is_low and kind.kind == "i"
    bound = int(np.iinfo(kind).max ** depth) * (-1 if is_low else 1)  # from 1 to the dtype's end, evenly by digits
    least = np.minimum if is_low else np.maximum

    def run(batch: list[Any]) -> list[tuple[Array]]:
        whole = np.stack([row[0] for row in batch]).astype(np.float64)
        reach = (whole.min if is_low else whole.max)(axis=1 if shows else None, keepdims=True)
        beside = np.stack([row[1] for row in batch]) if has_floats else 0
        return [(row,) for row in whole / least(reach, bound) + beside]

    requests = [np.zeros(4, kind), *([np.ones(4, np.float32)] if has_floats else [])]
    if shows:
        require_isolated("it", run, draw_like(requests))
    else:
        with pytest.raises(InvalidInputError, match="it mixes requests"):
            require_isolated("it", run, draw_like(requests))


def test_integers_stay_within_what_is_known_of_them():
    """Within a vocabulary, and where one outside of a table ends the process among those of the example."""
    rng, words = np.random.default_rng(0), [np.array([3, 4], np.int64)]
    for draw, known in ((draw_like(words, [50]), range(50)), (draw_like(words, is_wide=False), {0, 1, 3, 4})):
        drawn = [request for kind in Kind for _ in range(9) if (request := draw(rng, kind)) is not None]
        assert {int(value) for (row,) in drawn for value in row} <= {*known}
        if len(known) == 50:
            assert {0, 49} <= {int(value) for (row,) in drawn for value in row}


def test_the_sizes_and_kinds_that_are_tried():
    assert [batch_sizes(n) for n in (1, 2, 4, 64, 65)] == [
        [],
        [2],
        [2, 3, 4],
        [2, 3, 5, 8, 17, 32, 64],
        [2, 3, 5, 8, 17, 32, 64, 65],
    ]
    assert rounding(np.float64) < rounding(np.float32) < rounding(np.float16) == pytest.approx(0.03125)
    rng, draw = np.random.default_rng(0), draw_like([np.ones(3, np.float16), np.zeros(2, np.int32)], [None, 7])
    assert draw(rng, Kind.ORDINARY)[0].tolist() == [1, 1, 1]  # the example first
    drawn = {kind: draw(rng, kind) for kind in Kind}
    assert drawn[Kind.OTHER_LENGTH] is None
    for kind, request in drawn.items():
        if request is not None:
            floats, ints = request
            assert floats.dtype == np.float16
            assert ints.dtype == np.int32
            assert (ints >= 0).all()
            assert (ints < 7).all()
            assert np.isfinite(floats).all() == (kind not in (Kind.INFINITE, Kind.NAN, Kind.VERY_LARGE)), kind


@settings(max_examples=80)
@given(size=st.integers(1, 64), data=st.data())
def test_halves_find_those_at_fault(size: int, data: st.DataObject):
    poisoned = data.draw(st.sets(st.integers(0, size - 1), max_size=4))
    num_runs = 0

    def run(positions: Any) -> list[int]:
        nonlocal num_runs
        num_runs += 1
        if poisoned.intersection(positions):
            raise ValueError("poisoned")
        return list(positions)

    parts, failed = run_in_halves(run, size)
    assert failed.keys() == poisoned
    assert [position for _, part in parts for position in part] == [n for n in range(size) if n not in poisoned]
    assert all(list(positions) == part for positions, part in parts)
    assert num_runs <= 1 + 2 * len(poisoned) * math.ceil(math.log2(max(size, 2)))


def test_answers_that_are_not_finite_are_told_from_others():
    good, bad = np.ones(2), np.array([1.0, np.nan])
    answers = [good, bad, (good, bad), {"a": bad}, {"a": good}, "text", np.float32("inf"), np.int64(1)]
    assert [is_finite(answer) for answer in answers] == [True, False, False, False, True, True, False, True]
    assert is_finite(np.array(["a"]))


DTYPES = [*(np.dtype(name) for name in ("f2", "f4", "f8", "c8", "i1", "u8", "i8", "?")), np.dtype("U3")]
VALUES = [0, 1, -0.0, -1, 3, 0.5, 300, math.inf, -math.inf, math.nan]


def as_kept(number: float, dtype: np.dtype[Any]) -> complex:
    if dtype.kind == "c":
        return complex(number, 2 * number)
    return 1 if dtype.kind in "iu" and not math.isfinite(number) else number


def arrays(data: st.DataObject) -> list[Array]:
    """Return two arrays of any dtypes and short shapes, which often hold the same numbers."""
    one = data.draw(st.sampled_from(DTYPES))
    other = data.draw(st.sampled_from(DTYPES)) if data.draw(st.integers(0, 3)) == 0 else one
    numbers = data.draw(st.lists(st.sampled_from(VALUES), max_size=3))
    changed = list(numbers)
    if numbers and data.draw(st.booleans()):
        changed[-1] = data.draw(st.sampled_from(VALUES))
    with np.errstate(all="ignore"):
        return [
            np.array([as_kept(number, dtype) for number in values]).astype(dtype)
            for dtype, values in ((one, numbers), (other, changed))
        ]


@settings(max_examples=300)
@given(st.data())
def test_two_arrays_are_compared_number_by_number(data: st.DataObject):
    """NaN and infinities equal themselves; what is of another dtype, or no number, is the same or infinitely far."""
    left, right = arrays(data)
    pairs = list(zip(left.tolist(), right.tolist(), strict=True))
    apart = [each for each in pairs if each[0] != each[1] and not (each[0] != each[0] and each[1] != each[1])]
    assert same(left, right) == same(right, left) == (left.dtype == right.dtype and not apart)
    if left.dtype != right.dtype or (apart and left.dtype.kind not in "fciu"):
        expected = math.inf
    else:
        far = [abs(complex(one) - complex(other)) for one, other in apart]
        expected = max([0.0, *(each if math.isfinite(each) else math.inf for each in far)])
    assert difference(left, right) == pytest.approx(expected, rel=1e-12)
    finite = [abs(each) for each in left.tolist() if left.dtype.kind in "fciu" and math.isfinite(abs(each))]
    assert magnitude(left) == pytest.approx(max([0.0, *finite]), rel=1e-12)
    is_whole = left.dtype.kind not in "fc" or len(finite) == len(left)
    assert is_finite({"x": left}) == is_finite((left, right[:0])) == is_whole
    if left.dtype.kind in "fci":
        assert is_finite(torch.from_numpy(left)) == is_whole
