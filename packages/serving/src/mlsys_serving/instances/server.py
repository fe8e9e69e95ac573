"""The server as several processes: a front, a worker for each instance of each model, and one that waits."""

from __future__ import annotations

import mmap
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix.machine import allowed_cores

from mlsys_serving.http.server import serve
from mlsys_serving.instances.fleet import Fleet
from mlsys_serving.instances.members import InstanceGroup, Roles
from mlsys_serving.instances.recovery import divided
from mlsys_serving.instances.remote import RemoteSource
from mlsys_serving.instances.shared import PAGE_NBYTES
from mlsys_serving.instances.worker import InstanceWorker
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.processes import Boxes, RestartBudget, Supervisor, SupervisorLink, can_supervise

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mlsys_serving.http import BoundPort, ServerAddress

PART_NBYTES = 64 << 20  # of shared memory, for the answers of an instance, and as much for its requests


def require_processes(device: str) -> None:
    """Refuse instances where processes cannot be forked, or where they cannot share the device.

    Args:
        device: Its kind or name.

    Raises:
        InvalidInputError: One of these.
    """
    if (lack := can_supervise()) is not None:
        raise InvalidInputError(f"--instances: {lack}")
    if device != "cpu":
        raise InvalidInputError(f"--instances forks processes, which cannot share {device}: leave one out")


def serve_instances(
    groups: Sequence[InstanceGroup],
    num_instances: int,
    make_app: Callable[[ModelRepository], FastAPI],
    *,
    bound: BoundPort,
    on_ready: Callable[[ServerAddress], None] | None = None,
    num_cores: int | None = None,
    part_nbytes: int = PART_NBYTES,
) -> int:
    """Serve models from forked processes until SIGTERM or SIGINT; return the exit code.

    This process must have a single thread: load the models with torch's number of threads at 1.

    Args:
        groups: The models.
        num_instances: Instances of each.
        make_app: Called in the front, with a repository of all models.
        bound: The listening port.
        on_ready: Called in the front, when requests are taken.
        num_cores: Cores that the instances share; None: all that this process may use.
        part_nbytes: Shared memory for the answers of an instance, and as much for its requests.

    Raises:
        ServingError: This process has threads.
    """
    cores = sorted(allowed_cores() or {0})[:num_cores]
    num_workers, num_pages = len(groups) * num_instances, part_nbytes // PAGE_NBYTES
    memory = mmap.mmap(-1, 2 * num_workers * num_pages * PAGE_NBYTES)  # pages come as they are touched
    roles = Roles(divided(cores, num_instances), num_pages)
    boxes = Boxes(4 * num_workers + 4)

    def front(link: SupervisorLink) -> int:
        fleet = Fleet(groups, roles, memory, link)
        repository = ModelRepository(source=RemoteSource(fleet))
        return serve(make_app(repository), bound=bound, on_ready=on_ready)

    def worker(number: int, end: socket.socket) -> None:
        InstanceWorker(groups, memory, end, boxes.box(number)).run()

    bound.pause()
    _end_progress_thread()
    budget = RestartBudget(max_deaths=16 * num_workers, num_immediate=8 * num_workers)
    return Supervisor(front, worker, num_workers=num_workers, boxes=boxes, budget=budget).run()


def _end_progress_thread() -> None:
    """End the thread that tqdm keeps once a library has shown progress with it: who has threads cannot fork."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and tqdm.monitor is not None:
        tqdm.monitor.exit()
        tqdm.monitor = None
