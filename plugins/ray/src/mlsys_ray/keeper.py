"""The process that keeps rank actors in their seats on a Ray cluster: the supervisor's child, and a Ray driver.

A *seat* has the ranks of one stage, or some of them, in a placement group of one bundle. Ray itself starts an actor
anew whose process has died. A seat whose node is gone, or which is silent for longer than the server waits, is given up
and made anew on what the cluster has left: Ray looks longer. All actors end with this process, which owns them.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import ServingError
from mlsys_orca.parallel.placement import Placement

from mlsys_ray import messages
from mlsys_ray.actor import RankActor
from mlsys_ray.group import BESIDE, connect, first_line
from mlsys_ray.plan import place, ranks_of

_POLL_S = 0.25
_ROOM_S = 10.0  # for a bundle on the planned node; after that Ray may choose one


@dataclass(slots=True)
class _Actor:
    place: Placement
    handle: Any
    answer: Any  # Ray's reference to what is waited for
    since_s: float  # when it was asked
    limit_s: float  # that it may take
    part: messages.Part | None = None  # None: it has not answered yet


@dataclass(slots=True)
class _Seat:
    number: int
    node: str | None  # Ray's id; None: Ray chooses
    since_s: float  # of its present state
    group: Any = None  # placement group
    actors: list[_Actor] = field(default_factory=list)


class Keeper:
    """Seats and their actors.

    Args:
        ray: The package, connected to the cluster.
        settings: The seats.
        say: Called with each line about seats.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        ray: Any,
        settings: messages.Settings,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ray, self._settings, self._say, self._clock = ray, settings, say, clock
        self._given_up: set[str] = set()  # nodes that no seat goes to until they answer
        self.seats = [_Seat(number, node, clock()) for number, node in enumerate(settings.nodes)]
        self._kind = type(f"mlsys-rank of {settings.run}", (RankActor,), {})  # Ray has it in the process's title
        threads = settings.model.num_threads
        self._options = {"num_cpus": threads, "max_restarts": -1, "concurrency_groups": {BESIDE: 2}}

    def step(self) -> None:
        """Advance each seat by what has happened since the last step.

        Raises:
            ServingError: a part cannot be loaded.
        """
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        for seat in self.seats:
            if seat.group is None:
                self._reserve(seat)
            elif not seat.actors:
                self._start(seat)
            elif seat.node not in alive:
                self._give_up(seat, "is gone")
            else:
                for actor in seat.actors:
                    if not self._listen(seat, actor):
                        break

    def started(self) -> messages.Started | None:
        """Return what is loaded, when all is; None before."""
        actors = [(seat, actor) for seat in self.seats for actor in seat.actors]
        model = self._settings.model
        num_places = model.tensor_parallel * model.pipeline_parallel
        parts = [actor.part for _, actor in actors if actor.part is not None]
        if len(parts) < num_places * model.num_replicas:
            return None
        nodes = [part.node for part in parts]
        # Each part takes its share of a replica's keys and values; the part with the least room says how many fit.
        least = min(part.available_nbytes // nodes.count(part.node) for part in parts)
        return messages.Started(tuple(parts[:num_places]), least * num_places)

    def close(self) -> None:
        """End all actors."""
        for seat in self.seats:
            self._release(seat)

    def _reserve(self, seat: _Seat) -> None:
        """Ask for a seat's cores."""
        pinned = None if seat.node is None else [{"ray.io/node-id": seat.node}]
        seat.group = self._ray.util.placement_group(
            [{"CPU": self._settings.cores}], name=f"orca seat {seat.number}", bundle_label_selector=pinned
        )
        seat.since_s = self._clock()

    def _start(self, seat: _Seat) -> None:
        """Start the actors of a seat whose cores are there."""
        table = self._ray.util.placement_group_table(seat.group)
        if table.get("state") != "CREATED":  # it has none at first
            if seat.node is not None and self._clock() - seat.since_s > _ROOM_S:
                self._release(seat)
                seat.node = None
                self._reserve(seat)
                self._say(
                    f"seat {seat.number} waits until a node of the Ray cluster has {self._settings.cores} free cores"
                )
            return
        seat.node = table["bundles_to_node_id"][0]
        replica, places = ranks_of(seat.number, self._settings.model, self._settings.cores)
        for each in places:
            handle = self._new_actor(seat, messages.actor_name(replica, each, time.time_ns()), each)
            limit_s = self._settings.model.join_timeout_s
            seat.actors.append(_Actor(each, handle, handle.part.remote(), self._clock(), limit_s))

    def _new_actor(self, seat: _Seat, name: str, each: Placement) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=0)
        kind = self._ray.remote(**self._options)(self._kind)
        return kind.options(name=name, scheduling_strategy=strategy).remote(self._settings.model, each)

    def _listen(self, seat: _Seat, actor: _Actor) -> bool:
        """Take an actor's answer, and ask again; return False if its seat was given up."""
        ray, now = self._ray, self._clock()
        if not ray.wait([actor.answer], timeout=0)[0]:
            if now - actor.since_s <= actor.limit_s:
                return True
            return self._give_up(seat, f"was silent for {actor.limit_s:.0f} s")
        try:
            answer = ray.get(actor.answer)
        except ray.exceptions.ActorUnavailableError:  # its process has died, and Ray starts another
            actor.limit_s = self._settings.model.join_timeout_s  # it loads its part again
            if now - actor.since_s > actor.limit_s:
                return self._give_up(seat, "does not come back")
            actor.answer = _beat(actor.handle)
            return True
        except ray.exceptions.RayError as error:
            return self._give_up(seat, f"is lost ({first_line(error)})")
        if actor.part is None:
            found = messages.decode_part(answer)
            if isinstance(found, messages.Failed):
                raise ServingError(found.message)
            actor.part = found
        self._given_up.discard(seat.node or "")
        actor.answer, actor.since_s, actor.limit_s = _beat(actor.handle), now, self._settings.model.heartbeat_timeout_s
        return True

    def _give_up(self, seat: _Seat, why: str) -> bool:
        """Leave a node that is lost, and find another place; return False."""
        if seat.node is not None:
            self._given_up.add(seat.node)
        self._release(seat)
        seat.node = place(self._settings.cores, self._free())
        self._say(f"the node of seat {seat.number} {why}: the seat moves")
        return False

    def _free(self) -> dict[str, int]:
        """Return the cores of each living node that are not of a seat."""
        found = {
            node["NodeID"]: int(node["Resources"].get("CPU", 0))
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._given_up
        }
        for seat in self.seats:
            if seat.node in found:
                found[seat.node] -= self._settings.cores
        return found

    def _release(self, seat: _Seat) -> None:
        """End a seat's actors, and give its cores back."""
        for actor in seat.actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        if seat.group is not None:
            self._ray.util.remove_placement_group(seat.group)
        seat.group, seat.actors, seat.node = None, [], None


