from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.memory import Lifetime, plan_offsets, plan_offsets_for_conflicts
from mlsys_core.memory.placement import place

# Nine tensors, never more than four units alive at once, that no placement fits into four units.
GAP = [(2, 5, 8), (1, 4, 6), (1, 1, 5), (1, 2, 6), (2, 6, 7), (1, 3, 5), (1, 1, 4), (2, 0, 2), (2, 0, 1)]


def test_end_is_exclusive_and_start_inclusive() -> None:
    touching = plan_offsets([Lifetime(64, 0, 2), Lifetime(64, 2, 4)])
    overlapping = plan_offsets([Lifetime(64, 0, 3), Lifetime(64, 2, 4)])
    assert touching.peak_nbytes == 64
    assert overlapping.peak_nbytes == 128


def test_empty_input_gives_an_empty_plan() -> None:
    plan = plan_offsets([])
    assert plan.offsets == ()
    assert (plan.peak_nbytes, plan.lower_bound_nbytes, plan.naive_nbytes, plan.ratio) == (0, 0, 0, 1.0)
    assert str(plan).startswith("0 tensors in 0 B")


def test_zero_byte_tensors_take_no_room() -> None:
    plan = plan_offsets([Lifetime(0, 0, 9), Lifetime(64, 0, 9), Lifetime(0, 3, 4)])
    assert plan.offsets == (0, 0, 0)
    assert plan.peak_nbytes == 64
    assert plan_offsets([Lifetime(0, 0, 1)]).peak_nbytes == 0


