"""Systems that serve a trace: cellular batching, and batching of whole requests (BatchMaker, section 7.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from mlsys_core.errors import MissingDependencyError
from mlsys_core.loop import ServeRequest, VirtualClock
from mlsys_core.loop.baselines import Bucketed, RequestBatch, ZeroBatch

from mlsys_batchmaker.cells.cell import Cell
from mlsys_batchmaker.engine import EngineConfig, make_scheduler, make_workers
from mlsys_batchmaker.models.model import Model
from mlsys_batchmaker.native.runner import Ints, PackedCell, Runner
from mlsys_batchmaker.replay.trace import Request, Served, System
from mlsys_batchmaker.scheduling.requests import CellRequest
from mlsys_batchmaker.workers.pool import host_rows

_WORDS = 1 << 18  # rows of the bank of words: 512 sentences of 512


def packed(cell: Cell) -> PackedCell:
    """Return the cell's compiled loops.

    Raises:
        MissingDependencyError: there is no C++ compiler.
    """
    if cell.packed is None:
        raise MissingDependencyError("baselines run on compiled loops, and no C++ compiler was found: install g++")
    return cell.packed


class Chains:
    """Rows of one cell whose chains all begin at once; row 0 of each bank is zeros, request i has row 1 + i.

    Args:
        cell: a chain's.
        banks: by port name, of states; others are made.
    """

    def __init__(self, cell: Cell, banks: dict[str, torch.Tensor] | None = None) -> None:
        self.banks = {} if banks is None else banks
        for port in (*cell.spec.inputs, *cell.spec.outputs):
            rows = _WORDS if port.name == "word" else 1024
            self.banks.setdefault(port.name, host_rows(rows, port.shape, port.dtype))
        inputs, outputs = ([self.banks[port.name] for port in ports] for ports in (cell.spec.inputs, cell.spec.outputs))
        self._num_inputs, self._num_outputs = len(inputs), len(outputs)
        self.runner = Runner(packed(cell), inputs, outputs)

    def run(self, words: np.ndarray, lengths: Ints | None, *, is_fresh: bool) -> None:
        """Compute words [steps, b] (a decoder: [1, b] for all its steps); fresh rows begin with zeros."""
        steps, size = words.shape
        self.banks["word"].numpy()[1 : 1 + words.size] = words.reshape(-1)
        rows = np.zeros((steps, size, self._num_inputs), dtype=np.int64)
        rows[:, :, 0] = 1 + np.arange(words.size).reshape(steps, size)
        if not is_fresh:
            rows[:, :, 1:] = 1 + np.arange(size)[:, None]
        self.runner.run(rows, np.repeat(1 + np.arange(size)[:, None], self._num_outputs, axis=1), lengths)


def decode(decoder: Chains, size: int, steps: int, first: int) -> np.ndarray:
    """Decode words [size, steps] from the states that are there; a row that says the stopping word drops out."""
    decoder.run(np.full((steps, size), first), None, is_fresh=False)
    at, rows = np.meshgrid(np.arange(steps), np.arange(size))
    return decoder.runner.results(0, at.reshape(-1), rows.reshape(-1)).reshape(size, steps)


_POOL_BYTES = 256 << 20
Make = Callable[[VirtualClock], System]
Compute = Callable[[Sequence[Request], int], Sequence[np.ndarray]]  # (requests, padded length) -> their outputs


def cellular(
    model: Model,
    *,
    round_s: float = 0.001,
    executor: Literal["cell", "chunk"],
    workers: int = 1,
    output: str = "hidden",
) -> Make:
    """Return a maker of BatchMaker itself."""
    config = EngineConfig(round_s=round_s, devices=("cpu",) * workers, executor=executor, pool_bytes=_POOL_BYTES)

    def make(clock: VirtualClock) -> System:
        scheduler, pools = make_scheduler(model, config)
        for bank in (bank for pool in pools for bank in pool.banks):
            bank.zero_()  # a server that ran for a while has all its pages

        def request(number: str, tensors: Request) -> CellRequest:
            unfolded = model.unfold(tensors)
            return CellRequest(number, unfolded.plan, unfolded.constants, grow=unfolded.grow)

        def unpack(result: Any, tensors: Request) -> Served:
            return Served(model.architecture.finish(tensors, result.values)[output], result.started_s)

        def stats() -> tuple[float, float]:
            return scheduler.counters.effective_batch_size, scheduler.counters.padding_waste

        return System(scheduler, make_workers(model, pools, config, clock), request, unpack, stats)

    return make


def request_level(
    compute: Callable[[], Compute],
    *,
    max_batch: int,
    bucket_width: int | None,
    length: Callable[[Request], int],
    workers: int = 1,
    pads: bool = True,
) -> Make:
    """Return a maker that batches whole requests: bucketed and padded, or (``bucket_width=None``) whatever waits.

    Args:
        compute: makes what runs a batch; each worker has its own.
        max_batch: most requests in a batch.
        bucket_width: width of the buckets.
        length: returns the length of a request, in cells.
        workers: number of workers.
        pads: True computes rows to the padded length.
    """

    def make(clock: VirtualClock) -> System:
        scheduler: Any
        if bucket_width is None:
            scheduler = ZeroBatch[Request, Served](max_batch_size=max_batch)
        else:
            scheduler = Bucketed[Request, Served](max_batch_size=max_batch, bucket_width=bucket_width)
        totals = {"rows": 0, "batches": 0, "cells": 0, "padded": 0}

        def worker() -> Callable[[RequestBatch[Request]], list[Served]]:
            computes = compute()

            def run(batch: RequestBatch[Request]) -> list[Served]:
                started_s = clock.now()
                with torch.inference_mode():
                    outputs = computes([request.payload for request in batch.requests], batch.padded_length)
                totals["rows"] += batch.size
                totals["batches"] += 1
                totals["cells"] += batch.num_units
                totals["padded"] += batch.num_padded_units if pads else batch.num_units
                return [Served(output, started_s) for output in outputs]

            return run

        return System(
            scheduler,
            [worker() for _ in range(workers)],
            lambda number, tensors: ServeRequest(number, tensors, length=length(tensors), arrival_s=clock.now()),
            lambda result, _: result,
            lambda: (totals["rows"] / max(1, totals["batches"]), 1 - totals["cells"] / max(1, totals["padded"])),
        )

    return make
