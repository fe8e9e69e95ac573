"""Run one iteration: a batch of token ids in, the chosen tokens out.

The executor's inner half: the engine's loop (or a worker process) calls :meth:`Runner.run` with what the scheduler
planned. A runner keeps no request state: the scheduler owns the blocks of its cache. It never touches the process's
thread count: whoever owns the process wraps its loop in :func:`intra_op_threads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.iteration import NativeKVCache
from mlsys_orca.backends.sampler import choose, needs_logits, wanted_rows
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs, LogitsRoom
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput


class Runner:
    """Runner of a model's iterations over one K/V cache. Not thread-safe: one caller at a time.

    Args:
        model: A loaded decoder.
        kv_cache: Its cache, as :func:`~mlsys_orca.backends.native.decoder.new_kv_cache` makes it.

    Example:
        >>> loaded = load_model("model.gguf")  # doctest: +SKIP
        >>> cache = new_kv_cache(loaded.model, num_blocks=64)  # doctest: +SKIP
        >>> Runner(loaded.model, cache).run(batch).sampled  # doctest: +SKIP
        (SampledToken(request_id='a', token_id=42, logprob=None, top_logprobs=()),)
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache | NativeKVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._room = LogitsRoom()

    def run(self, batch: IterationBatch) -> IterationOutput:
        """Run one iteration of the model over ``batch`` and choose a token for each request that samples.

        Raises:
            MemoryPlanError: a request's block table is too short for its tokens.
            InvalidInputError: the batch is empty.
        """
        with torch.inference_mode():
            self.kv_cache.copy_blocks(batch.block_copies)
            logits = self.model(self._inputs(batch), self.kv_cache)
            return choose(batch, logits, largest=getattr(self.model, "largest", None))

    def _inputs(self, batch: IterationBatch) -> ForwardInputs:
        if not batch.requests:
            raise InvalidInputError("the batch is empty: an iteration needs at least one request")
        return ForwardInputs(
            batch,
            block_size=self.kv_cache.block_size,
            device=self.model.device,
            wanted=wanted_rows(batch),
            room=self._room if batch.is_plain else None,  # a prompt's scores may take much more, once
            needs_logits=needs_logits(batch),
        )


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Have torch's operators use ``num_threads`` threads inside the block, as before after it.

    torch keeps this number per process: enter it once, in the thread that will run iterations, and nowhere in a
    library.

    Raises:
        InvalidInputError: ``num_threads`` is below 1.

    Example:
        >>> with intra_op_threads(1):
        ...     torch.get_num_threads()
        1
    """
    if num_threads < 1:
        raise InvalidInputError(f"{num_threads} threads cannot run a model; at least 1 can")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
