from collections.abc import Sequence
from random import Random

import pytest
import torch
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_orca.backends.runner import Runner, intra_op_threads
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs, LogitsRoom
from mlsys_orca.model.kv_cache import KVCache, kv_nbytes_per_token
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
GREEDY = SamplingParams(num_logprobs=3)


def make_runner(loaded: LoadedModel, num_blocks: int = 64) -> Runner:
    return Runner(loaded.model, KVCache(loaded.config, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32))


def prompts(num: int) -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(260) for _ in range(random.randrange(1, 20))] for _ in range(num)]


class Request:
    """A request as a scheduler tracks it."""

    def __init__(
        self, prompt: Sequence[int], table: Sequence[int], *, chunk: int = 1000, sampling: SamplingParams = GREEDY
    ) -> None:
        self.tokens, self.table, self.chunk, self.sampling = list(prompt), tuple(table), chunk, sampling
        self.num_computed, self.logprobs = 0, list[float]()

    def add_to(self, builder: BatchBuilder, name: str) -> None:
        part = self.tokens[self.num_computed : self.num_computed + self.chunk]
        is_last = self.num_computed + len(part) == len(self.tokens)
        builder.add(
            name,
            part,
            num_computed_tokens=self.num_computed,
            block_table=self.table,
            sampling=self.sampling if is_last else None,
        )
        self.num_computed += len(part)


def run(runner: Runner, requests: dict[str, Request], num_iterations: int, joins: dict[str, int] | None = None) -> None:
    for iteration in range(num_iterations):
        builder = BatchBuilder()
        for name, request in requests.items():
            if iteration >= (joins or {}).get(name, 0):
                request.add_to(builder, name)
        for token in runner.run(builder.build()).sampled:
            requests[token.request_id].tokens.append(token.token_id)
            if token.logprob is not None:
                assert token.top_logprobs[0][0] == token.token_id
                requests[token.request_id].logprobs.append(token.logprob)


def alone(loaded: LoadedModel, prompt: list[int], num_tokens: int, *, sampling: SamplingParams = GREEDY) -> Request:
    request = Request(prompt, range(16), sampling=sampling)
    run(make_runner(loaded), {"r": request}, num_tokens)
    return request


def test_a_request_gets_the_same_alone_and_among_others_that_come_and_go(loaded: LoadedModel) -> None:
    blocks = list(range(64))
    Random(1).shuffle(blocks)  # tables all over the cache
    requests = {
        str(i): Request(prompt, blocks[8 * i : 8 * i + 8], chunk=3 if i % 2 else 1000)
        for i, prompt in enumerate(prompts(8))
    }
    run(make_runner(loaded), requests, 16, joins={str(i): i for i in range(8)})
    for prompt, request in zip(prompts(8), requests.values(), strict=True):
        assert len(request.logprobs) >= 4
        expected = alone(loaded, prompt, len(request.logprobs))
        assert request.tokens == expected.tokens
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_resumed_request_continues_as_if_never_interrupted(loaded: LoadedModel) -> None:
    whole = alone(loaded, prompts(1)[0], 10)
    cut = whole.tokens[: len(whole.tokens) - 6]  # the prompt and what was generated before the worker died
    assert alone(loaded, cut, 6).tokens == whole.tokens


def test_sampled_requests_draw_anew_at_each_position_and_resume_alike(loaded: LoadedModel) -> None:
    flat = SamplingParams(temperature=1e6, seed=8)  # all tokens alike, so a token is its random number
    whole = alone(loaded, [5, 6], 12, sampling=flat).tokens
    assert len(set(whole[2:])) > 8
    assert alone(loaded, whole[:7], 7, sampling=flat).tokens == whole


def test_an_iteration_of_chunks_alone_samples_nothing(loaded: LoadedModel) -> None:
    builder = BatchBuilder()
    builder.add("a", [3, 4, 5], num_computed_tokens=0, block_table=(0, 1), sampling=None)
    assert make_runner(loaded).run(builder.build()).sampled == ()


def test_impossible_batches_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        make_runner(loaded).run(BatchBuilder().build())
    builder = BatchBuilder()
    builder.add("a", [3] * 9, num_computed_tokens=0, block_table=(0, 1), sampling=GREEDY)
    with pytest.raises(MemoryPlanError, match="do not hold 9"):
        make_runner(loaded).run(builder.build())


def test_the_caches_size_is_what_a_budget_divides_by(loaded: LoadedModel) -> None:
    cache = KVCache(loaded.config, num_blocks=10, block_size=BLOCK, dtype=torch.bfloat16)
    assert cache.nbytes == 10 * BLOCK * kv_nbytes_per_token(loaded.config, torch.bfloat16)


def test_the_thread_count_is_the_owners_and_comes_back(loaded: LoadedModel) -> None:
    before = torch.get_num_threads()
    with intra_op_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        alone(loaded, [3], 1)
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_room_for_logits_is_taken_again_and_grows():
    room = LogitsRoom()
    first = room.take(2, 8)
    assert first.shape == (2, 8)
    assert room.take(1, 16).data_ptr() == first.data_ptr()
    assert room.take(3, 8).shape == (3, 8)


def test_iterations_of_a_runner_share_the_room(loaded: LoadedModel):
    rooms: list[LogitsRoom] = []

    class Watched:
        device = loaded.model.device

        def __call__(self, inputs: ForwardInputs, kv_cache: KVCache) -> torch.Tensor:
            rooms.append(inputs.room)
            return loaded.model(inputs, kv_cache)

    runner = make_runner(loaded)
    runner.model = Watched()
    for position in range(2):
        builder = BatchBuilder()
        builder.add("a", [7], num_computed_tokens=position, block_table=(0,), sampling=SamplingParams())
        runner.run(builder.build())
    assert rooms[0] is rooms[1]
