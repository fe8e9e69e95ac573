"""Every policy with the real runner: greedy answers are transformers' own, whoever is preempted or shares blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, NEW, BLOCK = 256, 24, 4
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "orca": ("orca", {}),
    "paged": ("paged", {}),
    "paged, not shared": ("paged", {"prefix_caching": False}),
    "chunked": ("chunked", {"max_batch_tokens": 9}),
    "request-level": ("request-level", {}),
    "request-level, kinder": ("request-level", {"lockstep": False}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Llama with random weights, as transformers saves it, and transformers' own."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "t1"}}))
    return path, model


@pytest.fixture(scope="module")
def loaded(directory: tuple[Path, Any]) -> LoadedModel:
    return load_model(directory[0], dtype="fp32", backend="torch")


@pytest.fixture(scope="module")
def prompts(directory: tuple[Path, Any]) -> list[list[int]]:
    """16 ragged prompts; some begin alike, two are the same, and one goes on with another's answer."""
    random = Random(2)
    system = [random.randrange(2, VOCAB) for _ in range(18)]
    fresh = [[random.randrange(2, VOCAB) for _ in range(random.randrange(1, 30))] for _ in range(8)]
    alike = [system + [random.randrange(2, VOCAB) for _ in range(n)] for n in (1, 2, 5, 9)]
    whole = system[:16]  # ends with a block
    follow_up = [*alike[0], *answer(directory[1], alike[0])[:9], 77]
    return [*fresh[:4], *alike, whole, *fresh[4:], whole, follow_up, alike[1]]


@pytest.fixture(scope="module")
def expected(directory: tuple[Path, Any], prompts: list[list[int]]) -> dict[str, list[int]]:
    return {str(i): answer(directory[1], prompt) for i, prompt in enumerate(prompts)}


def answer(model: Any, prompt: list[int]) -> list[int]:
    """Greedy, by ``transformers.generate``, alone; it does not stop at an end token."""
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Served:
    answers: dict[str, tuple[SampledToken, ...]]
    scheduler: Any
    num_copies: int

    @property
    def token_ids(self) -> dict[str, list[int]]:
        return {name: [token.token_id for token in tokens] for name, tokens in self.answers.items()}


def serve(
    loaded: LoadedModel,
    name: str,
    trace: list[tuple[float, GenerationRequest]],
    *,
    num_blocks: int,
    max_batch_size: int,
    max_in_flight: int = 1,
) -> Served:
    """Serve ``trace``, an iteration per second of virtual time, and check that all blocks are free in the end."""
    policy, options = POLICIES[name]
    tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK)
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=max_batch_size,
        max_model_len=128,
        options=options,
    )
    cache = KVCache(loaded.config, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32)
    executor = SimulatedExecutor(lambda _: 1.0, Runner(loaded.model, cache).run, max_in_flight=max_in_flight)
    simulation = simulate(scheduler, executor, trace)
    assert tables.num_free_blocks == num_blocks
    return Served(
        {served.request_id: served.finished.result.tokens for served in simulation.requests},
        scheduler,
        sum(len(run.batch.block_copies) for run in simulation.runs),
    )


@pytest.mark.parametrize("num_blocks", [18, 200])
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_answers_are_those_of_transformers(
    name: str, num_blocks: int, loaded: LoadedModel, prompts: list[list[int]], expected: dict[str, list[int]]
) -> None:
    """Staggered arrivals, two batches in flight; 18 blocks do not hold two of the longer requests."""
    trace = [
        (1.5 * i, GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), max_new_tokens=NEW))
        for i, prompt in enumerate(prompts)
    ]
    served = serve(loaded, name, trace, num_blocks=num_blocks, max_batch_size=5, max_in_flight=2)
    assert served.token_ids == expected
    if name.startswith(("paged", "chunked")):
        is_shared = "not shared" not in name
        assert (served.scheduler.pool.num_preemptions > 5) == (num_blocks == 18)
        assert (served.scheduler.pool.num_cached_tokens > 50) == is_shared
        assert (served.num_copies > 0) == is_shared


@pytest.mark.parametrize("name", ["paged", "chunked"])
def test_a_preempted_request_samples_its_own_tokens(name: str, loaded: LoadedModel, prompts: list[list[int]]) -> None:
    """Against the same requests one by one, none preempted or sharing: tokens equal, log-probabilities to 1e-4."""
    trace = []
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.8, seed=i, num_logprobs=2)
        request = GenerationRequest(
            request_id=str(i), prompt_token_ids=tuple(prompt), max_new_tokens=NEW, sampling=sampling
        )
        trace.append((0.0, request))
    alone = serve(loaded, "orca", trace, num_blocks=40, max_batch_size=1)
    crowded = serve(loaded, name, trace, num_blocks=18, max_batch_size=6)
    assert crowded.scheduler.pool.num_preemptions > 5
    assert crowded.token_ids == alone.token_ids
    for request_id, tokens in alone.answers.items():
        expected = [token.logprob for token in tokens]
        assert [token.logprob for token in crowded.answers[request_id]] == pytest.approx(expected, abs=1e-4)
