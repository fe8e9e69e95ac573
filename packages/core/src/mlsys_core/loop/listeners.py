"""Listeners: a collector for scripts and tests, and the guard that the loop puts before any listener."""

from __future__ import annotations

import logging
from typing import Any, Generic

from mlsys_core.loop.protocols import BatchIn, Finished, Listener, OutputIn

_logger = logging.getLogger(__name__)


class Collector(Generic[BatchIn, OutputIn]):
    """Keeps every finished request: for tests and scripts; a server would grow without bound.

    Example:
        >>> from mlsys_core.loop.protocols import FinishReason
        >>> collector = Collector()
        >>> collector.on_finished(Finished("a", FinishReason.DONE, 7), now=0.5)
        >>> collector.finished["a"].result, collector.finished_s["a"]
        (7, 0.5)
    """

    def __init__(self) -> None:
        self.finished: dict[str, Finished[Any]] = {}  # by request id, in order of leaving
        self.finished_s: dict[str, float] = {}  # when, seconds of the loop's clock
        self.num_outputs = 0  # batches that gave an output

    def on_output(self, batch: BatchIn, output: OutputIn, now: float) -> None:
        """Count the output."""
        self.num_outputs += 1

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Keep the finished request and its time."""
        self.finished[finished.request_id] = finished
        self.finished_s[finished.request_id] = now


class Guarded(Generic[BatchIn, OutputIn]):
    """Passes everything on to a listener, if there is one; the listener's exceptions are logged and go no further."""

    def __init__(self, listener: Listener[BatchIn, OutputIn] | None) -> None:
        self._listener = listener

    def on_output(self, batch: BatchIn, output: OutputIn, now: float) -> None:
        """Pass the output on."""
        if self._listener is not None:
            try:
                self._listener.on_output(batch, output, now)
            except Exception:
                _logger.exception("the listener raised in on_output; the loop goes on")

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Pass the finished request on."""
        if self._listener is not None:
            try:
                self._listener.on_finished(finished, now)
            except Exception:
                _logger.exception("the listener raised in on_finished of %r; the loop goes on", finished.request_id)
