"""SmolLM2-135M-Instruct from its GGUF file: the same text, token for token, as transformers gives in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from mlsys_orca.text.tokenizer import Detokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("smollm2-conformance")]
Greedy = Callable[..., list[list[int]]]

NUM_TOKENS = 40
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


@pytest.mark.parametrize("index", range(len(PLAIN) + len(CHATS)))
def test_alone_the_answer_is_transformers_own(
    smollm2: LoadedModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    greedy_by_orca: Greedy,
    index: int,
) -> None:
    assert greedy_by_orca(smollm2, [prompts[index]], NUM_TOKENS) == [expected[index]]


def test_in_a_batch_that_requests_join_and_leave_the_answers_are_the_same(
    smollm2: LoadedModel, prompts: list[list[int]], expected: list[list[int]], greedy_by_orca: Greedy
) -> None:
    joins = [3 * (i // 2) for i in range(len(prompts))]
    assert greedy_by_orca(smollm2, prompts, NUM_TOKENS, joins=joins) == expected


def test_logits_agree(smollm2: LoadedModel, reference_model: Any, prompts: list[list[int]]) -> None:
    for prompt in prompts[::7]:
        cache = new_kv_cache(smollm2.model, num_blocks=16)
        builder = BatchBuilder()
        builder.add("a", prompt, num_computed_tokens=0, block_table=tuple(range(16)), sampling=SamplingParams())
        with torch.inference_mode():
            ours = smollm2.model(ForwardInputs(builder.build(), block_size=cache.block_size, device="cpu"), cache)
            theirs = reference_model(torch.tensor([prompt])).logits[:, -1]
        assert torch.allclose(ours, theirs, atol=2e-3)  # on logits of up to 30


def test_streamed_text_is_the_whole_text(smollm2: LoadedModel, expected: list[list[int]], prompts: Any) -> None:
    for prompt, answer in zip(prompts, expected, strict=True):
        stream = Detokenizer(smollm2.tokenizer, prompt_ids=prompt)
        text = "".join(map(stream.push, answer)) + stream.flush()
        assert text == smollm2.tokenizer.decode(answer)
