"""How often a process is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mlsys_serving.processes import RestartBudget


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_it_gives_up_after_so_many_deaths_within_the_window(gaps: list[float]):
    budget = RestartBudget(max_deaths=5, window_s=10.0, num_immediate=2, backoff_s=0.5)
    times: list[float] = []
    for gap in gaps:
        times.append((times[-1] if times else 0.0) + gap)
        recent = sum(time > times[-1] - 10.0 for time in times)
        expected = None if recent >= 5 else 0.0 if recent <= 2 else 0.5 * 2 ** (recent - 3)
        assert budget.delay_s(times[-1]) == expected
