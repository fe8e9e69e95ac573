"""Values of ``/metrics`` while a crowded engine is stepped by hand, and of a policy that keeps no pool."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlsys_core.plugins import Registry
from mlsys_core.plugins.specs import PolicySpec
from mlsys_orca.api.metrics import EngineMetrics
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.batch import GenerationRequest
from mlsys_orca.scheduling.orca import IterationScheduler
from prometheus_client import CollectorRegistry, generate_latest


class WithoutPool:
    """The paper's policy, as if a third party had written it without a pool."""

    def __init__(self, *args: object, **options: object) -> None:
        own = IterationScheduler(*args, **options)
        self.add, self.cancel, self.wake_at, self.next_batch = own.add, own.cancel, own.wake_at, own.next_batch
        self.complete, self.fail, self.num_unfinished = own.complete, own.fail, 0


@pytest.fixture
def make_engine(
    make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[EngineConfig], Engine]]:
    loaded, engines = load_model(make_gguf(), dtype="fp32"), []
    registry = Registry()
    names = {"paged": "mlsys_orca.scheduling.paged:PagedScheduler", "poolless": "poolless_policy:WithoutPool"}
    monkeypatch.setitem(sys.modules, "poolless_policy", SimpleNamespace(WithoutPool=WithoutPool))
    for name, factory in names.items():
        registry.add(PolicySpec(name=name, kind="scheduling", help="x", factory=factory), "test")

    def make(config: EngineConfig) -> Engine:
        engines.append(Engine(loaded, config, available_nbytes=2**30, registry=registry))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def values_of(engine: Engine) -> dict[str, float]:
    """By name without the prefix; all carry the policy's name."""
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert {sample.labels["policy"] for sample in samples} == {engine.config.policy}
    assert b"mlsys_orca_kv_blocks_used" in generate_latest(registry)
    return {sample.name.removeprefix("mlsys_orca_"): sample.value for sample in samples}


def submit(engine: Engine, name: str, num_prompt: int, new: int) -> None:
    prompt = tuple(range(5, 5 + num_prompt))
    engine.core.loop.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, max_new_tokens=new), name)


def test_running_waiting_blocks_preemptions_and_hits(make_engine: Callable[[EngineConfig], Engine]) -> None:
    engine = make_engine(
        EngineConfig(
            policy="paged", max_batch_size=4, num_kv_tokens=64, max_model_len=64, policy_options={"watermark": 0}
        )
    )
    for name in ("a", "b", "c"):
        submit(engine, name, num_prompt=30, new=20)
    engine.core.loop.step()  # takes the interrupt of their arrival, or runs the first iteration
    while not (now := values_of(engine))["kv_blocks_used"]:
        engine.core.loop.step()
    assert now["kv_blocks"] == 4
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 1), "four blocks hold two prompts of two"
    assert now["kv_blocks_used"] == 4
    assert now["num_preemptions_total"] == 0
    while engine.num_unfinished:
        engine.core.loop.step()
    done = values_of(engine)
    assert done["num_preemptions_total"] >= 1, "two answers that outgrow their blocks cannot both stay"
    assert done["prefix_cache_hits_total"] >= 16, "the third prompt's first block was kept"
    assert (done["num_requests_unfinished"], done["kv_blocks_used"]) == (0, 0)
    assert (done["num_requests_running"], done["num_requests_waiting"]) == (0, 0)


def test_a_policy_without_a_request_pool_has_the_engines_metrics(
    make_engine: Callable[[EngineConfig], Engine],
) -> None:
    engine = make_engine(EngineConfig(policy="poolless", max_model_len=64))
    names = set(values_of(engine))
    assert names >= {"num_requests_unfinished", "kv_blocks", "kv_blocks_used", "generation_tokens_total"}
    assert not names & {"num_requests_running", "num_preemptions_total", "prefix_cache_hits_total"}
