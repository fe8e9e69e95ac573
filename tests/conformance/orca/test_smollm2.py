"""SmolLM2-135M-Instruct from its GGUF file: the same text, token for token, as transformers gives in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.text.tokenizer import Detokenizer

from tests.conformance.orca.served import serve
from tests.orca.forwards import logits_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("smollm2-conformance")]
Greedy = Callable[..., list[list[int]]]

NUM_TOKENS = 40
# policy, its options and sizes: nine blocks hold two or three requests, of which twelve may run at a time
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "each alone": ("orca", {"num_blocks": 60, "max_batch_size": 1}),
    "orca": ("orca", {"num_blocks": 128, "max_batch_size": 12}),
    "paged, preempting": ("paged", {"num_blocks": 9, "max_batch_size": 12}),
    "chunked": ("chunked", {"num_blocks": 128, "max_batch_size": 12, "max_batch_tokens": 40}),
    "request-level": ("request-level", {"num_blocks": 128, "max_batch_size": 12, "lockstep": False}),
}
PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 12 + 30?\nA:",
    "The three primary colours are",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "Water boils at a temperature of",
    "La tour Eiffel se trouve à",
    '{"name": "Ada", "born": 1815, "field": "',
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was checked",
]
CHATS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about autumn."}],
    [{"role": "user", "content": "List three fruits that are red."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [{"role": "user", "content": "Translate 'good morning' to Spanish."}],
    [{"role": "user", "content": "How do I reverse a list in Python?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Why do cats purr?"}],
    [{"role": "user", "content": "Give me a short recipe for pancakes."}],
    [{"role": "user", "content": "Explain 2 × 3 = 6 to a child 😀"}],
]


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    assert smollm2.chat_template is not None
    chats = [smollm2.chat_template.encode(messages, smollm2.tokenizer) for messages in CHATS]
    return [smollm2.tokenizer.encode(text) for text in PLAIN] + chats


@pytest.fixture(scope="module")
def expected(reference_model: Any, prompts: list[list[int]], greedy_by_transformers: Greedy) -> list[list[int]]:
    return greedy_by_transformers(reference_model, prompts, NUM_TOKENS, pad_id=2)


def test_prompts_end_and_do_not_end(expected: list[list[int]]) -> None:
    """The comparison covers answers that reach their end token and answers cut by the limit."""
    assert {len(answer) < NUM_TOKENS for answer in expected} == {True, False}


@pytest.mark.parametrize("run", RUNS)
def test_answers_are_those_of_transformers(
    smollm2: LoadedModel, prompts: list[list[int]], expected: list[list[int]], run: str
) -> None:
    policy, sizes = RUNS[run]
    stops = {"stop_token_ids": smollm2.tokenizer.eos_ids}
    served = serve(smollm2.model, policy, prompts, num_tokens=NUM_TOKENS, every_s=1.4, request=lambda _: stops, **sizes)
    assert served.token_ids == expected
    if run == "paged, preempting":
        assert served.pool.num_preemptions > 0


def test_logits_agree(smollm2: LoadedModel, reference_model: Any, prompts: list[list[int]]) -> None:
    for prompt in prompts[::7]:
        with torch.inference_mode():
            theirs = reference_model(torch.tensor([prompt])).logits[:, -1]
        ours = logits_of(smollm2.model, [prompt])[0][-1:]
        assert torch.allclose(ours, theirs, atol=2e-3)  # on logits of up to 30


def test_streamed_text_is_the_whole_text(smollm2: LoadedModel, expected: list[list[int]], prompts: Any) -> None:
    for prompt, answer in zip(prompts, expected, strict=True):
        stream = Detokenizer(smollm2.tokenizer, prompt_ids=prompt)
        text = "".join(map(stream.push, answer)) + stream.flush()
        assert text == smollm2.tokenizer.decode(answer)
