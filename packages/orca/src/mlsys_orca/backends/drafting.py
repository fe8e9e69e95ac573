"""Guesses by a small model of the same tokenizer (speculative decoding; Leviathan et al., 2023).

Between the request pool, which asks for drafts (:class:`~mlsys_orca.scheduling.request_pool.Drafter`), and a runner of
the small model over keys and values of its own. A draft is sampled as the answer is, by the hash of the request's seed
and the position, so that both models draw alike where their distributions are alike. The sampler keeps a guess only
if it is what the large model samples there, so that no answer depends on drafts, greedy or with a seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables

_MOST_BEHIND = 256  # tokens that the small model computes before an iteration: a long prompt takes it several


class ModelDrafter:
    """Drafter with a model. Not thread-safe: the engine's thread calls it, between iterations.

    Args:
        model: The small model.
        num_blocks: Blocks of its keys and values.
        vocab_size: Tokens of the large model: others are no guesses.
        num_threads: Threads of a native model.
    """

    def __init__(self, model: DecoderModel, *, num_blocks: int, vocab_size: int, num_threads: int = 1) -> None:
        if isinstance(model, NativeDecoder):
            model = model.with_threads(num_threads)
        cache = new_kv_cache(model, num_blocks=num_blocks)
        self.tables = BlockTables(num_blocks=num_blocks, block_size=cache.block_size)
        self._runner = Runner(model, cache)
        self._vocab_size = vocab_size
        self._max_positions = model.config.max_positions
        self._computed: dict[str, list[int]] = {}  # tokens in the blocks, by request; who drafted last stands last

    def draft(self, request_id: str, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
        """Return up to ``max_tokens`` guesses at what follows ``token_ids``.

        None while a long prompt is computed, beyond the model's own context, and where its blocks do not suffice.
        """
        max_tokens = min(max_tokens, self._max_positions - len(token_ids))
        if max_tokens < 1:
            return []
        table = self._table(request_id, len(token_ids) + max_tokens)
        if table is None:
            return []
        computed = self._computed[request_id]
        while computed and computed != token_ids[: min(len(computed), len(token_ids) - 1)]:
            computed.pop()  # guesses that were wrong, or the last token, whose logits are wanted
        pending, guesses = list(token_ids[len(computed) :]), list[int]()
        if len(pending) > _MOST_BEHIND:
            self._run(request_id, pending[:_MOST_BEHIND], table, None)
            return []
        alike = SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
        )
        while len(guesses) < max_tokens:
            guess = self._run(request_id, pending, table, alike)
            if guess is None or guess >= self._vocab_size:
                break
            guesses.append(guess)
            pending = [guess]
        return guesses

    def forget(self, request_id: str) -> None:
        """Free the blocks of a request, if it has some."""
        if request_id in self._computed:
            del self._computed[request_id]
            self.tables.free(request_id)

    def _table(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Return blocks for that many tokens, those of others that drafted longest ago among them; None: too few."""
        if self.tables.num_blocks_for(num_tokens) > self.tables.num_blocks:
            return None
        if request_id in self._computed:
            self._computed[request_id] = self._computed.pop(request_id)
        while True:
            if request_id in self._computed:
                table = self.tables.grow(request_id, num_tokens)
            else:
                fits = self.tables.can_reserve(num_tokens)
                table = self.tables.reserve(request_id, num_tokens) if fits else None
            if table is not None:
                self._computed.setdefault(request_id, [])
                return table
            self.forget(next(iter(self._computed)))

    def _run(
        self, request_id: str, token_ids: list[int], table: tuple[int, ...], sampling: SamplingParams | None
    ) -> int | None:
        """Compute ``token_ids`` behind what is computed; return the next token, if it is to be sampled."""
        computed, builder = self._computed[request_id], BatchBuilder()
        builder.add(request_id, token_ids, num_computed_tokens=len(computed), block_table=table, sampling=sampling)
        sampled = self._runner.run(builder.build()).sampled
        computed += token_ids
        return sampled[0].token_id if sampled else None
