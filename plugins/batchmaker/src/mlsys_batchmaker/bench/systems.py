"""The contestants: cellular batching, and what it is compared with (BatchMaker, section 7.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from mlsys_core.serving import ServeRequest, VirtualClock
from mlsys_core.serving.baselines import Bucketed, ZeroBatch
from mlsys_core.serving.baselines.batch import RequestBatch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from mlsys_batchmaker.bench.replay import Request, Served, System
from mlsys_batchmaker.engine import EngineConfig, make_scheduler, make_workers
from mlsys_batchmaker.model import Model
from mlsys_batchmaker.scheduling.requests import CellRequest

_POOL_BYTES = 1 << 30
Make = Callable[[VirtualClock], System]


def cellular(model: Model, *, executor: Literal["cell", "chunk"], workers: int = 1, output: str = "hidden") -> Make:
    """BatchMaker itself."""
    config = EngineConfig(num_workers=workers, executor=executor, compiler="eager", pool_bytes=_POOL_BYTES)

    def make(clock: VirtualClock) -> System:
        scheduler, pools = make_scheduler(model, config)

        def request(number: str, tensors: Request) -> CellRequest:
            unfolded = model.unfold(tensors)
            return CellRequest(number, unfolded.plan, unfolded.constants)

        def unpack(result: Any, tensors: Request) -> Served:
            return Served(model.architecture.finish(tensors, result.values)[output], result.started_s)

        def stats() -> tuple[float, float]:
            return scheduler.counters.effective_batch_size, scheduler.counters.padding_waste

        return System(scheduler, make_workers(model, pools, config, clock), request, unpack, stats)

    return make


def request_level(
    compute: Callable[[Sequence[Request], int], Sequence[np.ndarray]],
    *,
    max_batch: int,
    bucket_width: int | None,
    length: Callable[[Request], int],
    workers: int = 1,
    pads: bool = True,
) -> Make:
    """Whole requests: bucketed and padded, or (``bucket_width=None``) whatever waits.

    Args:
        compute: (requests, padded length) -> their outputs.
        max_batch: most requests in a batch.
        bucket_width: of the buckets.
        length: of a request, in cells.
        workers: how many.
        pads: whether rows are computed to the padded length.
    """

    def make(clock: VirtualClock) -> System:
        scheduler: Any
        if bucket_width is None:
            scheduler = ZeroBatch[Request, Served](max_batch_size=max_batch)
        else:
            scheduler = Bucketed[Request, Served](max_batch_size=max_batch, bucket_width=bucket_width)
        totals = {"rows": 0, "batches": 0, "cells": 0, "padded": 0}

        def run(batch: RequestBatch[Request]) -> list[Served]:
            started_s = clock.now()
            torch.set_num_threads(1)
            with torch.inference_mode():
                outputs = compute([request.payload for request in batch.requests], batch.padded_length)
            totals["rows"] += batch.size
            totals["batches"] += 1
            totals["cells"] += batch.num_units
            totals["padded"] += batch.num_padded_units if pads else batch.num_units
            return [Served(output, started_s) for output in outputs]

        return System(
            scheduler,
            [run] * workers,
            lambda number, tensors: ServeRequest(number, tensors, length=length(tensors), arrival_s=clock.now()),
            lambda result, _: result,
            lambda: (totals["rows"] / max(1, totals["batches"]), 1 - totals["cells"] / max(1, totals["padded"])),
        )

    return make


def num_words(request: Request) -> int:
    """Cells of a sequence."""
    return len(request["words"])


def lstm_same_kernel(model: Model) -> Callable[[Sequence[Request], int], list[np.ndarray]]:
    """Padded, with the very code that cellular batching's chunks run."""
    cell: Any = model.cells[0].module

    def compute(requests: Sequence[Request], length: int) -> list[np.ndarray]:
        words = _padded(requests, length)
        zeros = torch.zeros(len(requests), *model.layout.banks[1][1])
        steps = cell.run_steps({1: zeros, 2: zeros}, {0: words}, (-1, 0, 1), [len(requests)] * length)
        return _pick(torch.stack([hidden for hidden, _ in steps]), requests)

    return compute


def lstm_fused(model: Model, *, packed: bool = False) -> Callable[[Sequence[Request], int], list[np.ndarray]]:
    """Padded, as one call of ``nn.LSTM``; or packed, without padding."""
    cell: Any = model.cells[0].module
    hidden_size: int = cell.lstm.hidden_size
    fused: Any = nn.LSTM(hidden_size, hidden_size).eval()
    with torch.no_grad():
        fused.weight_ih_l0.copy_(cell.lstm.weight[:hidden_size].t())
        fused.weight_hh_l0.copy_(cell.lstm.weight[hidden_size:].t())
        fused.bias_ih_l0.copy_(cell.lstm.bias)
        fused.bias_hh_l0.zero_()

    def compute(requests: Sequence[Request], length: int) -> list[np.ndarray]:
        inputs = cell.embedding(_padded(requests, length))
        if packed:
            lengths = torch.tensor([num_words(request) for request in requests])
            _, (last, _) = fused(pack_padded_sequence(inputs, lengths, enforce_sorted=False))
            return list(last[0].numpy())
        outputs, _ = fused(inputs)
        return _pick(outputs, requests)

    return compute


