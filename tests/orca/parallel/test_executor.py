"""Several iterations in flight through stages: the tokens of one process under every policy, and no block lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from mlsys_core.errors import ServingError
from mlsys_core.loop import FinishReason, InlineExecutor
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.parallel.executor import greet
from mlsys_orca.parallel.messages import Done, Hello, encode
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.wiring import Wiring
from mlsys_orca.scheduling.batch import GenerationRequest

from tests.orca.conftest import tiny_metadata, tiny_tensors
from tests.orca.parallel.groups import hello_of, shape_of, stages_of
from tests.orca.parallel.loops import Run, requests_of

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = ("orca", "paged", "chunked", "request-level")
NUM_LAYERS = 6


@pytest.fixture
def loaded(make_gguf: Callable[..., Any]) -> LoadedModel:
    """A model of six layers, by torch's operators."""
    tensors = {}
    for layer in range(0, NUM_LAYERS, 2):
        for name, values in tiny_tensors(seed=layer).items():
            parts = name.split(".")
            if parts[0] == "blk":
                parts[1] = str(int(parts[1]) + layer)
            tensors[".".join(parts)] = values
    path = make_gguf({**tiny_metadata(), "llama.block_count": NUM_LAYERS}, tensors=tensors)
    return load_model(path, dtype="fp32", backend="torch")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("stages", "in_flight", "drafts"), [(2, 2, 0), (3, 3, 3), (3, 4, 0)])
def test_stages_give_the_tokens_of_one_process(
    loaded: LoadedModel, policy: str, stages: int, in_flight: int, drafts: int
) -> None:
    num_blocks = 5  # few: requests are preempted
    requests = requests_of(14)
    runner = Runner(loaded.model, new_kv_cache(loaded.model, num_blocks=num_blocks))
    alone = Run(InlineExecutor(runner.run), policy, num_blocks=num_blocks).tokens(requests)
    dones: list[Done] = []
    decoder: Any = loaded.model
    with stages_of(decoder, stages=stages, in_flight=in_flight, num_blocks=num_blocks, dones=dones) as executor:
        run = Run(executor, policy, num_blocks=num_blocks, drafts=drafts)
        assert run.tokens(requests) == alone
        assert run.tables.num_free_blocks == num_blocks
        if policy in ("paged", "chunked"):
            assert run.scheduler.pool.num_preemptions > 0
        if drafts:
            assert run.scheduler.pool.num_guessed > 0
    assert [done.number for done in dones] == list(range(len(dones)))


def test_several_iterations_are_in_flight(loaded: LoadedModel) -> None:
    decoder: Any = loaded.model
    with stages_of(decoder, stages=3) as executor:
        run = Run(executor, "orca", num_blocks=64)
        for request in requests_of(9):
            run.loop.submit(request, request.request_id)
        run.loop.step()
        assert run.loop.num_in_flight >= 2  # one has come back
        run.loop.drain()


def test_two_thousand_requests_with_cancellations_leave_every_block_free(loaded: LoadedModel) -> None:
    chance, num_blocks = random.Random(1), 24
    decoder: Any = loaded.model
    with stages_of(decoder, stages=2, num_blocks=num_blocks) as executor:
        run = Run(executor, "chunked", num_blocks=num_blocks)
        waiting = [
            GenerationRequest(request_id=f"r{i}", prompt_token_ids=(5,) * chance.randrange(1, 20), max_new_tokens=2)
            for i in range(2000)
        ]
        for request in waiting:
            run.loop.submit(request, request.request_id)
            if chance.random() < 0.8:
                run.loop.cancel(f"r{chance.randrange(2000)}")
            if chance.random() < 0.2:
                run.loop.step()
        run.loop.drain()
        reasons = [finished.reason for finished in run.collector.finished.values()]
        assert len(reasons) == 2000
        assert set(reasons) == {FinishReason.DONE, FinishReason.CANCELLED}
        assert run.tables.num_free_blocks == num_blocks


def test_a_wait_ends_when_interrupted_or_late(loaded: LoadedModel) -> None:
    decoder: Any = loaded.model
    with stages_of(decoder, stages=2) as executor:
        assert executor.wait(0) is None
        assert executor.wait(0.01) is None
        executor.interrupt()
        assert executor.wait(None) is None


def test_a_group_without_one_of_its_ranks_is_broken(loaded: LoadedModel) -> None:
    shape = shape_of(loaded.config, stages=2, in_flight=2)
    wiring = Wiring.new(shape)
    links = wiring.links()
    here = Placement(num_stages=2)
    theirs = wiring.ranks[here].links(shape, here)
    theirs.up.send(encode(hello_of(here)))
    wiring.hand_over(Placement(stage=1, num_stages=2))
    with pytest.raises(GroupBrokenError, match="rank 0 of stage 1 is gone"):
        greet(links, hello_of(here), timeout_s=5)
    assert theirs.up is not None
    assert theirs.down is not None
    for channel in (theirs.up, theirs.down, *theirs.onward, *links.down, *(channel for _, channel in links.ups)):
        channel.close()


@pytest.mark.parametrize("field", ["version", "recipe", "model"])
def test_a_rank_with_other_code_or_another_model_is_refused(loaded: LoadedModel, field: str) -> None:
    shape = shape_of(loaded.config, stages=1, in_flight=1)
    wiring = Wiring.new(shape)
    links, here = wiring.links(), Placement()
    theirs = wiring.ranks[here].links(shape, here)
    said = hello_of(here)
    changed = {name: getattr(said, name) for name in Hello.__struct_fields__} | {field: "another"}
    theirs.up.send(encode(Hello(**changed)))
    with pytest.raises(ServingError, match=f"has {field} 'another'"):
        greet(links, hello_of(here), timeout_s=5)
    theirs.up.close()
    with pytest.raises(GroupBrokenError):
        greet(links, hello_of(here), timeout_s=5)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said(loaded: LoadedModel) -> None:
    wiring = Wiring.new(shape_of(loaded.config, stages=1, in_flight=1))
    with pytest.raises(ServingError, match="did not come within 0 s"):
        greet(wiring.links(), hello_of(Placement()), timeout_s=0.01)
