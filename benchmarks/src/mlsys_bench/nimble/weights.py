"""Measure the cost per call of noticing that the model changed (docs/adr/0042, 0058), by each way there is.

All live in one process and take turns. The fastest of all calls shows the cost of the check on a quiet machine.

    mlsys bench nimble-weights nets=mlp,resnet50
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.profiling.turns import take_turns
from mlsys_nimble import Nimble
from mlsys_nimble.nets.resolve import load_model

from mlsys_bench.harness.text import rows_section
from mlsys_bench.nimble.zoo_nets import let_torchvision_load

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


ROUNDS, CALLS = 40, 10
KINDS = "versions", "pages", "samples", "bytes"
CALM_S = 10.0  # at most, until pages are trusted


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of a call by the option ``weights``."""

    net: str
    least_versions_ms: float
    least_pages_ms: float
    least_samples_ms: float
    least_bytes_ms: float
    median_versions_ms: float
    median_pages_ms: float
    median_samples_ms: float
    median_bytes_ms: float


def run(context: BenchContext, *, nets: tuple[str, ...] = ("mlp", "resnet20-cifar", "resnet50")) -> Section:
    """Time each kind of check on each net."""
    torch.set_num_threads(context.num_threads)
    let_torchvision_load()
    rows, notes = [], []
    for name in nets[:1] if context.is_quick else nets:
        net, inputs = load_model(name)
        models = {kind: Nimble(net).prepare(inputs, weights=kind, num_threads=context.num_threads) for kind in KINDS}
        notes.append(f"{name}: {_calm(models['pages'], inputs)}")
        calls = {kind: partial(model, *inputs) for kind, model in models.items()}
        num_rounds = 2 if context.is_quick else ROUNDS
        found = take_turns(calls, turn_s=0.0, num_rounds=num_rounds, fewest_calls=CALLS, idle_s=0.0)
        samples = [[each * 1e3 for turn in own for each in turn] for own in found.values()]
        rows.append(Row(name, *map(min, samples), *map(statistics.median, samples)))
    return rows_section("Nimble: cost of noticing changed weights", rows, *notes)


def _calm(model: Nimble, inputs: tuple[Any, ...]) -> str:
    """Call a model until it trusts the system's reports, and return how it notices changes."""
    assert model.prepared is not None
    watch, deadline_s = model.prepared.watch, time.monotonic() + CALM_S
    while not watch.is_calm and time.monotonic() < deadline_s:
        model(*inputs)
    return str(watch)
