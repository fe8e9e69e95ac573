"""transformers' continuous batching, the engine of ``transformers serve --continuous-batching``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


class PeerEngine:
    """The manager on the directory ``model``; settings: ``attention``, ``max_batch_tokens``, ``num_blocks``."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["num_threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=options["dtype"], attn_implementation=options["attention"]
        )
        self._manager = model.eval().init_continuous_batching(
            GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            ContinuousBatchingConfig(
                max_batch_tokens=options["max_batch_tokens"],
                num_blocks=options["num_blocks"],
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        self._num_read: dict[str, int] = {}

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        self._manager.add_request(prompt, request_id=str(key), max_new_tokens=num_tokens, streaming=True)

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        output = self._manager.get_result(timeout=timeout_s)
        if output is None:
            return []
        if output.error:
            raise RuntimeError(output.error)
        already = self._num_read.get(output.request_id, 0)
        self._num_read[output.request_id] = len(output.generated_tokens)
        return [(int(output.request_id), list(output.generated_tokens[already:]))]
