"""A request's logits depend on no neighbour, chunk, preemption or shared prefix: equal to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.native.library import RUN
from mlsys_orca.backends.runner import Runner
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import kv_nbytes_per_token
from mlsys_orca.scheduling.batch import BatchBuilder, GenerationRequest, IterationBatch, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from torch import Tensor

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "weights": "float"},
    "bf16": {"dtype": "bf16", "weights": "float"},
    "int8": {"dtype": "fp32", "weights": "int8", "activations": "float"},
    "int4": {"dtype": "bf16", "weights": "int4", "activations": "float"},
    "int8-products": {"dtype": "bf16", "weights": "int8", "activations": "int8"},
    "int4-products": {"dtype": "fp32", "weights": "int4", "activations": "int8"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "orca": {},
    "paged": {},
    "chunked": {"max_batch_tokens": 11},
    "request-level": {"lockstep": False},
}


class Listening:
    """A native model that keeps the logits of every token it was asked for, by request and position."""

    def __init__(self, model: NativeDecoder) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.model = model
        self.heard: dict[tuple[str, int], list[Tensor]] = {}

    def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
        inputs.needs_logits = True
        logits = self.model(inputs, kv_cache)
        assert self.model.largest is not None
        assert self.model.largest.tolist() == logits.numpy().argmax(-1).tolist()
        for request, row in zip(inputs.batch.sampled, logits, strict=True):
            self.heard.setdefault((request.request_id, request.context_len), []).append(row.clone())
        return logits


def serve(model: NativeDecoder, policy: str, requests: list[GenerationRequest], *, num_blocks: int) -> Listening:
    """Run ``requests``, one more admitted every other iteration, over few blocks; returns what was heard."""
    listening = Listening(model)
    runner = Runner(listening, new_kv_cache(model, num_blocks=num_blocks))
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=BlockTables(num_blocks=num_blocks),
        max_batch_size=5,
        max_model_len=96,
        options=POLICIES[policy],
    )
    waiting, iteration = list(requests), 0
    while waiting or scheduler.num_unfinished:
        if waiting and (iteration % 2 == 0 or not scheduler.num_unfinished):
            scheduler.add(waiting.pop(0), now=float(iteration))
        batch = scheduler.next_batch(WorkerId(0), now=float(iteration))
        iteration += 1
        if isinstance(batch, IterationBatch):
            scheduler.complete(batch, runner.run(batch), now=float(iteration))
    return listening


def some_requests() -> list[GenerationRequest]:
    rng = random.Random(4)
    shared = [rng.randrange(32) for _ in range(33)]
    prompts = [shared[: rng.randrange(34)] + [rng.randrange(32) for _ in range(rng.randrange(1, 20))] for _ in range(9)]
    return [
        GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), max_new_tokens=rng.randrange(1, 24))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_gets_the_same_bits_under_any_policy_and_in_any_batch(make_gguf: Any, form: str, policy: str) -> None:
    model = load_model(make_gguf(), **FORMS[form], backend="native").model
    assert isinstance(model, NativeDecoder)
    requests = some_requests()
    alone: dict[tuple[str, int], Tensor] = {}
    for request in requests:
        heard = serve(model.with_threads(2), "orca", [request], num_blocks=6).heard
        alone |= {key: rows[0] for key, rows in heard.items()}
    # Few blocks: under paged and chunked, requests are preempted and prefixes shared.
    together = serve(model, policy, requests, num_blocks=10).heard
    assert together.keys() == alone.keys()
    for key, rows in together.items():
        for row in rows:
            assert torch.equal(row, alone[key]), key


@pytest.mark.parametrize(
    "other", [SamplingParams(), SamplingParams(num_logprobs=2), SamplingParams(temperature=0.7, seed=3)], ids=str
)
def test_logits_are_written_only_where_they_are_read(make_gguf: Any, other: SamplingParams) -> None:
    model = load_model(make_gguf(), dtype="fp32", backend="native").model
    seen: list[Tensor] = []

    class Watched:
        config, dtype, device = model.config, model.dtype, model.device
        needs: bool | None = None

        def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
            inputs.needs_logits = inputs.needs_logits or bool(self.needs)
            seen.append(model(inputs, kv_cache).clone())
            self.largest = model.largest
            return seen[-1]

    watched, tokens = Watched(), []
    for watched.needs in (None, True):
        builder = BatchBuilder()
        for block, sampling in enumerate((SamplingParams(), other)):
            builder.add(str(block), [3, 1, 4], num_computed_tokens=0, block_table=(block,), sampling=sampling)
        tokens.append(Runner(watched, new_kv_cache(model, num_blocks=2)).run(builder.build()).sampled)
    assert tokens[0] == tokens[1]
    assert seen[1].shape == (2, model.config.vocab_size)
    assert seen[0].shape == ((2, 0) if other == SamplingParams() else seen[1].shape)


def test_an_iteration_of_many_rows_is_cut_without_a_trace(make_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_gguf(), dtype="fp32", weights="float", backend="native").model
    assert isinstance(model, NativeDecoder)
    whole = serve(model, "orca", some_requests(), num_blocks=30).heard
    monkeypatch.setattr("mlsys_orca.backends.native.decoder._MOST_ROWS", 7)
    cut = serve(model, "orca", some_requests(), num_blocks=30).heard
    assert cut.keys() == whole.keys()
    for key, rows in cut.items():
        assert all(map(torch.equal, rows, whole[key])), key


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wanted", [[20], [3, 20, 21], [], [0, 5, 6, 7, 8, 22]], ids=str)
def test_rows_that_nobody_asks_for_change_nothing(make_gguf: Any, form: str, wanted: list[int]) -> None:
    model = load_model(make_gguf(), **FORMS[form], backend="native").model
    assert isinstance(model, NativeDecoder)
    builder = BatchBuilder()
    for block, num_tokens in enumerate((21, 1, 1)):  # a prompt beside two tokens
        ids = [(7 * position + block) % 50 + 1 for position in range(num_tokens)]
        table = (2 * block, 2 * block + 1)
        builder.add(str(block), ids, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
    batch = builder.build()

    def run(rows: list[int]) -> tuple[Tensor, Any]:
        cache = new_kv_cache(model, num_blocks=6)
        for tensor in (cache.keys, cache.values):
            tensor.zero_()
        return model(ForwardInputs(batch, block_size=16, device="cpu", wanted=rows), cache).clone(), cache

    (every, whole), (some, cache) = run(list(range(23))), run(wanted)
    assert some.shape == (len(wanted), model.config.vocab_size)
    assert torch.equal(some, every[wanted])
    assert torch.equal(cache.keys, whole.keys), "all tokens are kept, in the last layer too"
    assert torch.equal(cache.values, whole.values)


def test_an_engine_that_must_be_invariant_refuses_a_model_that_is_not(make_gguf: Any) -> None:
    config = EngineConfig(batch_invariant=True, max_batch_size=1)
    assert Engine(load_model(make_gguf()), config, available_nbytes=2**30).shape.is_batch_invariant
    with pytest.raises(InvalidInputError, match="only native models"):
        Engine(load_model(make_gguf(), backend="torch"), config, available_nbytes=2**30)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_where_in_the_cache_a_block_stands_changes_nothing(make_gguf: Any, dtype: Any) -> None:
    model = load_model(make_gguf(), dtype=dtype, weights="float", backend="native").model
    assert isinstance(model, NativeDecoder)
    assert model.config.num_layers > 1
    ids = [7 * position % 50 + 1 for position in range(40)]

    def logits(cache: Any, table: tuple[int, ...], first: int, stop: int, *, copies: Any = ()) -> Tensor:
        builder = BatchBuilder()
        cache.copy_blocks(copies)
        builder.add("a", ids[first:stop], num_computed_tokens=first, block_table=table, sampling=SamplingParams())
        return model(ForwardInputs(builder.build(), block_size=16, device="cpu"), cache).clone()

    near, far = new_kv_cache(model, num_blocks=3), new_kv_cache(model, num_blocks=3 * RUN)
    for cache in (near, far):
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    expected = [logits(near, (0, 1, 2), first, stop) for first, stop in ((0, 33), (33, 40))]
    scattered = (2 * RUN + 1, RUN - 1, RUN)
    assert torch.equal(logits(far, scattered, 0, 33), expected[0])
    copies = [(scattered[1], 3 * RUN - 1), (scattered[2], 0)]
    moved = (scattered[0], 3 * RUN - 1, 0)
    assert torch.equal(logits(far, moved, 33, 40, copies=copies), expected[1])
    assert near.nbytes == 3 * 16 * kv_nbytes_per_token(model.config, model.dtype)
