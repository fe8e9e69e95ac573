"""Placement of a model's ranks by Ray: the policy behind ``mlsys orca serve --executor ray``."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import message_pair
from mlsys_orca.cli.placing import PlacedModel
from mlsys_orca.parallel.holder import Loaded
from mlsys_orca.parallel.ranks import ParallelModel
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_serving.processes.children import Standing

from mlsys_ray import messages
from mlsys_ray.cluster import AUTH_MODE, look
from mlsys_ray.group import RayGroup
from mlsys_ray.plan import plan_seats

_MESSAGE_NBYTES = 1 << 16


class RayHolders:
    """Actors of a model's parts, as a supervisor has them: :class:`~mlsys_orca.parallel.ranks.RankHolders`.

    Args:
        model: The parts.
        settings: Their seats.
        say: Called with each line about them, in processes of their own.
    """

    def __init__(self, model: ParallelModel, settings: messages.Settings, say: Callable[[str], None]) -> None:
        self.model = model
        self.loaded: list[Loaded] = []
        self.available_nbytes: int | None = None
        self._settings = settings
        self._told, self._tells = message_pair()
        self.standing = [Standing("orca keeper", lambda: _keep(settings, self._tells, say))]

    def start(self) -> None:
        """Fork the keeper and wait for all parts: :meth:`fork`, then :meth:`wait`."""
        self.fork()
        self.wait()

    def fork(self) -> None:
        """Fork the keeper. This process must have a single thread."""
        self.standing[0].fork()

    def wait(self) -> None:
        """Wait until all actors have their parts.

        Raises:
            InvalidInputError: one cannot load its part, or they do not come in time.
            ServingError: the keeper has ended.
        """
        child = self.standing[0].child
        assert child is not None
        poll = select.poll()
        for fd in (self._told.fileno(), child.fd):
            poll.register(fd, select.POLLIN)
        if self._told.fileno() not in {fd for fd, _ in poll.poll()}:
            death, self.standing[0].child = child.wait(), None
            raise ServingError(f"the process that keeps ranks on the Ray cluster has ended: {death}")
        found = messages.decode_start(self._told.recv(_MESSAGE_NBYTES))
        if isinstance(found, messages.Failed):
            raise InvalidInputError(found.message)
        self.loaded = [Loaded(part.nbytes, part.is_native, part.dtype, part.needs_logits) for part in found.parts]
        self.available_nbytes = found.available_nbytes

    def group(self, shape: GroupShape) -> RayGroup:
        """Return a new group, whose ranks come when it is told its replica."""
        return RayGroup(self._settings, self.model.expected, shape)

    def close(self) -> None:
        """End the keeper, and so the actors. Idempotent."""
        self.standing[0].end()
        self._told.close()
        self._tells.close()


def _keep(settings: messages.Settings, report: socket.socket, say: Callable[[str], None]) -> int:
    from mlsys_ray.keeper import keep  # only here: who forks does not load Ray

    return keep(settings, report, say)


@dataclass(frozen=True, slots=True)
class RayPlacer:
    """Seats on a Ray cluster: :class:`~mlsys_orca.parallel.ranks.RankPlacer`."""

    settings: messages.Settings

    def holders(self, model: ParallelModel, *, num_replicas: int, say: Callable[[str], None]) -> RayHolders:
        """Return the holders of a model's parts."""
        assert num_replicas == self.settings.model.num_replicas
        return RayHolders(model, self.settings, say)


def place_ranks(placed: PlacedModel) -> RayPlacer:
    """Look at the cluster, and plan seats for a model's parts.

    Raises:
        InvalidInputError: there is no such cluster, or the parts do not fit it.
        MissingDependencyError: Ray is not installed.
    """
    cluster = look(placed.address)
    os.environ[AUTH_MODE] = cluster.auth  # for the drivers, which are forked from this process
    plan = plan_seats(
        tensor_parallel=placed.tensor_parallel,
        pipeline_parallel=placed.pipeline_parallel,
        num_replicas=placed.num_replicas,
        num_threads=placed.num_threads,
        cores=cluster.cores,
    )
    path = Path(placed.model)
    settings = messages.Settings(
        address=cluster.address,
        host=cluster.host,
        run=f"orca-{os.getpid()}-{os.urandom(8).hex()}",
        model=replace(placed, model=str(path.resolve()) if path.exists() else placed.model),
        cores=plan.cores,
        nodes=plan.nodes,
    )
    return RayPlacer(settings)
