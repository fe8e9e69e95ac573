"""A group: one master and its ranks, forked from holders; and the holders of one model.

:class:`Holders` belongs to the process that lives longest (a supervisor, or a command that runs all by itself); it
makes the keys' and values' memory and forks one holder for each place. :class:`Group` belongs to a master, of which
there may be several at a time: one that serves and one that waits.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import message_pair
from mlsys_serving.processes import Death, is_stopped
from mlsys_serving.processes.children import Standing

from mlsys_orca.parallel.executor import IterationWatch, MasterLinks, ParallelExecutor, greet
from mlsys_orca.parallel.holder import (
    Born,
    Failed,
    HolderSettings,
    Loaded,
    ask_for_rank,
    decode_report,
    decode_told,
    hold,
)
from mlsys_orca.parallel.messages import Done
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.ranks import ParallelModel, RankHolders
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.ring import KvMemory
from mlsys_orca.parallel.wiring import GroupShape, Wiring

RANK_TIMEOUT_S = 60.0  # for all ranks of a group to come
_CAUSE_S = 2.0  # from the loss of a rank to the word of what it died of
_LOOK_S = 1.0  # between two looks whether a signal has stopped a rank
_MESSAGE_NBYTES = 4096


class Holders:
    """Holders of all parts of a model, and the memory of their keys and values. A context manager.

    Args:
        model: Its parts.
        num_replicas: Engines that have keys and values of their own.
        places: Places of this host's parts; None: all.
        name: Of the processes, before their places.
    """

    available_nbytes: int | None = None  # memory for keys and values, if this machine's does not say it

    def __init__(
        self,
        model: ParallelModel,
        *,
        num_replicas: int = 1,
        places: Sequence[Placement] | None = None,
        name: str = "orca",
    ) -> None:
        self.model = model
        self.standing: list[Standing] = []
        self.loaded: list[Loaded] = []  # by place, after start()
        self.requests: dict[Placement, socket.socket] = {}  # ways to the holders
        self.reports: dict[Placement, socket.socket] = {}  # where they say that they have their parts
        self._memories: list[KvMemory] = []
        self._ends: list[socket.socket] = []
        for place in model.places if places is None else places:
            ours, theirs = message_pair()
            told, tells = message_pair()
            memory = KvMemory(num_replicas)
            settings = HolderSettings(
                place=place,
                load=model.load,
                kv_memory=memory,
                hello_of=model.hello_of,
                reducer_of=model.reducer_of,
                requests=theirs,
                report=tells,
            )
            self.requests[place] = ours
            self.reports[place] = told
            self._ends += [ours, theirs, told, tells]
            self._memories.append(memory)
            title = f"{name} {place.stage}.{place.rank}"
            self.standing.append(Standing(title, lambda settings=settings: hold(settings)))  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Fork the holders and wait for their parts: :meth:`fork`, then :meth:`wait`."""
        self.fork()
        self.wait()

    def fork(self) -> None:
        """Fork the holders, which begin to load. This process must have a single thread."""
        for each in self.standing:
            each.fork()

    def group(self, shape: GroupShape) -> Group:
        """Return a new group of ranks; see :class:`Group`."""
        return Group(self, shape)

    def wait(self) -> None:
        """Wait until each holder has its part.

        Raises:
            InvalidInputError: a part cannot be loaded.
            ServingError: a holder has ended before it had its part.
        """
        for each, told in zip(self.standing, self.reports.values(), strict=True):
            assert each.child is not None
            poll = select.poll()
            poll.register(told, select.POLLIN)
            poll.register(each.child.fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if told.fileno() not in ready:
                death, each.child = each.child.wait(), None
                raise ServingError(f"the process that loads part {each.name} has ended: {death}")
            report = decode_report(told.recv(_MESSAGE_NBYTES))
            if isinstance(report, Failed):
                raise InvalidInputError(report.message)
            self.loaded.append(report)

    def ask(self, wiring: Wiring) -> dict[Placement, socket.socket]:
        """Have a rank forked for each place of a new group; return their life sockets."""
        lives = {}
        for place, wires in wiring.ranks.items():
            lives[place] = ask_for_rank(self.requests[place], wiring.shape, wires)
            wiring.hand_over(place)
        return lives

    def close(self) -> None:
        """End the holders and their ranks. Idempotent."""
        for each in self.standing:
            each.end()
        for end in self._ends:
            end.close()
        for memory in self._memories:
            memory.close()


class Group:
    """Ranks of one master. A context manager; its end is that of the ranks.

    Args:
        holders: Who forks the ranks.
        shape: Sizes.
        timeout_s: For all ranks to come.

    Raises:
        GroupBrokenError: a rank ended at once.
        ServingError: a rank did not come in time, or has other code or another model.
    """

    def __init__(self, holders: Holders, shape: GroupShape, *, timeout_s: float = RANK_TIMEOUT_S) -> None:
        model = holders.model
        make = model.new_reducer
        wiring = Wiring.new(shape, new_reducer=None if make is None else lambda: make(shape))
        self.shape = shape
        self._pids: set[int] = set()  # of ranks
        self.lives = holders.ask(wiring)
        self.links: MasterLinks = wiring.links()
        try:
            self.hellos = greet(self.links, model.expected, timeout_s=timeout_s)
        except GroupBrokenError as error:
            death = self.cause(_CAUSE_S)
            self.close()
            raise GroupBrokenError(f"{error}: {death}" if death else str(error)) from error
        except ServingError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def finds_largest(self) -> bool:
        """True if the ranks can say where a row's largest logit is without all logits."""
        return not any(hello.needs_logits for hello in self.hellos)

    def executor(
        self, *, watch: IterationWatch | None = None, on_done: Callable[[Done], None] | None = None
    ) -> ParallelExecutor:
        """Return the executor over the ranks; once."""
        return ParallelExecutor(
            self.links,
            max_in_flight=self.shape.max_in_flight,
            finds_largest=self.finds_largest,
            watch=watch,
            on_done=on_done,
        )

    def cause(self, timeout_s: float | None) -> Death | None:
        """Wait for the end of a rank that did not end for want of a neighbour, and return it.

        A rank that a signal has stopped, at two looks, counts as one that was killed.

        Returns:
            None: none was told within ``timeout_s``, or all have ended without a word, as when their holders died.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        suspects: set[int] = set()  # ranks that were stopped at the last look
        poll, left = select.poll(), {life.fileno(): life for life in self.lives.values() if life.fileno() >= 0}
        for fd in left:
            poll.register(fd, select.POLLIN)
        while left:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            ready = poll.poll(1e3 * (_LOOK_S if left_s is None else min(left_s, _LOOK_S)))
            stopped = set() if ready else {pid for pid in self._pids if is_stopped(pid)}
            if stopped & suspects:
                return Death(None, signal.SIGSTOP)
            suspects = stopped
            for fd, _ in ready:
                told = _told(left[fd].recv(_MESSAGE_NBYTES))
                if isinstance(told, Born):
                    self._pids.add(told.pid)
                    continue
                poll.unregister(fd)
                del left[fd]
                death = told
                if death is not None and death.exit_code != 0:
                    return death
                if until_s is None:  # the first that went for want of a neighbour: who it was is told soon
                    until_s = time.monotonic() + _CAUSE_S
        return None

    def close(self) -> None:
        """Close the life sockets: the ranks are killed. Idempotent."""
        for life in self.lives.values():
            life.close()


def _told(data: bytes) -> Born | Death | None:
    """Return what a life socket said; None: its other end is gone."""
    try:
        told = decode_told(data)
    except msgspec.MsgspecError:
        return None
    return told if isinstance(told, Born) else Death(told.exit_code, told.signal, told.is_out_of_memory)


def layout_of(places: Sequence[Placement]) -> str:
    """Return a few words on how a model is divided.

    Example:
        >>> from mlsys_orca.parallel.placement import all_places
        >>> layout_of(all_places(tensor_parallel=3, pipeline_parallel=2))
        '2 stages of 3 ranks'
    """
    stages, ranks = places[0].num_stages, places[0].num_ranks
    return f"{stages} stage{'s' * (stages > 1)} of {ranks} rank{'s' * (ranks > 1)}"


def holders_of(model: ParallelModel, *, num_replicas: int = 1, say: Callable[[str], None]) -> RankHolders:
    """Return the holders of a model's parts: forked here, or where its placer says. See :class:`RankPlacer`."""
    if model.placer is not None:
        return model.placer.holders(model, num_replicas=num_replicas, say=say)
    return Holders(model, num_replicas=num_replicas)
