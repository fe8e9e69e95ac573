"""Scheduling policies in the engine: the four built in, a third party's own, and what a client sees of each."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlsys_core.config import read_settings
from mlsys_core.plugins import Registry, load_plugins
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest, GenerationResult, SampledToken

BUILT_IN = ["chunked", "orca", "paged", "request-level"]

PLUGIN = """
from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import PolicySpec

@hookimpl
def mlsys_register_policies():
    return [PolicySpec(name="shortest-first", kind="scheduling", help="x", factory="their_policy:Recorded")]
"""
MORE = """

MADE = []


class Recorded(ShortestFirst):
    def __init__(self, block_tables, *, max_batch_size, max_model_len, patience=1):
        super().__init__(block_tables, max_batch_size=max_batch_size, max_model_len=max_model_len)
        self.patience, self.started = patience, []
        MADE.append(self)

    def next_batch(self, worker, now):
        batch = super().next_batch(worker, now)
        self.started += [part.request_id for part in (batch.requests if batch else ()) if not part.num_computed_tokens]
        return batch
"""


def documented_policy() -> str:
    """The example of docs/orca.md."""
    page = (Path(__file__).parents[2] / "docs" / "orca.md").read_text()
    (code,) = [part for part in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "ShortestFirst" in part]
    return code


class EntryPoint:
    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name, self.value, self.load, self.dist = name, f"{name}_module", load, None


def load_registry(*modules: str) -> Registry:
    found = [EntryPoint(name, lambda name=name: importlib.import_module(name)) for name in modules]
    return load_plugins(read_settings({}), entry_points=found).registry


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Registry, ModuleType]:
    """A registry with Orca's policies and a third party's, and the module that has the latter."""
    (tmp_path / "their_plugin.py").write_text(PLUGIN)
    (tmp_path / "their_policy.py").write_text(documented_policy() + MORE)
    monkeypatch.syspath_prepend(tmp_path)
    registry = load_registry("mlsys_orca._plugin", "their_plugin")
    module = importlib.import_module("their_policy")
    module.MADE.clear()
    return registry, module


@pytest.fixture
def loaded(make_gguf: Callable[..., Path]) -> LoadedModel:
    return load_model(make_gguf(), dtype="fp32")


def request(name: str, prompt: list[int], new: int = 4) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), max_new_tokens=new)


async def collect(engine: Engine, asked: GenerationRequest) -> tuple[list[SampledToken], GenerationResult]:
    *tokens, result = [item async for item in engine.generate(asked)]
    return tokens, result


def serve(engine: Engine, *requests: GenerationRequest) -> list[tuple[list[SampledToken], GenerationResult]]:
    async def run() -> Any:
        return await asyncio.gather(*(collect(engine, each) for each in requests))

    with engine:
        return asyncio.run(run())


def test_a_third_partys_policy_serves(theirs: tuple[Registry, ModuleType], loaded: LoadedModel):
    registry, module = theirs
    requests = [request("long", [3] * 9), request("short", [4, 5]), request("middle", [6] * 5)]
    expected = serve(Engine(loaded, EngineConfig(), available_nbytes=2**30), *requests)
    config = EngineConfig(policy="shortest-first", policy_options={"patience": 7})
    engine = Engine(loaded, config, available_nbytes=2**30, registry=registry)
    assert serve(engine, *requests) == expected
    (policy,) = module.MADE
    assert policy.patience == 7
    assert sorted(policy.started) == ["long", "middle", "short"]
    assert policy.started.index("short") < policy.started.index("middle")
    assert engine.block_tables.num_free_blocks == engine.block_tables.num_blocks


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_gives_the_same_tokens_and_ends_with_all_blocks_free(policy: str, loaded: LoadedModel):
    requests = [request(str(i), [7 + i] * (3 + 20 * (i % 2)), new=3 + 9 * (i % 3)) for i in range(6)]
    expected = serve(Engine(loaded, EngineConfig(max_batch_size=1), available_nbytes=2**30), *requests)
    config = EngineConfig(policy=policy, max_batch_size=4, num_kv_tokens=64, max_model_len=48)
    engine = Engine(loaded, config, available_nbytes=2**30)
    answers = serve(engine, *requests)
    assert answers == expected
    for asked, (tokens, result) in zip(requests, answers, strict=True):
        assert tuple(tokens) == result.tokens
        assert len(tokens) == asked.max_new_tokens
    assert engine.block_tables.num_free_blocks == engine.block_tables.num_blocks


@pytest.mark.parametrize("policy", BUILT_IN)
def test_tokens_come_as_they_are_made_but_at_request_level(policy: str, loaded: LoadedModel):
    """Two requests of 6 and 2 tokens in one batch, and what each has got after every iteration."""

    async def run(engine: Engine) -> list[tuple[int, int]]:
        got: dict[str, list[Any]] = {"long": [], "short": []}

        async def read(asked: GenerationRequest) -> None:
            items = got[asked.request_id]
            async for item in engine.generate(asked):
                items.append(item)

        tasks = [asyncio.create_task(read(request(name, [5, 6], new=new))) for name, new in (("long", 6), ("short", 2))]
        await asyncio.sleep(0)  # both are submitted
        engine.core.loop.step()  # by hand, instead of the engine's thread; their arrival ends its wait
        seen = []
        while engine.num_unfinished:
            engine.core.loop.step()
            for _ in range(8):
                await asyncio.sleep(0)
            seen.append((len(got["long"]), len(got["short"])))
        await asyncio.gather(*tasks)
        return seen

    engine = Engine(loaded, EngineConfig(policy=policy, max_batch_size=2), available_nbytes=2**30)
    try:
        seen = asyncio.run(run(engine))
    finally:
        engine.close()
    if policy == "request-level":
        assert seen == [(0, 0)] * 5 + [(7, 3)], "both answers and their results when the batch has ended"
    else:
        assert seen == [(1, 1), (2, 3), (3, 3), (4, 3), (5, 3), (7, 3)]


def test_leaving_a_stream_early_frees_a_request_that_is_not_streamed(loaded: LoadedModel):
    async def run(engine: Engine) -> None:
        stream = engine.generate(request("a", [5, 6], new=20))
        await anext(stream)
        await stream.aclose()
        assert len((await collect(engine, request("b", [5, 6], new=2)))[0]) == 2

    engine = Engine(loaded, EngineConfig(policy="request-level"), available_nbytes=2**30)
    with engine:
        asyncio.run(run(engine))
    assert engine.block_tables.num_free_blocks == engine.block_tables.num_blocks


def test_an_unknown_policy_is_refused_before_the_model_is_loaded(capfd: pytest.CaptureFixture[str]):
    from mlsys_core.cli.main import run

    assert run(["orca", "serve", "no-such-model", "--policy", "fifo", "--port", "0"]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert "no scheduling policy is called 'fifo' (there are: chunked, orca, paged, request-level)" in error
