"""A master's group over rank actors: :class:`~mlsys_orca.parallel.ranks.RankGroup`, a Ray driver.

Control goes by actor calls, one for each rank and message: their answers come back as those of a channel, so the
executor is the one of all groups. Results come by the group's tensors.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mlsys_core.posix import new_event, raise_event, take_event
from mlsys_orca.parallel.executor import IterationWatch, MasterLinks, ParallelExecutor, greet
from mlsys_orca.parallel.messages import Done, Hello
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_serving.processes import Death
from mlsys_serving.processes.children import EXIT_UNHANDLED

from mlsys_ray import messages
from mlsys_ray.ends import DistributedResultsIn
from mlsys_ray.tensors import MEET_S, TensorGroup, open_store

_log = logging.getLogger(__name__)
BESIDE = "beside"  # calls of an actor that do not wait for its steps
_LEAVE_S = 10.0  # for all ranks to leave the group before
_LOOK_S = 0.2  # between two looks for actors that do not answer


def connect(settings: messages.Settings) -> Any:
    """Connect this process to the cluster; return the package. Ray's handler of SIGTERM is not kept."""
    ray: Any = importlib.import_module("ray")
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=settings.address, namespace=settings.run, log_to_driver=False, logging_level=logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    return ray


class ActorChannel:
    """Calls of one actor as a channel: :class:`~mlsys_orca.parallel.channels.ControlChannel`.

    Args:
        call: Sends a message; returns Ray's reference to the answers.
        lost: Called once, in a thread of Ray's, with the error of a call, or None if the rank has left.
    """

    def __init__(self, call: Callable[[bytes], Any], lost: Callable[[BaseException | None], None]) -> None:
        self._call, self._lost = call, lost
        self._answers: deque[bytes | None] = deque()  # None: the last one
        self._event = new_event(counts=True)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._is_closed = False
        self._lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        self._call(payload).future().add_done_callback(self._on_answer)

    def push(self, answer: bytes | None) -> None:
        """Have an answer received. Any thread may call it."""
        with self._lock:
            if not self._is_closed:
                self._answers.append(answer)
                raise_event(self._event)

    def receive(self) -> bytes | None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        self._poll.poll()
        take_event(self._event)
        answer = self._answers.popleft()
        if answer is None:
            self.push(None)  # the end stays
        return answer

    def is_waiting(self) -> bool:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        return bool(self._answers)

    def fileno(self) -> int:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        return self._event

    def close(self) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ControlChannel`."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._event)

    def _on_answer(self, future: Any) -> None:
        error = future.exception()
        answer = None if error is not None else future.result()
        if answer is None:
            self._lost(error)
        if answer != b"":
            self.push(answer)


class RayGroup:
    """Ranks of one master; they come when it is told its replica. See :class:`~mlsys_orca.parallel.ranks.RankGroup`.

    Args:
        settings: The cluster and the server's run.
        expected: Greeting of a rank with the master's code and model.
        shape: Sizes.
    """

    def __init__(self, settings: messages.Settings, expected: Hello, shape: GroupShape) -> None:
        self.shape = shape
        self._settings, self._expected = settings, expected
        self._ray = connect(settings)
        self._has_ended = threading.Event()
        self._death: Death | None = None

    def executor(
        self, *, watch: IterationWatch | None = None, on_done: Callable[[Done], None] | None = None
    ) -> RayExecutor:
        """Return the executor over the ranks; once."""
        return RayExecutor(self, watch=watch, on_done=on_done)

    def form(self, replica: int, executor: ParallelExecutor) -> tuple[MasterLinks, bool]:
        """Have the ranks of a replica meet this master and each other.

        Args:
            replica: The replica.
            executor: Where it is said what is waited for.

        Returns:
            The master's channels, and whether the ranks can find the largest logits.

        Raises:
            GroupBrokenError: a rank is lost meanwhile.
            ServingError: a rank has other code or another model.
        """
        try:
            return self._form(replica, executor)
        except GroupBrokenError:
            self._has_ended.set()
            raise

    def _form(self, replica: int, executor: ParallelExecutor) -> tuple[MasterLinks, bool]:
        ray, places, size = self._ray, self.shape.places, 1 + len(self.shape.places)
        name = os.urandom(8).hex()
        found = self._find(replica, name, executor)
        store = open_store(self._settings.host, size, is_master=True)
        joining = messages.Joining(
            group=name,
            shape=self.shape,
            store=(self._settings.host, store.port),
            nodes=tuple(node for _, node in found),
        )
        joins = [actor.join.remote(messages.encode(joining)) for actor, _ in found]
        tensors = TensorGroup(store, 0, size, address=self._settings.host)
        try:
            greetings = ray.get(joins, timeout=MEET_S)
        except ray.exceptions.RayError as error:
            raise GroupBrokenError(f"a rank does not meet the others: {first_line(error)}") from error
        channels = []
        for (actor, _), greeting in zip(found, greetings, strict=True):
            channel = ActorChannel(partial(actor.follow.remote, name), self._lose)
            channel.push(greeting)
            channels.append(channel)
        last = 1 + (self.shape.pipeline_parallel - 1) * self.shape.tensor_parallel
        senders = range(last, last + self.shape.tensor_parallel)
        links = MasterLinks(
            down=channels,
            ups=list(zip(places, channels, strict=True)),
            results=DistributedResultsIn(tensors, ranks=senders, vocab_size=self.shape.vocab_size),
        )
        hellos = greet(links, self._expected, timeout_s=MEET_S)
        return links, not any(hello.needs_logits for hello in hellos)

    def _find(self, replica: int, group: str, executor: ParallelExecutor) -> list[tuple[Any, str]]:
        """Wait for the actors of a replica, which leave the group that they had; return each with its node.

        All leave at a time: one that waits for another is free when that one has left.
        """
        ray = self._ray
        while True:
            names = ray.util.list_named_actors()
            found = [messages.newest(names, replica, place) for place in self.shape.places]
            try:
                actors = [ray.get_actor(name) for name in found if name is not None]
                left = [actor.leave.options(concurrency_group=BESIDE).remote(group) for actor in actors]
                nodes = ray.get(left, timeout=_LEAVE_S)
                if len(nodes) == len(found):
                    executor.waits_for = ""
                    return list(zip(actors, nodes, strict=True))
            except (ray.exceptions.RayError, ValueError) as error:  # one is restarted, moves, or loads
                _log.debug("ranks do not come yet: %s", first_line(error))
            missing = [place.name for place, name in zip(self.shape.places, found, strict=True) if name is None]
            executor.waits_for = f"{missing[0]} is missing" if missing else "ranks load their parts"
            time.sleep(_LOOK_S)

    def _lose(self, error: BaseException | None) -> None:
        """Note what the first rank was lost of: an error of its own, or the end of its process or machine."""
        if not self._has_ended.is_set():
            is_error = isinstance(error, self._ray.exceptions.RayTaskError)
            self._death = Death(EXIT_UNHANDLED, None) if is_error else Death(None, signal.SIGKILL)
            self._has_ended.set()

    def cause(self, timeout_s: float | None) -> Death | None:
        """Wait for the end of a rank, and return it; None: none within the time, or before the ranks had met.

        Ray does not tell of what signal a process died: requests are blamed for errors alone at once, and for deaths
        after several.
        """
        return self._death if self._has_ended.wait(timeout_s) else None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._ray.shutdown()


class RayExecutor(ParallelExecutor):
    """Executor of a :class:`RayGroup`, whose ranks come when it is told its replica.

    Args:
        group: The group.
        watch: See :class:`ParallelExecutor`.
        on_done: Likewise.
    """

    def __init__(
        self, group: RayGroup, *, watch: IterationWatch | None, on_done: Callable[[Done], None] | None
    ) -> None:
        super().__init__(None, max_in_flight=group.shape.max_in_flight, watch=watch, on_done=on_done)
        self._group = group

    def serve(self, replica: int, *, timeout_s: float | None = None) -> str:
        """See :class:`~mlsys_orca.parallel.ranks.RankExecutor`."""
        links, finds_largest = self._group.form(replica, self)
        self.attach(links, finds_largest=finds_largest)
        return super().serve(replica, timeout_s=timeout_s)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; Ray's have the other machine's traceback behind it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
