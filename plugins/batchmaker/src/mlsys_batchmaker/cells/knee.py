"""The knee of a cell: beyond which batch size more requests cost time and bring no throughput (BatchMaker, Fig. 3).

Cell -> profile table -> b_max, the maximum batch size that the scheduler will use for the cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from mlsys_core.device import Device
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.profile_table import ProfileTable, measure

from mlsys_batchmaker.cells.lstm import LSTMCell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT = "lstm-cell"
_MAX_GATES = 2**30


def profile_lstm_cell(
    hidden_size: int,
    batch_sizes: Sequence[int],
    *,
    num_threads: int,
    warmup: int = 2,
    repeats: int = 5,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    device: Device | None = None,
) -> ProfileTable:
    """Time one step of an LSTM cell of random weights, float32, at each batch size.

    Args:
        hidden_size: Width of the states, and of the input as in the paper: the multiplication is b x 2h by 2h x 4h.
        batch_sizes: Rising.
        num_threads: Threads of torch while measuring; set back after it.
        warmup: Untimed passes over all batch sizes.
        repeats: Timed passes; the median is kept.
        seed: Seed of the weights and inputs.
        progress: Called as ``progress(done, total)`` after each run.
        device: Device to run on; None: the CPU.

    Returns:
        A table with the one unit ``UNIT``.

    Raises:
        InvalidInputError: a number is out of range; nothing was run then.

    Example:
        >>> profile_lstm_cell(16, [1, 2], num_threads=1, repeats=1)[UNIT].batch_sizes
        (1, 2)
    """
    if num_threads < 1:
        raise InvalidInputError(f"num_threads={num_threads}: at least 1 is needed")
    largest = max([1, *batch_sizes])
    if largest * 4 * hidden_size > _MAX_GATES or 8 * hidden_size**2 > _MAX_GATES:
        raise InvalidInputError(
            f"a batch of {largest} with hidden size {hidden_size} does not fit: neither the {4 * hidden_size} gates of "
            f"each row nor the weights may come to more than {_MAX_GATES:,} numbers (4 GiB)"
        )
    rng = torch.Generator().manual_seed(seed)
    cell = LSTMCell(hidden_size, hidden_size)
    with torch.no_grad():
        cell.weight.uniform_(-(hidden_size**-0.5), hidden_size**-0.5, generator=rng)
    inputs = torch.randn(3, largest, hidden_size, generator=rng)
    wait = _nothing
    if device is not None and device.kind != "cpu":
        cell, inputs, wait = cell.to(device.torch_name), inputs.to(device.torch_name), device.synchronize

    def run(_: str, batch_size: int) -> None:
        cell(*inputs[:, :batch_size])
        wait()

    with _threads(num_threads), torch.inference_mode():
        return measure([UNIT], batch_sizes, run=run, warmup=warmup, repeats=repeats, progress=progress)


def knee_figure(table: ProfileTable, b_max: int, *, title: str) -> Figure:
    """Plot latency of a batch against throughput, a marker for each batch size, as in the paper's figure 3."""
    from matplotlib.figure import Figure
    from mlsys_core.plot import PALETTE

    profile = table[UNIT]
    rates = [table.throughput(UNIT, size) for size in profile.batch_sizes]
    latencies_ms = [seconds * 1e3 for seconds in profile.seconds]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates, latencies_ms, marker="o", color=PALETTE[0])
    at = profile.batch_sizes.index(b_max)
    axes.plot(rates[at], latencies_ms[at], marker="o", markersize=12, fillstyle="none", color=PALETTE[1])
    for size, rate, latency_ms in zip(profile.batch_sizes, rates, latencies_ms, strict=True):
        axes.annotate(str(size), (rate, latency_ms), textcoords="offset points", xytext=(6, -10), fontsize="small")
    axes.set(xlabel="throughput (cells/s)", ylabel="latency of a batch (ms)", title=title, yscale="log")
    axes.set_xlim(left=0)
    axes.grid(visible=True, alpha=0.35)
    return figure


def _nothing() -> None:
    """Do nothing: the host has done its work when a call returns."""


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
