"""SmolLM2-135M-Instruct under every policy: fifty prompts, joining one by one, answered as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("smollm2-conformance")]
NUM_TOKENS = 12
TOPICS = [
    *("rain", "bread", "the moon", "glass", "trains", "honey", "chess", "salt", "bridges", "whales"),
    *("ink", "mountains", "clocks", "tea", "volcanoes", "maps", "sleep", "copper", "islands", "kites"),
    *("the heart", "paper", "wolves", "music", "steel"),
]
TEXTS = [f"A short note on {topic}, for people who never" for topic in TOPICS]
QUESTIONS = [[{"role": "user", "content": f"Tell me one thing about {topic}."}] for topic in TOPICS]
# policy, its options, K/V blocks: nine hold two or three requests, of which twelve may run at a time
RUNS = {
    "orca": ("orca", {}, 60),
    "paged, preempting": ("paged", {}, 9),
    "chunked": ("chunked", {"max_batch_tokens": 40}, 60),
    "request-level": ("request-level", {"lockstep": False}, 60),
}


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    assert smollm2.chat_template is not None
    chats = [smollm2.chat_template.encode(messages, smollm2.tokenizer) for messages in QUESTIONS]
    return [smollm2.tokenizer.encode(text) for text in TEXTS] + chats


@pytest.fixture(scope="module")
def expected(
    reference_model: Any, prompts: list[list[int]], greedy_by_transformers: Callable[..., list[list[int]]]
) -> dict[str, list[int]]:
    answers = greedy_by_transformers(reference_model, prompts, NUM_TOKENS, pad_id=2)
    assert len(answers) == 50
    return {str(i): answer for i, answer in enumerate(answers)}


@pytest.mark.parametrize("run", RUNS)
def test_fifty_answers_are_those_of_transformers(
    smollm2: LoadedModel, prompts: list[list[int]], expected: dict[str, list[int]], run: str
) -> None:
    policy, options, num_blocks = RUNS[run]
    tables = BlockTables(num_blocks=num_blocks)
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=12,
        max_model_len=128,
        options=options,
    )
    runner = Runner(smollm2.model, new_kv_cache(smollm2.model, num_blocks=num_blocks))
    trace = [
        (
            0.7 * i,
            GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                max_new_tokens=NUM_TOKENS,
                stop_token_ids=smollm2.tokenizer.eos_ids,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    simulation = simulate(scheduler, SimulatedExecutor(lambda _: 1.0, runner.run), trace)
    answers = {
        served.request_id: [token.token_id for token in served.finished.result.tokens] for served in simulation.requests
    }
    assert answers == expected
    assert tables.num_free_blocks == num_blocks
    if run == "paged, preempting":
        assert scheduler.pool.num_preemptions > 0
