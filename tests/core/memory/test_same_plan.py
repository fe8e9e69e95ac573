"""The same input gives the same plan, on every machine and in every version that does not mean to change it.

Plans are compared by peak and by a checksum of their offsets. After a change that is meant to give other plans, no
peak here may be higher than before.
"""

import random
import zlib

import pytest
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.memory import BlockPool, Lifetime, plan_offsets, plan_offsets_for_conflicts
from mlsys_core.memory.plan import MemoryPlan, format_nbytes

PLANNED = [
    (8, 1, 10, (8896, 8896, 176328914)),
    (20, 2, 8, (51776, 51776, 3235273933)),
    (40, 3, 20, (37120, 37120, 305908908)),
    (60, 4, 15, (55488, 55488, 166103952)),
    (90, 5, 12, (102208, 102208, 3094491000)),
    (150, 6, 40, (43776, 43328, 1784182729)),
    (300, 7, 30, (112896, 112896, 3032526756)),
    (500, 9, 25, (226560, 226368, 875428523)),
    (33, 10, 5, (63040, 63040, 4126279054)),
    (1200, 8, 400, (71296, 70656, 1656094378)),
]
CONFLICTING = [
    (6, 1, 0.5, (9408, 9408, 1689825278)),
    (12, 2, 0.5, (15552, 15552, 70112339)),
    (25, 3, 0.3, (12800, 12800, 3104627562)),
    (40, 4, 0.5, (27456, 22208, 3293357835)),
    (60, 5, 0.2, (20480, 13376, 4201750083)),
    (90, 6, 0.4, (46144, 25216, 4056454657)),
    (120, 7, 0.1, (20864, 13248, 125149361)),
    (200, 8, 0.05, (20224, 14272, 3854967940)),
    (33, 9, 0.9, (57664, 57408, 2182737170)),
    (260, 10, 0.3, (77696, 22976, 2484774449)),
]


def checked(plan: MemoryPlan) -> tuple[int, int, int]:
    return plan.peak_nbytes, plan.lower_bound_nbytes, zlib.crc32(repr(plan.offsets).encode())


def lifetimes(num: int, *, seed: int, span: int) -> list[Lifetime]:
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        start = rng.randrange(span)
        found.append(
            Lifetime(rng.choice([64, 100, 512, 4096, rng.randrange(10_000)]), start, start + rng.randint(1, 9))
        )
    return found


def conflicts(num: int, *, seed: int, share: float) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    bits = [0] * num
    for i in range(num):
        for j in range(i):
            if rng.random() < share:
                bits[i] |= 1 << j
                bits[j] |= 1 << i
    return [rng.randrange(5_000) for _ in range(num)], bits


@pytest.mark.parametrize(("num", "seed", "span", "expected"), PLANNED)
def test_of_lifetimes(num: int, seed: int, span: int, expected: tuple[int, int, int]) -> None:
    assert checked(plan_offsets(lifetimes(num, seed=seed, span=span))) == expected


@pytest.mark.parametrize(("num", "seed", "share", "expected"), CONFLICTING)
def test_of_conflicts(num: int, seed: int, share: float, expected: tuple[int, int, int]) -> None:
    assert checked(plan_offsets_for_conflicts(*conflicts(num, seed=seed, share=share))) == expected


def test_sizes_for_people() -> None:
    sizes = [0, 1023, 1024, 1 << 20, 3 << 29, 1 << 40, 5 << 50]
    said = ["0 B", "1023 B", "1 KiB", "1 MiB", "1.5 GiB", "1 TiB", "5120 TiB"]
    assert [format_nbytes(size) for size in sizes] == said


def test_errors_name_what_was_given() -> None:
    with pytest.raises(InvalidInputError, match=r"^nbytes\[1\] is 'a': give an integer"):
        plan_offsets_for_conflicts([1, "a"], [0, 0])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match=r"^conflicts\[0\] is 1.5: give an integer"):
        plan_offsets_for_conflicts([1], [1.5])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match=r"^alignment is '64': give an integer"):
        plan_offsets([], alignment="64")  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="looked up"):
        BlockPool(2).ref_count(2)  # type: ignore[arg-type]
