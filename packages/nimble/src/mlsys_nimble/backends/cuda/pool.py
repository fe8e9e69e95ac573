"""Graph memory that schedules share, and the order of replays that makes sharing safe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mlsys_nimble.backends.cuda.driver import Driver, Handle


class Pool:
    """Memory of schedules that never run at once: a replay begins when the pool's previous one is over.

    Results are not in it (see :class:`~mlsys_nimble.backends.cuda.captured.Recorder`), so it is as large as the largest
    schedule's temporaries, not as their sum.
    """

    def __init__(self, driver: Driver) -> None:
        self.handle: Handle = driver.new_pool()
        self._driver = driver
        self._lock = threading.Lock()
        self._event = driver.new_event()
        self._stream: Handle = None  # of the last replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Order the caller's stream after the previous turn, whatever stream that was on, within the context."""
        with self._lock:
            stream = self._driver.current_stream()
            if self._stream is not None and self._stream != stream:
                self._driver.wait(self._event, stream)
            yield
            self._driver.record(self._event, stream)
            self._stream = stream


_SHARED: dict[torch.device, Pool] = {}


def shared_pool(driver: Driver) -> Pool:
    """Return the pool of the driver's device."""
    if driver.device not in _SHARED:
        _SHARED[driver.device] = Pool(driver)
    return _SHARED[driver.device]
