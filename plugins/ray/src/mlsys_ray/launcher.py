"""The process that keeps a node in each seat of a Ray cluster. It stands beside the server's hub, which nodes join.

A node that does not answer its beats, or whose actor Ray says is dead, is given up: its placement group is removed, and
a new one made on what the cluster has left. Ray itself looks longer.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
from mlsys_core.errors import ServingError
from mlsys_core.posix import memory_file
from mlsys_serving.processes import RestartBudget

from mlsys_ray.actor import NodeActor
from mlsys_ray.node import NodeOrder
from mlsys_ray.plan import place

_POLL_S = 0.25
_START_S = 120.0  # for an actor's first answer: its worker may have to start, with its imports
_ROOM_S = 10.0  # for a bundle on the planned node; after that Ray may choose one


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seats of one server on a Ray cluster."""

    address: str  # HOST:PORT of the cluster's head
    model: str  # name or path, by which each node finds its copy
    cores: int  # of each seat
    nodes: tuple[str, ...]  # Ray's id of each seat's first node
    num_threads: int  # of each rank
    silence_s: float  # after which a seat's node is given up


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that the launcher's process is given."""

    settings: RaySettings
    order: NodeOrder


def become_launcher(launch: Launch, lost: int) -> NoReturn:
    """Turn this forked process into the launcher; does not return. Memory carries the secret, not the command line.

    Args:
        launch: All that it needs.
        lost: Descriptor where the hub tells seats whose nodes it has lost, a byte each.
    """
    fd = memory_file("orca-launch")
    os.write(fd, msgspec.json.encode(launch))
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    os.set_inheritable(lost, True)
    os.execv(sys.executable, [sys.executable, "-m", __name__, str(fd), str(lost)])


@dataclass(slots=True)
class _Seat:
    number: int
    node: str | None  # Ray's id; None: Ray chooses
    since_s: float  # of its present state
    group: Any = None  # placement group
    actor: Any = None
    beat: Any = None  # the answer that is waited for
    has_answered: bool = False
    started_s: float = 0.0
    not_before_s: float = 0.0
    budget: RestartBudget = field(
        default_factory=lambda: RestartBudget(max_deaths=4, window_s=120.0, num_immediate=1, backoff_s=1.0)
    )


