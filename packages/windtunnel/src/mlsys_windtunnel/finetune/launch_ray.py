"""The other processes of a training as tasks of Ray, spread over a cluster's nodes.

The first process stays where it was started, and needs a node of the cluster there. It joins the cluster that
``RAY_ADDRESS`` names or that runs on this machine; where there is none it starts one and ends it afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.errors import MissingDependencyError, MlsysError

from mlsys_windtunnel.finetune.processes import WorkerLostError, meeting_point, wait_for_all

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

ROOM_TIMEOUT_S = 60.0  # within which the cluster must have a core for each worker
CAUSE_TIMEOUT_S = 60.0  # within which Ray knows why a worker does not answer


@contextmanager
def on_cluster(work: Callable[..., None], job: Any, count: int) -> Iterator[TCPStore]:
    """Run the other processes on the cluster for the time of the block; yield the store where they have met.

    Args:
        work: Called in each with the job, the store's address, the process's rank and its number of threads.
        job: What it needs.
        count: Processes, with the first.

    Raises:
        MissingDependencyError: Ray is not installed.
        MlsysError: the cluster has no room, or a worker failed.
        WorkerLostError: a worker is gone with its node, or was killed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingDependencyError("launcher 'ray' needs Ray: pip install 'mlsys-windtunnel[ray]'") from error
    num_workers = count - 1
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(logging_level=logging.WARNING, include_dashboard=False)  # if it starts one
    try:
        bundles = ray.util.placement_group([{"CPU": 1}] * num_workers, strategy="SPREAD")
        try:
            if not bundles.wait(ROOM_TIMEOUT_S):
                raise MlsysError(
                    f"the cluster has no {num_workers} free cores for {num_workers} workers within "
                    f"{ROOM_TIMEOUT_S:.0f} s: take fewer processes, or add nodes"
                )
            yield from _run(ray, work, job, count, bundles)
        finally:
            # Kills the workers that are left. ray.cancel() may end this process with them: Ray 2.60 aborts where a task
            # is cancelled between its result and its removal from the list of pending ones (task_manager.cc:1329).
            ray.util.remove_placement_group(bundles)
    finally:
        if is_ours:
            ray.shutdown()


def _run(ray: Any, work: Callable[..., None], job: Any, count: int, bundles: Any) -> Iterator[TCPStore]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host = ray.util.get_node_ip_address()
    store = meeting_point(host)
    address = (host, store.port)
    kept = ray.put(job)
    pending = []
    for rank in range(1, count):
        place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank - 1)
        # A task that Ray begins again would come to a group that has ended.
        remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy=place)(work)
        pending.append(remote.remote(kept, address, rank, torch.get_num_threads()))

    def check() -> None:
        for task in ray.wait(pending, timeout=0)[0]:
            raise _failure(ray, task) or MlsysError("a training process ended before the training began")

    try:
        wait_for_all(store, count, check)
        yield store
        _raise_cause(ray, pending, None)
    except RuntimeError:  # gloo's, when a connection breaks
        _raise_cause(ray, pending, CAUSE_TIMEOUT_S)
        raise


def _raise_cause(ray: Any, pending: list[Any], timeout_s: float | None) -> None:
    """Wait for the workers and raise what ended one; nothing, if each has done its part or only lost its neighbours.

    Args:
        ray: The package.
        pending: Their tasks.
        timeout_s: Seconds after which one that does not end counts as lost; None: wait.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while pending:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        ended, pending = ray.wait(pending, timeout=left_s)
        if not ended:
            raise WorkerLostError(f"a training worker is lost: it did not answer for {timeout_s:.0f} s")
        failure = _failure(ray, ended[0])
        if failure is not None and not isinstance(failure.__cause__, RuntimeError):
            raise failure


def _failure(ray: Any, task: Any) -> MlsysError | None:
    """Return what an ended task failed of, with the worker's own error as its cause; None if it did not fail."""
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        failure = MlsysError(f"a training process failed: {error.cause}")
        failure.__cause__ = error.cause
        return failure
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        lost = WorkerLostError(f"a training worker is lost: {reason[0]}")
        lost.__cause__ = error
        return lost
    return None
