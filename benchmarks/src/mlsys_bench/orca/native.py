"""One iteration of a decoder: native kernels against torch's operators, and against the machine's memory bandwidth.

Both run the same batches in turn; before any timing their logits are compared. A request's logits alone are compared,
bit by bit, with its logits beside others: both paths are asked, so the table shows which of them can promise equality
and the cost of that promise. The bound of a decode of one token is the time to read all weights once, at the rate at
which these threads read memory in the same run.

    mlsys bench orca-native model=DIRECTORY weights=bf16,int8 --threads 2
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.models import resolve_model
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor

from mlsys_bench.harness.race import Case, race, speed_up
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

BLOCK = 16
PAST = 192  # tokens of context that a decode has
# name -> (requests, rows of each, whether they have a past)
BATCHES = {"1 token": (1, 1), "8 tokens": (8, 1), "64 tokens": (64, 1), "prompt of 256": (1, 256)}
FORMS = {"fp32": ("fp32", "float"), "bf16": ("bf16", "float"), "int8": ("bf16", "int8"), "int4": ("bf16", "int4")}


@dataclass(frozen=True, slots=True)
class Row:
    """One batch under one form of weights."""

    weights: str
    batch: str
    native_ms: float  # median
    torch_ms: float  # median
    speedup: float  # median of the ratios within rounds
    bound_ms: float | None  # of one token: all weights read once
    native_is_invariant: bool
    torch_is_invariant: bool
    largest_difference: float  # of logits, over their standard deviation


def batch_of(num_requests: int, num_rows: int, *, first: int = 0) -> IterationBatch:
    """Build a batch of requests with ``num_rows`` new tokens each, after :data:`PAST` if that is one."""
    builder, past = BatchBuilder(), PAST if num_rows == 1 else 0
    blocks = -(-(PAST + 256) // BLOCK)
    for request in range(first, first + num_requests):
        ids = [(7919 * request + 31 * position) % 30_000 + 100 for position in range(past, past + num_rows)]
        table = tuple(range(blocks * request, blocks * (request + 1)))
        builder.add(str(request), ids, num_computed_tokens=past, block_table=table, sampling=SamplingParams())
    return builder.build()


class CachedModel:
    """A model with a cache that holds a past for each of ``num_requests`` requests."""

    def __init__(self, path: Path, form: str, backend: str, *, num_threads: int, num_requests: int) -> None:
        dtype, weights = FORMS[form]
        model = load_model(path, dtype=dtype, weights=weights, backend=backend).model  # type: ignore[arg-type]
        self.model = model.with_threads(num_threads) if isinstance(model, NativeDecoder) else model
        self.cache = new_kv_cache(self.model, num_blocks=num_requests * -(-(PAST + 256) // BLOCK), block_size=BLOCK)
        self.num_requests = num_requests
        for request in range(num_requests):
            builder = BatchBuilder()
            ids = [(7919 * request + 31 * position) % 30_000 + 100 for position in range(PAST)]
            table = batch_of(1, 1, first=request).requests[0].block_table
            builder.add("past", ids, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
            self.run(builder.build())

    def run(self, batch: IterationBatch) -> Tensor:
        """Return the logits of one iteration."""
        with torch.inference_mode():
            return self.model(ForwardInputs(batch, block_size=BLOCK, device="cpu"), self.cache)

    def is_invariant(self) -> bool:
        """Return whether logits are equal to the bit alone and in a batch, and for a prompt in chunks and whole."""
        together = self.run(batch_of(self.num_requests, 1))
        alone = {i: self.run(batch_of(1, 1, first=i))[0] for i in range(0, self.num_requests, 7)}
        whole = self.run(self._prompt(0, 100))
        chunks = [self.run(self._prompt(first, stop)) for first, stop in ((0, 33), (33, 66), (66, 100))]
        return torch.equal(chunks[-1], whole) and all(torch.equal(row, together[i]) for i, row in alone.items())

    def _prompt(self, first: int, stop: int) -> IterationBatch:
        """Return rows ``first`` to ``stop`` of a prompt, in the blocks of the last request."""
        builder = BatchBuilder()
        ids = [31 * position % 30_000 + 100 for position in range(first, stop)]
        table = batch_of(1, 1, first=self.num_requests - 1).requests[0].block_table
        builder.add("prompt", ids, num_computed_tokens=first, block_table=table, sampling=SamplingParams())
        return builder.build()


def read_rate() -> float:
    """Return the bytes per millisecond that torch's threads read: the best of a few sums over 512 MiB."""
    data, seconds = torch.ones(2**27), []
    for _ in range(7):
        begin = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - begin)
    return data.nbytes / min(seconds) / 1e3


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the standard deviation of ``expected``."""
    return float((logits - expected).abs().max() / expected.std())


def compare(path: Path, form: str, *, num_threads: int, num_requests: int, num_rounds: int, turn_s: float) -> list[Row]:
    """Measure all batches of up to ``num_requests`` requests under one form of weights.

    Raises:
        MlsysError: the logits differ.
    """
    torchs, native = (
        CachedModel(path, form, backend, num_threads=num_threads, num_requests=num_requests)
        for backend in ("torch", "native")
    )
    assert isinstance(native.model, NativeDecoder)
    invariant = native.is_invariant(), torchs.is_invariant()
    rows = []
    for name, shape in BATCHES.items():
        if shape[0] > num_requests:
            continue
        batch = batch_of(*shape)
        outcomes = race(
            {key: partial(Case, partial(model.run, batch)) for key, model in (("torch", torchs), ("native", native))},
            difference=difference,
            tolerance=1e-3 if form == "fp32" else 0.5,
            turn_s=turn_s,
            num_rounds=num_rounds,
        )
        ours, theirs = outcomes["native"], outcomes["torch"]
        speedup, ours_s, theirs_s = speed_up(ours, theirs), ours.median_s, theirs.median_s
        if speedup is None or ours_s is None or theirs_s is None or ours.difference is None:
            raise MlsysError(f"{form}, {name}: native {ours.status} {ours.note}, torch {theirs.status} {theirs.note}")
        bound_ms = native.model.nbytes / read_rate() if name == "1 token" else None
        rows.append(Row(form, name, ours_s * 1e3, theirs_s * 1e3, speedup, bound_ms, *invariant, ours.difference))
    return rows


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    weights: tuple[str, ...] = tuple(FORMS),
    rounds: int = 3,
) -> Section:
    """Measure each form of weights.

    Args:
        context: The suite's context; quick has the first form, few requests and one short round.
        model: A name, a GGUF file or a folder.
        weights: Names in :data:`FORMS`.
        rounds: Turns of each path on each batch.
    """
    if unknown := set(weights) - FORMS.keys():
        raise InvalidInputError(f"no form of weights is called {min(unknown)!r}: there are {', '.join(FORMS)}")
    num_requests, turn_s = 64, 0.3
    if context.is_quick:
        weights, rounds, num_requests, turn_s = weights[:1], 1, 8, 0.0
    torch.set_num_threads(context.num_threads)
    path = resolve_model(model, settings().cache_dir)
    rows = []
    for form in weights:
        context.console.print(f"{form} ...")
        rows += compare(
            path, form, num_threads=context.num_threads, num_requests=num_requests, num_rounds=rounds, turn_s=turn_s
        )
    return rows_section("Orca: an iteration", rows, model=model, threads=context.num_threads)
