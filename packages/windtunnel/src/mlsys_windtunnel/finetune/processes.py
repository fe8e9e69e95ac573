"""Processes that train together: each takes its share of a batch's rows, and gradients are added up.

torchrun starts them, or Ray's ``TorchTrainer``: all run the same program.
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

TIMEOUT = datetime.timedelta(minutes=10)  # of a step: another process has died if it takes longer
c10d: Any = distributed  # of which some names have no annotations
JOINS = itertools.count()  # groups that this process has joined


class Processes:
    """Processes of torch.distributed's default group; this one alone where there is none."""

    def __init__(self) -> None:
        self.is_alone = not (distributed.is_available() and distributed.is_initialized())
        self.rank = 0 if self.is_alone else distributed.get_rank()
        self.count = 1 if self.is_alone else distributed.get_world_size()

    @property
    def is_first(self) -> bool:
        """True where this one writes what is written once."""
        return self.rank == 0

    def share(self, num_rows: int) -> tuple[int, int]:
        """Return the first row of this process's part of a batch and one above its last.

        Parts differ by a row at most.
        """
        return num_rows * self.rank // self.count, num_rows * (self.rank + 1) // self.count

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by the sum over all processes; a missing one counts as 0."""
        if self.is_alone:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            gradients = [each.grad for each in parameters if each.dtype == dtype and each.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            distributed.all_reduce(flat)
            for gradient, total in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def sum_of(self, value: float) -> float:
        """Sum a value over all processes."""
        if self.is_alone:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.item()

    def same(self, data: bytes | None) -> bytes | None:
        """Return the first process's bytes; what the others give is not looked at."""
        if self.is_alone:
            return data
        size = torch.tensor(-1 if data is None or not self.is_first else len(data))
        distributed.broadcast(size, 0)
        if size < 0:
            return None
        content = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first and data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        distributed.broadcast(content, 0)
        return content.numpy().tobytes()


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that torchrun has started for the time of the block; alone or in a group, begin nothing.

    A module of torch has the default group as default arguments. Imported inside the block (the first optimiser of a
    process does so) it would keep the group for ever, and gloo's threads with it, which may abort a process that ends.

    torchrun keeps one store for all starts of its processes. Each group has keys of its own in it: among an earlier
    group's a process would find the addresses of processes that have ended.
    """
    if not distributed.is_available() or distributed.is_initialized() or not distributed.is_torchelastic_launched():
        yield Processes()
        return
    importlib.import_module("torch.distributed.nn.functional")
    store, rank, count = next(c10d.rendezvous("env://", timeout=TIMEOUT))
    group = f"windtunnel/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{count}/{next(JOINS)}"
    store = c10d.PrefixStore(group, store)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    try:
        yield Processes()
    finally:
        distributed.destroy_process_group()