def _beat(handle: Any) -> Any:
    """Ask an actor whether it lives, beside its steps; return Ray's reference to the answer."""
    return handle.beat.options(concurrency_group=BESIDE).remote()


def keep(settings: messages.Settings, report: socket.socket, say: Callable[[str], None]) -> int:
    """Keep the seats until SIGTERM, in a forked process of its own; return the exit code.

    Args:
        settings: The seats.
        report: Where the outcome of the start goes: :class:`~.messages.Started` or :class:`~.messages.Failed`.
        say: Called with each line about seats.
    """

    def tell(message: messages.Started | messages.Failed) -> None:
        with suppress(OSError):  # it is read once
            report.send(messages.encode(message), socket.MSG_DONTWAIT)

    ray = connect(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keeper, is_started = Keeper(ray, settings, say=say), False
    limit_s = settings.model.join_timeout_s
    until_s = time.monotonic() + limit_s
    try:
        while True:
            keeper.step()
            if not is_started and (found := keeper.started()) is not None:
                is_started = True
                tell(found)
            if not is_started and time.monotonic() > until_s:
                raise ServingError(f"the parts of the model did not come within {limit_s:.0f} s")
            time.sleep(_POLL_S)
    except ServingError as error:
        tell(messages.Failed(str(error)))
        say(str(error))
        return 1
    finally:
        keeper.close()
        ray.shutdown()
