"""Processes that train together: each takes its share of a batch's rows, and gradients are added up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from mlsys_core.errors import MlsysError
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TIMEOUT = datetime.timedelta(minutes=10)  # of a step: another process has died if it takes longer
POLL_S = 0.02  # between two looks at who has come
Address = tuple[str, int]  # host name or IP address, port


class WorkerLostError(MlsysError):
    """A process of the training is gone with its node, or was killed."""


class Processes:
    """Processes of torch.distributed's default group (started by torchrun, Ray or :mod:`.launch`); else this one."""

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


def meeting_point(host: str) -> TCPStore:
    """Open the store at which a group's processes meet, in the first of them; ``port`` of it is a free one.

    The port is taken from the start, so no other program can have it before the group needs it.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def come_to(address: Address, rank: int) -> TCPStore:
    """Connect to the first process's store, and say there that this process has come."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
    store.set(f"came/{rank}", "")
    return store


def wait_for_all(store: TCPStore, count: int, check: Callable[[], None]) -> None:
    """Wait in the first process until the others have come.

    Args:
        store: Their meeting point.
        count: Processes, with the first.
        check: Called again and again; raises once one of them cannot come.
    """
    others = [f"came/{rank}" for rank in range(1, count)]
    while not store.check(others):
        check()
        time.sleep(POLL_S)