class Launcher:
    """Seats and their actors.

    Args:
        ray: The package, connected to the cluster.
        launch: See :class:`Launch`.
        say: Called with each line about seats.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, ray: Any, launch: Launch, *, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ray, self._launch, self.say, self._clock = ray, launch, say, clock
        self._given_up: set[str] = set()  # nodes that no seat goes to until they answer
        now = clock()
        self.seats = [_Seat(number, node, now) for number, node in enumerate(launch.settings.nodes)]

    def step(self) -> None:
        """Advance each seat by what has happened since the last step.

        Raises:
            ServingError: a node cannot live.
        """
        for seat in self.seats:
            if seat.group is None:
                if self._clock() >= seat.not_before_s:
                    self._reserve(seat)
            elif seat.actor is None:
                self._start(seat)
            else:
                self._listen(seat)

    def lose(self, number: int) -> None:
        """Give a node up that the hub has lost while its actor answers; a new one has not been the hub's that long."""
        seat = self.seats[number] if number < len(self.seats) else None
        fresh_s = 2 * self._launch.settings.silence_s
        if seat is not None and seat.actor is not None and self._clock() - seat.started_s > fresh_s:
            self._give_up(seat, "is lost to the server")

    def close(self) -> None:
        """End all nodes: their actors go with their placement groups."""
        for seat in self.seats:
            self._release(seat)

    def _reserve(self, seat: _Seat) -> None:
        """Ask for a seat's cores."""
        pinned = None if seat.node is None else [{"ray.io/node-id": seat.node}]
        seat.group = self._ray.util.placement_group(
            [{"CPU": self._launch.settings.cores}], name=f"orca seat {seat.number}", bundle_label_selector=pinned
        )
        seat.since_s = self._clock()

    def _start(self, seat: _Seat) -> None:
        """Start the actor of a seat whose cores are there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        table = self._ray.util.placement_group_table(seat.group)
        if table.get("state") != "CREATED":  # it has none at first
            if seat.node is not None and self._clock() - seat.since_s > _ROOM_S:
                self._release(seat)
                seat.node = None
                self._reserve(seat)
                cores = self._launch.settings.cores
                self.say(f"seat {seat.number} waits until a node of the Ray cluster has {cores} free cores")
            return
        seat.node = table["bundles_to_node_id"][0]
        options = {
            "num_cpus": self._launch.settings.cores,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=0),
        }
        order = msgspec.structs.replace(self._launch.order, seat=seat.number)
        seat.actor = self._ray.remote(**options)(NodeActor).remote(order)
        seat.beat, seat.since_s, seat.has_answered = seat.actor.beat.remote(), self._clock(), False
        seat.started_s = seat.since_s

    def _listen(self, seat: _Seat) -> None:
        """Take a seat's answer, and ask again."""
        ray, limit_s = self._ray, self._launch.settings.silence_s if seat.has_answered else _START_S
        if not ray.wait([seat.beat], timeout=0)[0]:
            if self._clock() - seat.since_s > limit_s:
                self._give_up(seat, f"was silent for {limit_s:.0f} s")
            return
        try:
            ended = ray.get(seat.beat)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self._give_up(seat, f"is lost ({reason[0]})")
            return
        if ended is None:
            self._given_up.discard(seat.node)
            seat.beat, seat.since_s, seat.has_answered = seat.actor.beat.remote(), self._clock(), True
            return
        _, reason = ended
        delay_s, node = seat.budget.delay_s(self._clock()), seat.node
        self._release(seat)
        if delay_s is None:
            raise ServingError(f"the node of seat {seat.number} ends again and again: {reason}")
        self.say(f"the node of seat {seat.number} has ended and is started anew: {reason}")
        seat.node, seat.not_before_s = node, self._clock() + delay_s

    def _give_up(self, seat: _Seat, why: str) -> None:
        """Leave a node that is lost, and find another place."""
        settings = self._launch.settings
        if seat.node is not None:
            self._given_up.add(seat.node)
        self._release(seat)
        seat.node = place(settings.cores, self._free())
        self.say(f"the node of seat {seat.number} {why}: the seat moves")

    def _free(self) -> dict[str, int]:
        """Return the cores of each living node that are not of a seat."""
        found = {
            node["NodeID"]: int(node["Resources"].get("CPU", 0))
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in self._given_up
        }
        for seat in self.seats:
            if seat.node in found:
                found[seat.node] -= self._launch.settings.cores
        return found

    def _release(self, seat: _Seat) -> None:
        """Give a seat's cores back, which ends its actor."""
        if seat.group is not None:
            self._ray.util.remove_placement_group(seat.group)
        seat.group = seat.actor = seat.beat = seat.node = None


def main(fd: int, lost: int) -> int:
    """Keep the seats until SIGTERM. See :func:`become_launcher`."""
    with os.fdopen(fd, "rb") as file:
        launch = msgspec.json.decode(file.read(), type=Launch)
    ray: Any = importlib.import_module("ray")
    ray.init(address=launch.settings.address, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # in place of Ray's own
    launcher = Launcher(ray, launch, say=lambda line: print(f"mlsys: {line}", file=sys.stderr, flush=True))
    try:
        while True:
            launcher.step()
            if select.select([lost], [], [], _POLL_S)[0]:
                numbers = os.read(lost, 256)
                if not numbers:  # the server is gone
                    return 0
                for number in numbers:
                    launcher.lose(number)
    except ServingError as error:
        launcher.say(str(error))
        return 1
    finally:
        launcher.close()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
