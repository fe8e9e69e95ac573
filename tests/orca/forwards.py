"""One forward of a model over whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor


@torch.inference_mode()
def logits_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits behind each token of each prompt, all prompts in one ragged batch."""
    cache, builder = new_kv_cache(model, num_blocks=8 * len(prompts), num_states=len(prompts)), BatchBuilder()
    for i, prompt in enumerate(prompts):
        table = tuple(range(8 * i, 8 * i + 8))
        builder.add(str(i), prompt, num_computed_tokens=0, block_table=table, sampling=SamplingParams(), state_slot=i)
    rows = range(sum(map(len, prompts)))
    inputs = ForwardInputs(builder.build(), block_size=cache.block_size, device="cpu", wanted=rows)
    return list(torch.split(model(inputs, cache).clone(), [len(prompt) for prompt in prompts]))
