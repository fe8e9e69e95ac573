import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.memory import plan_offsets_for_conflicts


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