def seq2seq_same_kernel(model: Model) -> Callable[[Sequence[Request], int], list[np.ndarray]]:
    """Encoder and decoder of a bucket: both as long as the bucket's longest, with the same cells."""
    encoder, decoder = (each.module for each in model.cells)
    go = model.architecture.config()["go"]

    def compute(requests: Sequence[Request], length: int) -> list[np.ndarray]:
        words = _padded(requests, length)
        lengths = torch.tensor([num_words(request) for request in requests])
        hidden = state = torch.zeros(len(requests), *model.layout.banks[1][1])
        for step in range(length):
            new_hidden, new_state = encoder(words[step], hidden, state)
            alive = (lengths > step)[:, None]
            hidden, state = torch.where(alive, new_hidden, hidden), torch.where(alive, new_state, state)
        word = torch.full((len(requests),), go)
        said = []
        for _ in range(max(int(request["steps"][0]) for request in requests)):
            word, hidden, state = decoder(word, hidden, state)
            said.append(word)
        table = torch.stack(said, dim=1).numpy()
        return [row[: int(request["steps"][0])] for row, request in zip(table, requests, strict=True)]

    return compute


def tree_per_height(model: Model) -> Callable[[Sequence[Request], int], list[np.ndarray]]:
    """Dynamic batching as TensorFlow Fold's: all nodes of one height of all trees of the batch at once."""
    leaf, inner = (each.module for each in model.cells)

    def compute(requests: Sequence[Request], _: int) -> list[np.ndarray]:
        words, levels, roots, base = _merge(requests)
        hidden, state = torch.empty(base, *model.layout.banks[1][1]), torch.empty(base, *model.layout.banks[1][1])
        rows, numbers = words
        at = torch.tensor(rows)
        hidden[at], state[at] = leaf(torch.tensor(numbers))
        for nodes in levels:
            at, left, right = (torch.tensor(each) for each in zip(*nodes, strict=True))
            hidden[at], state[at] = inner(hidden[left], hidden[right], state[left], state[right])
        return [hidden[root].numpy() for root in roots]

    return compute


def tree_ideal(model: Model) -> Callable[[Sequence[Request], int], list[np.ndarray]]:
    """For trees of one shape only: the graph is fixed, each node one batch over all trees (section 7.5)."""
    leaf, inner = (each.module for each in model.cells)

    def compute(requests: Sequence[Request], _: int) -> list[np.ndarray]:
        words = torch.from_numpy(np.stack([request["words"] for request in requests], axis=1))
        nodes = [leaf(column) for column in words]
        for left, right in requests[0]["children"].tolist():
            nodes.append(inner(nodes[left][0], nodes[right][0], nodes[left][1], nodes[right][1]))
        return list(nodes[-1][0].numpy())

    return compute


def _merge(
    requests: Sequence[Request],
) -> tuple[tuple[list[int], list[int]], list[list[tuple[int, int, int]]], list[int], int]:
    """Rows and words of all leaves, (node, left, right) by height, roots, and the number of nodes."""
    rows: list[int] = []
    numbers: list[int] = []
    levels: list[list[tuple[int, int, int]]] = []
    roots: list[int] = []
    base = 0
    for request in requests:
        count = len(request["words"])
        rows += range(base, base + count)
        numbers += request["words"].tolist()
        heights = [0] * count
        for number, (left, right) in enumerate(request["children"].tolist()):
            height = max(heights[left], heights[right])
            heights.append(height + 1)
            if height == len(levels):
                levels.append([])
            levels[height].append((base + count + number, base + left, base + right))
        base += 2 * count - 1
        roots.append(base - 1)
    return (rows, numbers), levels, roots, base


def _padded(requests: Sequence[Request], length: int) -> torch.Tensor:
    """Words [length, requests]."""
    words = np.zeros((length, len(requests)), dtype=np.int64)
    for column, request in enumerate(requests):
        words[: len(request["words"]), column] = request["words"]
    return torch.from_numpy(words)


def _pick(outputs: torch.Tensor, requests: Sequence[Request]) -> list[np.ndarray]:
    """Each request's state at its own last step, of [length, requests, hidden]."""
    return [outputs[num_words(request) - 1, row].numpy().copy() for row, request in enumerate(requests)]
