"""The suite ``batchmaker-loops``: a step of the compiled loops by rows, beside ``nn.LSTM``; one thread.

An LSTM with a table of words: the loops compute the hidden half of the product alone (8 h^2 operations a row),
``nn.LSTM`` computes both.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.replay.systems import Chains
from mlsys_core.profiling.turns import take_turns
from mlsys_core.report import Section, Table

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
STEPS = 10  # of a call


def run(context: BenchContext, *, hidden: int = 512, rows: tuple[int, ...] = ROWS) -> Section:
    """Time a step in turns; the best of all calls.

    Args:
        context: The suite's context; quick has two rounds.
        hidden: Hidden size.
        rows: Rows of a step.
    """
    torch.set_num_threads(1)
    chains = Chains(lstm_model(num_words=100, hidden_size=hidden).cells[0])
    fused = torch.nn.LSTM(hidden, hidden).eval()
    found: dict[str, dict[str, float]] = {}
    lines = []
    for size in rows:
        words, vectors = np.zeros((STEPS, size), dtype=np.int64), torch.randn(STEPS, size, hidden)
        calls: dict[str, Any] = {
            "loops_s": partial(chains.run, words, None, is_fresh=True),
            "nn_lstm_s": partial(fused, vectors),
        }
        with torch.inference_mode():
            turns = take_turns(calls, turn_s=0.05, num_rounds=2 if context.is_quick else 5)
        step = {name: min(map(min, own)) / STEPS for name, own in turns.items()}
        work = 8e-9 * size * hidden**2
        found[str(size)] = step
        cells = (f"{step[name] * 1e6:.0f}" for name in calls)
        lines.append([str(size), *cells, f"{work / step['loops_s']:.0f}", f"{2 * work / step['nn_lstm_s']:.0f}"])
    columns = ["rows", "loops, us", "nn.LSTM, us", "loops, GFLOP/s", "nn.LSTM, GFLOP/s"]
    table = Table(columns, lines, f"A step at h = {hidden}")
    return Section("BatchMaker: the compiled loops", [table], data={"hidden": hidden, "steps": found})
