"""Graph memory that schedules share, and the order of replays that makes sharing safe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mlsys_nimble.backends.cuda.driver import Driver, Handle


class Pool:
    """Memory of schedules that never run at once: a replay begins when the pool's previous one is over.

    Results are copied out of it, so it is as large as the largest schedule, not as their sum.
    """

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle = driver.new_pool()
        self._driver = driver
        self._lock = threading.Lock()
        self._event = driver.new_event()
        self._stream: Handle = None  # of the last replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Order the caller's stream after the previous turn's stream within the context.

        That is all work put on it until now: what follows a replay may read results that this turn overwrites.
        """
        with self._lock:
            stream, last = self._driver.current_stream(), self._stream
            self._stream = stream
            if last is not None and last != stream:
                self._driver.record(self._event, last)
                self._driver.wait(self._event, stream)
            yield


_SHARED: dict[torch.device, Pool] = {}


def shared_pool(driver: Driver) -> Pool:
    """Return the pool of the driver's device."""
    if driver.device not in _SHARED:
        _SHARED[driver.device] = Pool(driver)
    return _SHARED[driver.device]
