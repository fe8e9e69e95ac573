from __future__ import annotations

from collections.abc import Callable

import pytest


class FakeClock:
    """Nanoseconds that pass only by a call."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def advance(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def new_clock() -> Callable[[], FakeClock]:
    return FakeClock
