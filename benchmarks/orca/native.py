"""One iteration of a decoder: native kernels against torch's operators, and against the machine's memory bandwidth.

Contestants run the same batches in turn; before any timing their logits are compared. A request's logits alone are
compared, bit by bit, with its logits beside others: both paths are asked, so the table shows which of them can promise
equality and the cost of that promise. The bound of a decode of one token is the time to read all weights once, at the
rate at which these threads read memory in the same run.

    python benchmarks/orca/native.py
    python benchmarks/orca/native.py --model DIRECTORY --threads 2 --json native.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from mlsys_core.environment import describe_environment
from mlsys_core.models import resolve_model
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor

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
    speedup: float  # median of the pairs' ratios
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


class Contestant:
    """A model with a cache that holds a past for every request."""

    def __init__(self, path: Path, form: str, backend: str, threads: int) -> None:
        dtype, weights = FORMS[form]
        model = load_model(path, dtype=dtype, weights=weights, backend=backend).model  # type: ignore[arg-type]
        self.model = model.with_threads(threads) if isinstance(model, NativeDecoder) else model
        self.cache = new_kv_cache(self.model, num_blocks=64 * -(-(PAST + 256) // BLOCK), block_size=BLOCK)
        for request in range(64):
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
        together = self.run(batch_of(64, 1))
        alone = {i: self.run(batch_of(1, 1, first=i))[0] for i in range(0, 64, 7)}
        whole = self.run(self._prompt(0, 100))
        chunks = [self.run(self._prompt(first, stop)) for first, stop in ((0, 33), (33, 66), (66, 100))]
        return torch.equal(chunks[-1], whole) and all(torch.equal(row, together[i]) for i, row in alone.items())

    @staticmethod
    def _prompt(first: int, stop: int) -> IterationBatch:
        """Return rows ``first`` to ``stop`` of a prompt, in the blocks of request 63."""
        builder = BatchBuilder()
        ids = [31 * position % 30_000 + 100 for position in range(first, stop)]
        table = batch_of(1, 1, first=63).requests[0].block_table
        builder.add("prompt", ids, num_computed_tokens=first, block_table=table, sampling=SamplingParams())
        return builder.build()


def milliseconds(work: Callable[[], object]) -> float:
    """Return the milliseconds of one call."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def read_rate() -> float:
    """Return the bytes per millisecond that torch's threads read: the best of a few sums over 512 MiB."""
    data = torch.ones(2**27)
    return data.nbytes / min(milliseconds(data.sum) for _ in range(7))


def compare(path: Path, form: str, threads: int, repeats: int) -> list[Row]:
    """Measure all batches under one form of weights."""
    native, torchs = (Contestant(path, form, backend, threads) for backend in ("native", "torch"))
    assert isinstance(native.model, NativeDecoder)
    invariant = native.is_invariant(), torchs.is_invariant()
    rows = []
    for name, shape in BATCHES.items():
        batch = batch_of(*shape)
        ours, theirs = native.run(batch), torchs.run(batch)
        difference = float((ours - theirs).abs().max() / theirs.std())
        if difference > (1e-3 if form == "fp32" else 0.5):
            raise SystemExit(f"{form}, {name}: the logits differ by {difference:.3g} of their standard deviation")
        pairs = [
            (milliseconds(lambda: native.run(batch)), milliseconds(lambda: torchs.run(batch)))  # noqa: B023
            for _ in range(repeats)
        ]
        bound = native.model.nbytes / read_rate() if name == "1 token" else None
        rows.append(
            Row(
                form,
                name,
                statistics.median(pair[0] for pair in pairs),
                statistics.median(pair[1] for pair in pairs),
                statistics.median(pair[1] / pair[0] for pair in pairs),
                bound,
                *invariant,
                difference,
            )
        )
    return rows


def main() -> None:
    """Print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a GGUF file or a directory")
    parser.add_argument("--weights", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model, Path.home() / ".cache" / "mlsys")
    rows = []
    print(f"{arguments.model}, {arguments.threads} threads; milliseconds, medians of {arguments.repeats}")
    print(
        f"{'weights':8} {'iteration':14} {'native':>8} {'torch':>8} {'ratio':>6} {'bound':>7}  same bits in any batch"
    )
    for form in arguments.weights:
        for row in compare(path, form, arguments.threads, arguments.repeats):
            rows.append(row)
            print(_line(row), flush=True)
    if arguments.json:
        record = {"environment": describe_environment(), "threads": arguments.threads}
        arguments.json.write_text(json.dumps(record | {"rows": [asdict(row) for row in rows]}, indent=1))


def _line(row: Row) -> str:
    bound = f"{row.bound_ms:7.2f}" if row.bound_ms else " " * 7
    promises = {"native": row.native_is_invariant, "torch": row.torch_is_invariant}
    return (
        f"{row.weights:8} {row.batch:14} {row.native_ms:8.2f} {row.torch_ms:8.2f} {row.speedup:6.2f} {bound}  "
        + ", ".join(f"{name} {'yes' if kept else 'no'}" for name, kept in promises.items())
    )


if __name__ == "__main__":
    main()
