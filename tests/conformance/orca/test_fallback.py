"""Architectures that no family of ours runs, through transformers: its own answers, whatever the policy, in fp32."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_orca.backends.transformers.decoder import TransformersDecoder
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SamplingParams

from tests.conformance.orca.families import SMALL, Case, write_checkpoint
from tests.conformance.orca.served import serve

VOCAB, NUM_TOKENS = 256, 64
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
POLICIES: dict[str, dict[str, Any]] = {"orca": {}, "paged": {}, "chunked": {"max_batch_tokens": 24}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' name, what differs from SHAPE
    "exaone4": (
        "Exaone4",  # norms of heads, a window with positions and full attention without
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-neox": ("GPTNeoX", {}),  # both branches of a layer side by side
    "helium": ("Helium", {"head_dim": 16}),  # interleaved rotary
    "olmo": ("Olmo", {"clip_qkv": 0.8}),
    "opt": ("OPT", {"ffn_dim": 112, "init_std": 0.2}),  # learned positions
    "phi": ("Phi", {"num_key_value_heads": 4}),
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
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
}


@dataclass(frozen=True)
class Reference:
    """A directory, and what transformers' own attention makes of the prompts."""

    path: Path
    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the tokens


@pytest.fixture(scope="module", params=CASES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, greedy_by_transformers: Any
) -> Reference:
    path = tmp_path_factory.mktemp(request.param)
    name, changes = CASES[request.param]
    model = write_checkpoint(path, Case(name, SMALL | changes))
    tokens = greedy_by_transformers(model, PROMPTS, NUM_TOKENS, pad_id=2)
    with torch.inference_mode():
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
    sampling = {"sampling": SamplingParams(num_logprobs=1)}
    run = serve(
        loaded.model,
        policy,
        PROMPTS,
        num_tokens=NUM_TOKENS,
        num_blocks=120,
        max_batch_size=16,
        every_s=3.0,
        request=lambda _: sampling,
        **POLICIES[policy],
    )
    assert run.token_ids == reference.tokens
    for answer, logprobs in zip(run.answers, reference.logprobs, strict=True):
        assert [token.logprob for token in answer] == pytest.approx(logprobs, abs=1e-4)


def test_the_route_is_logged_once_and_bf16_loads(reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mlsys_orca"):
        rounded = load_model(reference.path, dtype="bf16")
    routes = [record.message for record in caplog.records if "runs through transformers" in record.message]
    assert len(routes) == 1
    assert rounded.model.dtype == torch.bfloat16
