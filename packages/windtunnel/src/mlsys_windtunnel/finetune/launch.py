"""Data-parallel training: this process is the first, and starts the others, here or by Ray on a cluster's nodes.

The others run :func:`work` with what they need sent to them, join the group, take their share of each batch, and end.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from mlsys_core.errors import MlsysError
from torch import distributed, multiprocessing

from mlsys_windtunnel.finetune.launch_ray import on_cluster
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.processes import (
    TIMEOUT,
    Address,
    WorkerLostError,
    come_to,
    meeting_point,
    wait_for_all,
)
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, Rows

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

MAX_LOSSES = 3  # of workers, in one training, before it fails
Job = tuple[Tunable, Rows, Batch | None, TrainingOptions, float]
Result = TypeVar("Result")


def together(job: Job, train: Callable[[Tunable], Result]) -> Result:
    """Run ``train`` on the job's networks while the other processes take their share.

    With a checkpoint folder a training that loses a worker begins again, with a worker in its place, from the last
    checkpoint: its result is that of an undisturbed one.

    Args:
        job: Networks, rows, evaluation rows, options and final sharpness, as ``Trainer`` takes them.
        train: Trains the networks that it is given, as the first process.

    Raises:
        MlsysError: a process failed.
        WorkerLostError: a worker was lost, and there is no checkpoint folder, or it is not the first few times.
        MissingDependencyError: Ray is asked for and not installed.
    """
    tunable, *others = job
    options = job[3]
    losses_left = MAX_LOSSES if options.launcher == "ray" and options.checkpoint_dir is not None else 0
    while losses_left:
        part = copy.deepcopy(tunable)
        try:
            with processes((part, *others)):  # type: ignore[arg-type]
                return train(part)
        except WorkerLostError as error:
            losses_left -= 1
            warnings.warn(f"{error}; the training goes on from its last checkpoint", stacklevel=2)
    with processes(job):
        return train(tunable)


@contextmanager
def processes(job: Job) -> Iterator[None]:
    """Run the other processes for the time of the block; with one, or in a group already, start nothing.

    Raises:
        MlsysError: one of them failed.
        MissingDependencyError: Ray is asked for and not installed.
    """
    options = job[3]
    if options.n_processes == 1 or (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    with (
        on_cluster(work, job, options.n_processes) if options.launcher == "ray" else _locally(job) as store,
        group(store, options.n_processes, 0),
    ):
        yield


@contextmanager
def group(store: TCPStore, count: int, rank: int) -> Iterator[None]:
    """Open torch.distributed's default group for the time of the block.

    A module of torch has the default group as default arguments. Imported inside the block (the first optimiser of a
    process does so) it would keep the group for ever, and gloo's threads with it, which may abort a process that ends.

    Args:
        store: Where its processes meet.
        count: Processes.
        rank: This one's number; the first has 0.
    """
    importlib.import_module("torch.distributed.nn.functional")

    distributed.init_process_group("gloo", store=store, timeout=TIMEOUT, world_size=count, rank=rank)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _locally(job: Job) -> Iterator[TCPStore]:
    store = meeting_point("127.0.0.1")
    address = ("127.0.0.1", store.port)
    context = multiprocessing.get_context("spawn")
    count, threads = job[3].n_processes, torch.get_num_threads()
    started = [
        context.Process(target=work, args=(job, address, rank, threads), daemon=True) for rank in range(1, count)
    ]
    for process in started:
        process.start()

    def check() -> None:
        ended = [process.exitcode for process in started if process.exitcode is not None]
        if ended:
            raise MlsysError(f"a training process ended with exit status {ended[0]} before the training began")

    try:
        wait_for_all(store, count, check)
        yield store
    except BaseException:
        for process in started:
            process.terminate()
        raise
    finally:
        for process in started:
            process.join()
    failed = [process.exitcode for process in started if process.exitcode]
    if failed:
        raise MlsysError(f"a training process ended with exit status {failed[0]}; its own message is above")


def work(job: Job, address: Address, rank: int, num_threads: int) -> None:
    """Train in a process other than the first."""
    from mlsys_windtunnel.finetune.train import Trainer

    tunable, rows, evaluation, options, final_sharpness = job
    torch.set_num_threads(num_threads)
    tunable = copy.deepcopy(tunable)  # what torch sends shares memory with the first process, which trains its own
    with group(come_to(address, rank), options.n_processes, rank):
        Trainer(tunable, rows, evaluation, options, final_sharpness=final_sharpness).run()
