"""Data-parallel training on one machine: this process is the first, and starts the others.

The others run :func:`_work` with what they need sent to them, join the group, take their share of each batch, and end.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mlsys_core.errors import MissingDependencyError, MlsysError
from torch import distributed, multiprocessing

from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, Rows

TIMEOUT = datetime.timedelta(minutes=10)  # of a step: another process has died if it takes longer
Job = tuple[Tunable, Rows, Batch | None, TrainingOptions, float]


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
    address = f"tcp://127.0.0.1:{_free_port()}"
    start = _with_ray if options.launcher == "ray" else _locally
    with start(job, address), _group(address, options.n_processes, 0):
        yield


@contextmanager
def _group(address: str, count: int, rank: int) -> Iterator[None]:
    """Open torch.distributed's default group for the time of the block.

    A module of torch has the default group as default arguments. Imported inside the block (the first optimiser of a
    process does so) it would keep the group for ever, and gloo's threads with it, which may abort a process that ends.
    """
    importlib.import_module("torch.distributed.nn.functional")

    distributed.init_process_group("gloo", address, TIMEOUT, count, rank)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _locally(job: Job, address: str) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    count, threads = job[3].n_processes, torch.get_num_threads()
    started = [
        context.Process(target=_work, args=(job, address, rank, threads), daemon=True) for rank in range(1, count)
    ]
    for process in started:
        process.start()
    try:
        yield
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


@contextmanager
def _with_ray(job: Job, address: str) -> Iterator[None]:
    try:
        import ray  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        raise MissingDependencyError("launcher='ray' needs Ray: pip install ray") from error
    ray.init(ignore_reinit_error=True)
    remote: Any = ray.remote(num_cpus=1)(_work)
    kept = ray.put(job)
    pending = [remote.remote(kept, address, rank, torch.get_num_threads()) for rank in range(1, job[3].n_processes)]
    try:
        yield
    except BaseException:
        for each in pending:
            ray.cancel(each, force=True)
        raise
    ray.get(pending)


def _work(job: Job, address: str, rank: int, num_threads: int) -> None:
    """Train in a process other than the first."""
    from mlsys_windtunnel.finetune.train import Trainer

    tunable, rows, evaluation, options, final_sharpness = job
    torch.set_num_threads(num_threads)
    tunable = copy.deepcopy(tunable)  # what torch sends shares memory with the first process, which trains its own
    with _group(address, options.n_processes, rank):
        Trainer(tunable, rows, evaluation, options, final_sharpness=final_sharpness).run()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
