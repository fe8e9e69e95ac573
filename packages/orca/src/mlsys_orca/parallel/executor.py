"""The master's side of a group: core's executor over the channels to the ranks.

``max_in_flight`` is the number of stages (ORCA's ``n_workers``): so many iterations of disjoint requests run at a time,
each in another stage. The master samples, in :meth:`ParallelExecutor.wait`, when the last stage has given its results.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from mlsys_core.errors import ServingError
from mlsys_core.posix import new_event, raise_event, take_event

from mlsys_orca.backends.sampler import choose, needs_logits, wanted_rows
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.channels import ControlChannel, ResultsIn
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError, largest_of
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput


class IterationWatch(Protocol):
    """Listener to the begin and end of iterations, called in the engine's thread."""

    def begin(self, batch: IterationBatch) -> None:
        """Note that ``batch`` is about to be sent to the ranks."""
        ...

    def end(self, batch: IterationBatch, seconds: float) -> None:
        """Note that the result of ``batch`` is there, ``seconds`` after it was sent."""
        ...

    def fail(self, error: BaseException) -> None:
        """Note that the group is lost, or a result could not be read; what returns has the requests fail with it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterLinks:
    """Channels of a group's master. Owner: the executor."""

    down: Sequence[ControlChannel]  # to the controller of the first stage, or to every rank
    ups: Sequence[tuple[Placement, ControlChannel]]  # from every rank
    results: ResultsIn  # of the ranks of the last stage


@dataclass(slots=True)
class _Flight:
    """An iteration that the ranks have."""

    number: int
    batch: IterationBatch
    num_rows: int
    gives_logits: bool
    began_s: float
    missing: set[int] = field(default_factory=set)  # ranks of the last stage that have not told


