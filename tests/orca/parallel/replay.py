"""Iterations of a divided engine, computed again by one process.

torch's operators choose their loops by shapes, so a request's last bits depend on the rows beside it, and so on which
requests an iteration has. A divided engine has several iterations in flight, and makes others than one process does.
What must be equal to the bit is each iteration: so they are recorded as they run, and run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mlsys_orca.backends.runner import Runner
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput
from torch import Tensor

Iterations = Sequence[tuple[IterationBatch, IterationOutput]]


class Recorded:
    """An executor that notes what it ran, in the order in which it began.

    Args:
        executor: Runs the iterations.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._batches: list[IterationBatch] = []
        self._outputs: dict[int, Any] = {}

    def submit(self, batch: IterationBatch) -> None:
        """See :class:`~mlsys_core.loop.protocols.Executor`."""
        self._batches.append(batch)
        self._executor.submit(batch)

    def wait(self, timeout_s: float | None) -> Any:
        """See :class:`~mlsys_core.loop.protocols.Executor`."""
        found = self._executor.wait(timeout_s)
        if found is not None:
            self._outputs[id(found[0])] = found[1]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    @property
    def iterations(self) -> Iterations:
        """Batches and what came of them, as they began."""
        return [(batch, self._outputs[id(batch)]) for batch in self._batches]


class SlicedModel:
    """All of a model in this process, its sums in the slices that ranks have.

    It is a :class:`~mlsys_orca.model.decoder.DecoderModel`, as ``--sliced`` runs it in a process of its own.

    Args:
        path: The model.
        adapters: By key; with None the model takes none.
        options: As of :func:`~mlsys_orca.parallel.loading.load_shard`.
    """

    def __init__(self, path: Any, *, adapters: Any = None, **options: Any) -> None:
        shard: Any = load_shard(path, Placement(), slices=True, takes_adapters=adapters is not None, **options)
        for key, files in (adapters or {}).items():
            shard.add_adapter(key, files)
        self._shard = shard.join(None, num_threads=1)
        self.config, self.dtype, self.device = shard.whole, shard.dtype, shard.device

    def new_kv_cache(self, *, num_blocks: int) -> KVCache:
        """Return an empty cache."""
        cache: KVCache = self._shard.new_kv_cache(num_blocks=num_blocks)
        return cache

    def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""
        logits = torch.empty(len(inputs.wanted), self.config.vocab_size)
        inputs.needs_logits = True
        self._shard.run(inputs, None, logits, kv_cache)
        return logits


def first_difference(iterations: Iterations, model: Any, kv_cache: Any) -> int | None:
    """Run iterations again in one process; return the number of the first whose output differs in any bit."""
    runner = Runner(model, kv_cache)
    for number, (batch, output) in enumerate(iterations):
        if runner.run(batch) != output:
            return number
    return None
