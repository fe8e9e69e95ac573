"""All places of one model in the threads of this process, and checkpoints of the families' shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import all_places
from mlsys_orca.parallel.shard import Shard, largest_of
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor

NUM_BLOCKS, BLOCK = 24, 16
VOCAB = 259  # no number of ranks divides it
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    "llama-of-3": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 288}),
    "qwen2": ("Qwen2", {"hidden_size": 256, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"hidden_size": 256, "sliding_window": 12}),
    "gpt2": ("GPT2", {"hidden_size": 256}),
    "gpt2-untied": ("GPT2", {"hidden_size": 256, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 24, "sliding_window": 8}),
    "mixtral": ("Mixtral", {"hidden_size": 256, "num_local_experts": 5}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {  # what the others have not: for a degree or two
    "cohere": ("Cohere", {"hidden_size": 256, "use_qk_norm": True, "logit_scale": 2.0}),  # norms by head, of one tensor
    "granite": ("Granite", {"hidden_size": 256, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "olmo2": ("Olmo2", {}),  # by stages alone
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),  # likewise
    "deepseek_v3": (  # likewise
        "DeepseekV3",
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32}
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "head_dim": None}
        | {"moe_intermediate_size": 64, "num_key_value_heads": 8, "num_hidden_layers": 4, "first_k_dense_replace": 1},
    ),
}

EIGHT = {  # that 8 ranks and 8 stages divide
    f"{name}-of-8": (CASES[name][0], CASES[name][1] | {"num_key_value_heads": 8, "num_hidden_layers": 8})
    for name in ("llama", "qwen3", "gpt2", "phi3", "mixtral")
}


def write_checkpoint(path: Path, name: str) -> Path:
    """A directory as transformers saves one, with random weights."""
    import transformers

    torch.manual_seed(5)
    family, changes = (CASES | MORE | EIGHT)[name]
    config = getattr(transformers, f"{family}Config")(
        **{key: value for key, value in (SHAPE | changes).items() if value is not None}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are ones and biases zeros otherwise
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    return path


def some_batches(vocab_size: int = VOCAB) -> list[IterationBatch]:
    """Prompts, then chunks beside decodes, then decodes: rows of 1 to 40, blocks out of order."""
    lengths, batches = [40, 1, 17, 3], []
    tables = {0: (5, 2, 9, 11), 1: (0, 1), 2: (7, 3, 12), 3: (20, 4)}
    done = dict.fromkeys(tables, 0)
    for step in ([40, 1, 9, 3], [1, 1, 8, 1], [1, 1, 1, 1]):
        builder = BatchBuilder()
        for index, number in enumerate(step):
            ids = [(7 * (done[index] + i) + 13 * index) % vocab_size for i in range(number)]
            builder.add(
                str(index),
                ids,
                num_computed_tokens=done[index],
                block_table=tables[index],
                sampling=SamplingParams() if done[index] + number >= lengths[index] else None,
            )
            done[index] += number
        batches.append(builder.build())
    return batches


@dataclass
class Answer:
    """What comes of one iteration."""

    logits: Tensor  # [num_sampled, vocab]
    largest: list[int]


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """See that all iterations gave the same bits."""
    for iteration, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.logits, other.logits), iteration
        assert one.largest == other.largest, iteration


def run_whole(path: Path, batches: Sequence[IterationBatch], **options: Any) -> list[Answer]:
    """By one process."""
    model: Any = load_model(path, **options).model
    cache = new_kv_cache(model, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    found = []
    for batch in batches:
        logits = model(ForwardInputs(batch, block_size=BLOCK, device="cpu"), cache).clone()
        found.append(Answer(logits, logits.numpy().argmax(-1).tolist()))
    return found


def run_places(
    path: Path,
    batches: Sequence[IterationBatch],
    *,
    ranks: int,
    stages: int,
    num_threads: int = 1,
    **options: Any,
) -> list[Answer]:
    """By so many ranks of so many stages; each iteration for its logits, then again for its peaks."""
    places = all_places(tensor_parallel=ranks, pipeline_parallel=stages)
    shards: list[Any] = [load_shard(path, place, **options) for place in places]
    whole = shards[0].whole
    memories = [SharedReducer.create(whole, num_ranks=ranks) for _ in range(stages)]
    reducers = [SharedReducer(memories[p.stage], whole, rank=p.rank, num_ranks=ranks) for p in places]
    joined: list[Shard] = [
        shard.join(reducer if ranks > 1 else None, num_threads=num_threads)
        for shard, reducer in zip(shards, reducers, strict=True)
    ]
    caches = [shard.new_kv_cache(num_blocks=NUM_BLOCKS) for shard in joined]
    found = []
    with ThreadPoolExecutor(ranks) as pool:

        def run(stage: int, batch: IterationBatch, states: Any, outs: list[Any], needs_logits: bool) -> None:
            def one(rank: int) -> None:
                inputs = ForwardInputs(batch, block_size=BLOCK, device="cpu", needs_logits=needs_logits)
                at = stage * ranks + rank
                joined[at].run(inputs, states, outs[rank], caches[at])

            list(pool.map(one, range(ranks)))

        for batch in batches:
            num_sampled = len(batch.sampled)
            for needs_logits in (True, False):
                states = None
                for stage in range(stages - 1):
                    outs = [torch.full((batch.num_tokens, whole.hidden_size), torch.nan) for _ in range(ranks)]
                    run(stage, batch, states, outs, needs_logits)
                    assert all(torch.equal(out, outs[0]) for out in outs), "the ranks of a stage have one state"
                    states = outs[0]
                if needs_logits or joined[0].needs_logits:
                    logits = torch.full((num_sampled, whole.vocab_size), torch.nan)
                    run(stages - 1, batch, states, [logits] * ranks, needs_logits)
                    largest = logits.numpy().argmax(-1).tolist()
                else:
                    peaks = torch.empty(ranks, num_sampled, 2, dtype=torch.float64)
                    run(stages - 1, batch, states, list(peaks), needs_logits)
                    largest = largest_of(np.asarray(peaks)).tolist()
            found.append(Answer(logits, largest))
    return found
