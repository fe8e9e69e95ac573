"""Architectures that no family of ours runs, through transformers: its own answers, whatever the policy, in fp32."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.backends.transformers.decoder import TransformersDecoder
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

VOCAB, NUM_TOKENS, BLOCK = 256, 64, 16
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
POLICIES: dict[str, dict[str, Any]] = {"orca": {}, "paged": {}, "chunked": {"max_batch_tokens": 24}}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' name, what differs from SHAPE
    "exaone4": (
        "Exaone4",  # norms of heads, a window with positions and full attention without
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "helium": ("Helium", {"head_dim": 16}),  # interleaved rotary
    "olmo": ("Olmo", {"clip_qkv": 0.8}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],  # which our own forward does not have
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 24}),
}


@dataclass(frozen=True)
class Reference:
    """A directory, and what transformers' own attention makes of the prompts."""

    path: Path
    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the tokens


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A small random checkpoint as transformers saves one, no parameter left at a value that hides a mistake."""
    import transformers

    name, changes = CASES[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))

    width = max(LENGTHS)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 2
    padded = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    with torch.inference_mode():
        out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
        tokens = [row[width:].tolist() for row in out]
        logprobs = []
        for prompt, answer in zip(PROMPTS, tokens, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert logits.std() > 0.3  # distinct enough for greedy choices to mean something
            logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return Reference(path, tokens, logprobs)


@pytest.fixture(scope="module")
def loaded(reference: Reference) -> LoadedModel:
    return load_model(reference.path, dtype="fp32")


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_transformers(loaded: LoadedModel, reference: Reference, policy: str) -> None:
    """16 ragged prompts, a new one every third iteration; chunks end within prompts."""
    assert isinstance(loaded.model, TransformersDecoder)
    tables = BlockTables(num_blocks=120, block_size=BLOCK)
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=16,
        max_model_len=128,
        options=POLICIES[policy],
    )
    trace = [
        (
            3.0 * i,
            GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                max_new_tokens=NUM_TOKENS,
                sampling=SamplingParams(num_logprobs=1),
            ),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    cache = new_kv_cache(loaded.model, num_blocks=120, block_size=BLOCK)
    served = simulate(scheduler, SimulatedExecutor(lambda _: 1.0, Runner(loaded.model, cache).run), trace)
    answers = {int(request.request_id): request.finished.result.tokens for request in served.requests}
    for i, tokens in enumerate(reference.tokens):
        assert [token.token_id for token in answers[i]] == tokens
        assert [token.logprob for token in answers[i]] == pytest.approx(reference.logprobs[i], abs=1e-4)
    assert tables.num_free_blocks == 120


def test_the_route_is_logged_once_and_bf16_loads(reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mlsys_orca"):
        rounded = load_model(reference.path, dtype="bf16")
    routes = [record.message for record in caplog.records if "runs through transformers" in record.message]
    assert len(routes) == 1
    assert rounded.model.dtype == torch.bfloat16
