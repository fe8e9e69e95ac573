"""Recurrent layers: states go with their requests, whatever the company, the cuts, the threads and the policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.plugins import installed_plugins
from mlsys_orca import LLM
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.engine.core import plan_engine
from mlsys_orca.engine.fit import fit_of
from mlsys_orca.engine.settings import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.adapters import AdaptedDecoder
from mlsys_orca.model.config import RecurrentPart
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.parallel.placement import check_degrees
from mlsys_orca.scheduling.batch import BatchBuilder, Progress
from mlsys_orca.scheduling.block_tables import BlockTables
from torch import Tensor

from tests.conformance.orca import served
from tests.conformance.orca.families import MAMBA2, QWEN3_NEXT, SMALL, TOKENS, Case, write_checkpoint
from tests.conformance.orca.served import Served

VOCAB = 256
CASES = {  # state matrices of whole vectors, which are transposed for prompts
    "mamba2": Case("Mamba2", TOKENS | MAMBA2 | {"state_size": 32}),
    "qwen3_next": Case("Qwen3Next", SMALL | QWEN3_NEXT | {"linear_key_head_dim": 32}),
}
PROMPTS = [[(7 * i + 5 * j + 3) % VOCAB for j in range(length)] for i, length in enumerate([1, 30, 3, 70, 7])]
POLICIES: dict[str, dict[str, Any]] = {
    "orca": {},
    "paged": {"watermark": 0.0},
    "chunked": {"max_batch_tokens": 9},
    "request-level": {"lockstep": False},
}


@pytest.fixture(scope="module", params=CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, CASES[request.param])
    return path


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype="fp32", backend="native")


@torch.inference_mode()
def logits_of(model: Any, prompts: Sequence[list[int]], *, most: int = 1000) -> list[Tensor]:
    """Logits of all tokens, each prompt at most ``most`` tokens at a time, over states that others have left behind."""
    cache = new_kv_cache(model, num_blocks=8 * len(prompts), num_states=len(prompts))
    cache.states.floats.fill_(torch.nan)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for first in range(0, max(map(len, prompts)), most):
        builder, pieces = BatchBuilder(), []
        for i, prompt in enumerate(prompts):
            if piece := prompt[first : first + most]:
                table = tuple(range(8 * i, 8 * i + 8))
                builder.add(
                    str(i),
                    piece,
                    num_computed_tokens=first,
                    block_table=table,
                    sampling=None,
                    state_slot=len(prompts) - 1 - i,
                )
                pieces.append((i, len(piece)))
        rows = range(sum(length for _, length in pieces))
        inputs = ForwardInputs(builder.build(), block_size=cache.block_size, device="cpu", wanted=rows)
        parts = torch.split(model(inputs, cache).clone(), [length for _, length in pieces])
        for (i, _), part in zip(pieces, parts, strict=True):
            found[i].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_neither_company_nor_cuts_nor_threads_change_a_bit(path: Path, dtype: str) -> None:
    model: Any = load_model(path, dtype=dtype, backend="native").model
    assert isinstance(model, NativeDecoder)
    together = logits_of(model, PROMPTS)
    assert all(torch.isfinite(each).all() for each in together)
    for prompt, own in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits_of(model, [prompt])[0], own)
    for most in (1, 7, 32):
        for cut, own in zip(logits_of(model, PROMPTS, most=most), together, strict=True):
            assert torch.equal(cut, own)
    for one, own in zip(logits_of(model.with_threads(3), PROMPTS, most=40), together, strict=True):
        assert torch.equal(one, own)
    torchs = torch.cat(logits_of(load_model(path, dtype="fp32", backend="torch").model, PROMPTS, most=20))
    if dtype == "fp32":
        assert torch.allclose(torch.cat(together), torchs, atol=2e-4, rtol=1e-3)
    assert torch.corrcoef(torch.stack((torch.cat(together).flatten(), torchs.flatten())))[0, 1] > 0.99


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_products_are_near(path: Path, loaded: LoadedModel, weights: Any) -> None:
    exact = torch.cat(logits_of(loaded.model, PROMPTS[1:3])).flatten()
    model = load_model(path, dtype="fp32", backend="native", weights=weights).model
    rounded = torch.cat(logits_of(model, PROMPTS[1:3])).flatten()
    assert torch.corrcoef(torch.stack((exact, rounded)))[0, 1] > (0.99 if weights == "int8" else 0.5)


def serve(model: Any, policy: str, *, num_states: int, num_blocks: int = 12, progress: int = 0) -> Served:
    """Serve all prompts; ``progress``: tokens of an answer that another engine gave, whose states are lost."""
    return served.serve(
        model,
        policy,
        PROMPTS,
        num_tokens=20,
        num_blocks=num_blocks,
        num_states=num_states,
        max_batch_size=4,
        request=lambda i: {"progress": Progress(tuple(ANSWERS[model][i][:progress]), (), 0)} if progress else {},
        **POLICIES[policy],
    )


ANSWERS: dict[Any, list[list[int]]] = {}


def by_recomputing(model: Any) -> list[list[int]]:
    """Greedy answers, each token from a forward of all before it."""
    if model not in ANSWERS:
        ANSWERS[model] = []
        for prompt in PROMPTS:
            tokens = list(prompt)
            for _ in range(20):
                tokens.append(int(logits_of(model, [tokens])[0][-1].argmax()))
            ANSWERS[model].append(tokens[len(prompt) :])
    return ANSWERS[model]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_answers_of_each_alone(loaded: LoadedModel, policy: str) -> None:
    expected, num_preemptions = by_recomputing(loaded.model), 0
    for num_states, num_blocks in ((4, 12), (4, 8), (2, 12)):
        run = serve(loaded.model, policy, num_states=num_states, num_blocks=num_blocks)
        assert run.token_ids == expected
        assert run.pool.num_cached_tokens == 0
        slots = [run.tables.state_slot(str(i)) for i in range(num_states) if run.tables.reserve(str(i), 1)]
        assert sorted(slots) == list(range(num_states))  # all came back
        num_preemptions += run.pool.num_preemptions
    assert num_preemptions > 0 or policy != "paged"


def test_a_request_whose_state_was_lost_is_computed_again(loaded: LoadedModel) -> None:
    expected = by_recomputing(loaded.model)
    assert serve(loaded.model, "chunked", num_states=4, progress=6).token_ids == expected


def test_slots_come_and_go_with_blocks() -> None:
    tables, digests = BlockTables(num_blocks=8, block_size=2, num_states=2), [b"a", b"b"]
    first = tables.allocate("a", 4, digests)
    assert first is not None
    tables.publish("a", digests, num_computed_tokens=4)
    assert tables.num_cached_blocks == 0  # a state cannot be shared
    tables.reserve("b", 2)
    assert {tables.state_slot("a"), tables.state_slot("b")} == {0, 1}
    assert tables.allocate("c", 2) is None
    assert not tables.can_reserve(2)
    with pytest.raises(MemoryPlanError, match="state"):
        tables.reserve("c", 2)
    freed = tables.state_slot("a")
    tables.free("a")
    second = tables.allocate("c", 4, digests)
    assert second is not None
    assert (second.num_cached_tokens, tables.state_slot("c")) == (0, freed)


def test_what_states_cannot_do_is_refused_with_a_reason(path: Path, loaded: LoadedModel) -> None:
    with pytest.raises(InvalidInputError, match="no speculation"):
        LLM(path, speculate=2)
    with pytest.raises(InvalidInputError, match=r"(states of recurrent layers|do)"):
        check_degrees(loaded.config, tensor_parallel=2, pipeline_parallel=1)
    with pytest.raises(InvalidInputError, match="states are in one process"):
        check_degrees(loaded.config, tensor_parallel=1, pipeline_parallel=3)
    with pytest.raises(InvalidInputError, match="recurrent layers"):
        AdaptedDecoder(load_model(path, dtype="fp32", backend="torch").model, {})


def test_the_plan_has_room_for_states(loaded: LoadedModel) -> None:
    part, registry = loaded.config.recurrent, installed_plugins().registry
    assert part is not None
    shape, _, _ = plan_engine(loaded, EngineConfig(max_batch_size=3, max_model_len=64), 2**30, registry)
    assert (shape.num_states, shape.restores_blocks) == (3, False)
    assert shape.kv_nbytes >= 3 * part.nbytes
    with pytest.raises(InvalidInputError, match="lower --max-batch-size"):
        plan_engine(loaded, EngineConfig(max_batch_size=64, max_model_len=64), 64 * part.nbytes, registry)
    fit = fit_of(loaded, available_nbytes=100 * part.nbytes, tokens_per_request=8)
    assert fit.max_batch_size <= 12
    assert any(name == "states of recurrent layers" for name, _ in fit.rows())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mamba2", {"use_bias": True}, "use_bias"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("mamba2", {"n_groups": 3}, "cannot share"),
        ("mamba2", {"num_heads": 5}, "expand"),
        ("mamba2", {"hidden_act": "gelu"}, "other than silu"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layers are recurrent or not"),
        ("qwen3_next", {"linear_value_head_dim": 0}, "head_dim"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path, CASES[kind])
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(InvalidInputError, match=message):
        load_model(tmp_path, backend="native")


def test_sizes_of_a_state() -> None:
    part = RecurrentPart(
        rule="decay",
        layers=(True, False),
        num_heads=4,
        num_groups=2,
        head_dim=16,
        state_size=20,
        num_taps=4,
        norm_eps=1e-5,
    )
    assert (part.num_channels, part.num_floats, part.nbytes) == (144, 3 * 144 + 64 * 20, 4 * (3 * 144 + 64 * 20))