class ParallelExecutor:
    """Runs iterations on a group of ranks: :class:`~mlsys_core.loop.protocols.Executor`.

    What :meth:`submit` takes goes to the ranks with the next :meth:`wait`: before that the loop tells its listener of
    the last iteration, whose blocks may be other requests' from then on.

    Args:
        links: The channels; the ranks behind them have greeted (:func:`greet`). None: :meth:`attach` brings them.
        max_in_flight: Iterations at a time.
        finds_largest: The ranks can say where a row's largest logit is without giving all.
        watch: Hears of iterations; None: nobody does.
        on_done: Called with each report of a rank of the last stage, for measurements; None: nothing is.
    """

    def __init__(
        self,
        links: MasterLinks | None,
        *,
        max_in_flight: int,
        finds_largest: bool = False,
        watch: IterationWatch | None = None,
        on_done: Callable[[messages.Done], None] | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.waits_for = ""  # the ranks have come
        self.num_sent_nbytes = 0  # of control messages to the first stage
        self.watch, self.on_done = watch, on_done
        self._waiting: deque[IterationBatch] = deque()
        self._flights: deque[_Flight] = deque()
        self._number = 0
        self._interrupt = new_event()
        self._poll = select.poll()
        self._poll.register(self._interrupt, select.POLLIN)
        self._is_closed = False
        self._channels: list[ControlChannel] = []  # that it closes
        if links is not None:
            self.attach(links, finds_largest=finds_largest)

    def attach(self, links: MasterLinks, *, finds_largest: bool) -> None:
        """Have the channels to the ranks, which have greeted; see the arguments of the class."""
        self._links, self._finds_largest = links, finds_largest
        self._last = {place.rank for place, _ in links.ups if place.is_last}
        self._by_fd = {channel.fileno(): (place, channel) for place, channel in links.ups}
        self._channels = [*links.down, *(channel for _, channel in links.ups)]
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def serve(self, replica: int, *, timeout_s: float | None = None) -> str:
        """Have the ranks use a replica's keys and values; return their identity when nobody else writes to them.

        An executor whose ranks say another one has other keys and values: what was computed before is not there.

        Raises:
            GroupBrokenError: a rank is gone.
            ServingError: a rank does not answer within ``timeout_s``.
        """
        self._send(messages.Serve(replica))
        identities = []
        for place, channel in self._links.ups:
            answer = _receive(place, channel, timeout_s)
            if not isinstance(answer, messages.Serving):
                raise ServingError(f"{place.name} answered {answer!r} to the choice of a replica")
            identities.append(answer.kv_identity)
        return " ".join(identities)

    def submit(self, batch: IterationBatch) -> None:
        """Take ``batch``; the next ``wait`` sends it.

        Raises:
            ServingError: the executor is closed.
        """
        if self._is_closed:
            raise ServingError("this executor is closed: make a new one")
        self._waiting.append(batch)

    def wait(self, timeout_s: float | None) -> tuple[IterationBatch, IterationOutput | BaseException] | None:
        """Return the oldest iteration with its output; None when interrupted, or after ``timeout_s``.

        Raises:
            GroupBrokenError: a rank is gone.
        """
        try:
            while self._waiting:
                self._dispatch(self._waiting.popleft())
            until_s = None if timeout_s is None else time.monotonic() + timeout_s
            while not (self._flights and not self._flights[0].missing):
                left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                if self._was_interrupted(left_s):
                    return None
                if left_s == 0 and not (self._flights and not self._flights[0].missing):
                    return None
        except (OSError, ServingError) as error:
            broken = error if isinstance(error, ServingError) else GroupBrokenError(f"the first stage is gone: {error}")
            if self.watch is not None:
                self.watch.fail(broken)
            raise broken from error
        return self._take(self._flights.popleft())

    def interrupt(self) -> None:
        """Make a ``wait`` in progress, or the next one, return soon."""
        if not self._is_closed:
            raise_event(self._interrupt)

    def close(self) -> None:
        """Close the channels: the ranks end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels:
            channel.close()
        os.close(self._interrupt)

    def _dispatch(self, batch: IterationBatch) -> None:
        wanted, gives_logits = wanted_rows(batch), needs_logits(batch)
        if self.watch is not None:
            self.watch.begin(batch)
        flight = _Flight(
            self._number,
            batch,
            len(wanted),
            gives_logits or not self._finds_largest,
            time.perf_counter(),
            set(self._last),
        )
        self._send(messages.step_of(self._number, batch, wanted=wanted, needs_logits=gives_logits))
        self._number += 1
        self._flights.append(flight)

    def _send(self, message: messages.ToRank) -> None:
        payload = messages.encode(message)
        self.num_sent_nbytes += len(payload)
        for channel in self._links.down:
            channel.send(payload)

    def _was_interrupted(self, timeout_s: float | None) -> bool:
        """Wait for something to come, and take it; return whether that was an interrupt."""
        was_interrupted = False
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3):
            if fd == self._interrupt:
                take_event(fd)
                was_interrupted = True
                continue
            place, channel = self._by_fd[fd]
            self._note(place, _receive(place, channel, None))
            while channel.is_waiting():
                self._note(place, _receive(place, channel, None))
        return was_interrupted

    def _note(self, place: Placement, message: messages.ToMaster) -> None:
        if not isinstance(message, messages.Done):
            raise ServingError(f"{place.name} said {type(message).__name__}, out of turn")
        for flight in self._flights:
            if flight.number == message.number:
                flight.missing.discard(place.rank)
        if self.on_done is not None:
            self.on_done(message)

    def _take(self, flight: _Flight) -> tuple[IterationBatch, IterationOutput | BaseException]:
        """Sample from the results of an iteration."""
        batch, results = flight.batch, self._links.results
        try:
            if flight.gives_logits:
                with torch.inference_mode():
                    output = choose(batch, results.logits(flight.number, flight.num_rows))
            else:
                peaks = results.peaks(flight.number, flight.num_rows).numpy()
                output = choose(batch, torch.empty(flight.num_rows, 0), largest=largest_of(peaks))
        except Exception as error:  # noqa: BLE001 - a request boundary: reported to the scheduler
            if self.watch is not None:
                self.watch.fail(error)
            return batch, error
        if self.watch is not None:
            self.watch.end(batch, time.perf_counter() - flight.began_s)
        return batch, output


def greet(links: MasterLinks, expected: messages.Hello, *, timeout_s: float | None) -> list[messages.Hello]:
    """Wait for all ranks and see that they run the same code and model; return what they said, in order.

    Args:
        links: The channels to them.
        expected: Its version, recipe and model are the master's own.
        timeout_s: Seconds that they may take together; None: as long as they need.

    Raises:
        GroupBrokenError: one is gone.
        ServingError: one does not come in time, or has other code or another model.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    hellos = []
    for place, channel in links.ups:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        hello = _receive(place, channel, left_s)
        if not isinstance(hello, messages.Hello):
            raise ServingError(f"{place.name} said {type(hello).__name__} before it had greeted")
        for what in ("version", "recipe", "model"):
            theirs, ours = getattr(hello, what), getattr(expected, what)
            if theirs != ours:
                raise ServingError(
                    f"{place.name} has {what} {theirs!r} and the master {ours!r}: install the same package and model "
                    "on all"
                )
        hellos.append(hello)
    return hellos


def _receive(place: Placement, channel: ControlChannel, timeout_s: float | None) -> messages.ToMaster:
    if timeout_s is not None and not channel.is_waiting():
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        if not poll.poll(timeout_s * 1e3):
            raise ServingError(f"{place.name} did not come within {timeout_s:.0f} s")
    payload = channel.receive()
    if payload is None:
        raise GroupBrokenError(f"{place.name} is gone")
    message: messages.ToMaster = messages.decode_to_master(payload)
    return message
