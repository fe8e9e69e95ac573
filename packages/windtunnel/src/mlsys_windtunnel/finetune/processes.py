"""Processes that train together: each takes its share of a batch's rows, and gradients are added up."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from mlsys_core.errors import MlsysError
from torch import Tensor, distributed


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


def free_port(host: str) -> int:
    """Return a port that nobody listens at now, of an address of this machine."""
    with socket.socket() as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
    return port