def test_best_fit_takes_the_smallest_gap_and_first_fit_the_lowest() -> None:
    sizes = np.array([3, 1, 1, 1, 1])
    alone = np.zeros((5, 5), bool)
    alone[4] = [False, True, True, True, False]  # the last item meets 1, 2, 3, which leave gaps of 3 and 1 units

    def at(*offsets: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        return np.array([1, 2, 3]), np.array(offsets)

    first = place([4], sizes, alone.__getitem__, fixed=at(3, 5, 6))
    best = place([4], sizes, alone.__getitem__, best_fit=True, fixed=at(3, 5, 6))
    assert first is not None
    assert best is not None
    assert (first[4], best[4]) == (0, 4)


def test_steps_may_be_any_integers() -> None:
    near = [(96, 0, 2), (64, 1, 3), (128, 2, 5)]
    far = [Lifetime(w, s * 10**30 - 10**40, e * 10**30 - 10**40) for w, s, e in near]
    assert plan_offsets(far) == plan_offsets([Lifetime(*args) for args in near])


def test_numpy_integers_are_taken_and_become_ints() -> None:
    plan = plan_offsets([Lifetime(*np.array([64, 0, 1]))])
    assert type(plan.nbytes[0]) is int


def test_a_plan_prints_what_it_saves() -> None:
    plan = plan_offsets([Lifetime(1024, k, k + 1) for k in range(4)])
    assert str(plan) == (
        "4 tensors in 1 KiB (1.000x the lower bound of 1 KiB, 75.0% less than 4 KiB without reuse), aligned to 64 B"
    )


def test_the_optimum_itself_can_be_a_quarter_above_the_lower_bound() -> None:
    assert not fits_within(GAP, 4)
    plan = plan_offsets([Lifetime(*args) for args in GAP], alignment=1)
    assert (plan.lower_bound_nbytes, plan.peak_nbytes) == (4, 5)


def fits_within(lifetimes: list[tuple[int, int, int]], capacity: int) -> bool:
    """Return whether any placement fits, by trying every offset of every tensor."""

    def place_from(k: int, offsets: list[int]) -> bool:
        if k == len(lifetimes):
            return True
        size, start, end = lifetimes[k]
        for offset in range(capacity - size + 1):
            clear = all(
                not (start < other_end and other_start < end and offset < o + other_size and o < offset + size)
                for (other_size, other_start, other_end), o in zip(lifetimes, offsets, strict=False)
            )
            if clear and place_from(k + 1, [*offsets, offset]):
                return True
        return False

    return place_from(0, [])


@pytest.mark.parametrize(("start", "end"), [(1, 1), (2, 1)])
def test_an_empty_lifetime_is_refused(start: int, end: int) -> None:
    with pytest.raises(InvalidInputError, match="end is exclusive"):
        Lifetime(64, start, end)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nbytes is -1"):
        Lifetime(-1, 0, 1)
    with pytest.raises(InvalidInputError, match=r"nbytes\[1\] is -1"):
        plan_offsets_for_conflicts([1, -1], [0, 0])


@pytest.mark.parametrize("field", ["nbytes", "start", "end"])
def test_a_fraction_is_refused(field: str) -> None:
    values = {"nbytes": 64, "start": 0, "end": 2} | {field: 1.5}
    with pytest.raises(InvalidInputError, match=rf"Lifetime.{field} is 1.5"):
        Lifetime(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("alignment", [0, -64, 3, 48, 64.0])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    for lifetimes in ([Lifetime(64, 0, 1)], []):
        with pytest.raises(InvalidInputError, match="alignment"):
            plan_offsets(lifetimes, alignment)


def test_sizes_that_overflow_are_refused_before_planning() -> None:
    with pytest.raises(InvalidInputError, match=r"2\*\*63 - 1"):
        plan_offsets([Lifetime(2**62, 0, 1), Lifetime(2**62, 1, 2)])


def test_tensors_that_never_meet_share_one_place() -> None:
    plan = plan_offsets_for_conflicts([128, 64, 128], [0, 0, 0])
    assert plan.offsets == (0, 0, 0)
    assert plan.peak_nbytes == plan.lower_bound_nbytes == 128


def test_a_cycle_of_conflicts_that_no_intervals_describe() -> None:
    # Four tensors in a ring: each meets its two neighbours. No set of intervals overlaps like this.
    ring = [0b1010, 0b0101, 0b1010, 0b0101]
    plan = plan_offsets_for_conflicts([64] * 4, ring)
    assert plan.peak_nbytes == plan.lower_bound_nbytes == 128
    assert plan.offsets[0] == plan.offsets[2] != plan.offsets[1] == plan.offsets[3]


def test_all_meeting_all_leaves_nothing_to_share() -> None:
    plan = plan_offsets_for_conflicts([64] * 5, [0b11111] * 5)  # the own bit is set too, and does not matter
    assert sorted(plan.offsets) == [0, 64, 128, 192, 256]
    assert plan.ratio == 1.0


def test_zero_byte_tensors_take_no_room_whatever_they_meet() -> None:
    plan = plan_offsets_for_conflicts([0, 64, 0, 64], [0b1111] * 4)
    assert plan.offsets[0] == plan.offsets[2] == 0
    assert {plan.offsets[1], plan.offsets[3]} == {0, 64}
    assert plan_offsets_for_conflicts([], []).peak_nbytes == 0


@pytest.mark.parametrize(
    ("nbytes", "conflicts", "message"),
    [
        ([64, 64], [0], "one bitset per tensor"),
        ([64, 64], [0b100, 0], "not there"),
        ([64, 64], [-1, 0], "not there"),
        ([64, 64], [0b10, 0], "not symmetric at tensor 0"),
        ([64, 64], [0b10, 1.0], r"conflicts\[1\] is 1.0"),
    ],
)
def test_malformed_conflicts_are_refused(nbytes: list[int], conflicts: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        plan_offsets_for_conflicts(nbytes, conflicts)


def test_asymmetry_is_found_beyond_the_first_block_of_rows() -> None:
    n = 1500
    conflicts = [0] * n
    conflicts[3] = 1 << 1400
    with pytest.raises(InvalidInputError, match="not symmetric at tensor 1400"):
        plan_offsets_for_conflicts([64] * n, conflicts)
    conflicts[1400] = 1 << 3
    assert plan_offsets_for_conflicts([64] * n, conflicts).peak_nbytes == 128
