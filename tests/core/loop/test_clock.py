import math

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import VirtualClock, WallClock


def test_wall_clock_does_not_run_backwards() -> None:
    clock = WallClock()
    times_s = [clock.now() for _ in range(100)]
    assert times_s == sorted(times_s)
    assert times_s[-1] < times_s[0] + 60


def test_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(start_s=3.0)
    assert clock.now() == clock.now() == 3.0
    clock.advance_to(3.0)
    clock.advance_to(4.5)
    assert clock.now() == 4.5


@pytest.mark.parametrize("time_s", [2.9, -math.inf, math.nan])
def test_virtual_clock_refuses_to_run_backwards(time_s: float) -> None:
    clock = VirtualClock(start_s=3.0)
    with pytest.raises(InvalidInputError, match="never runs backwards"):
        clock.advance_to(time_s)
    assert clock.now() == 3.0
