"""Whatever happens, in whatever order: every policy serves every request once, right, and gives all blocks back.

The runner here is fake, its cache is not: each slot remembers the whole context it was computed from, and every read
is checked against what the request really has at that position. A block that is shared, copied, evicted or freed
wrongly is found the moment anyone reads it; a token depends on all of its context, so it is found in the answer too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason, SimulatedExecutor, WorkerId, simulate
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.chunked import ChunkedScheduler
from mlsys_orca.scheduling.orca import IterationScheduler
from mlsys_orca.scheduling.paged import PagedScheduler
from mlsys_orca.scheduling.request_level import RequestLevelScheduler

VOCAB = 4  # few tokens, so that answers meet
STOP = 3
BUDGET = 5
MAX_TOKENS = 40

POLICIES: dict[str, Callable[..., Any]] = {
    "orca": IterationScheduler,
    "paged": PagedScheduler,
    "paged without sharing": lambda *a, **k: PagedScheduler(*a, **k, prefix_caching=False, watermark=0.2),
    "chunked": lambda *a, **k: ChunkedScheduler(*a, **k, max_batch_tokens=BUDGET),
    "chunked, small beside decodes": lambda *a, **k: ChunkedScheduler(
        *a, **k, max_batch_tokens=BUDGET, max_chunk_tokens=2
    ),
    "chunked by one": lambda *a, **k: ChunkedScheduler(*a, **k, max_batch_tokens=1),
    "request-level": RequestLevelScheduler,
    "request-level in microbatches": lambda *a, **k: RequestLevelScheduler(*a, **k, microbatch_size=1),
    "request-level, kinder": lambda *a, **k: RequestLevelScheduler(*a, **k, lockstep=False, microbatch_size=2),
}


def contexts(token_ids: Sequence[int], before: int = 0) -> list[int]:
    """For each token a number that stands for it and all before it; ``before`` is that of the tokens before."""
    numbers = []
    for token in token_ids:
        before = hash((before, token))
        numbers.append(before)
    return numbers


def encoded(token_ids: Sequence[int]) -> int:
    """Return the hash of an encoder's prompt: each of its tokens depends on all of them."""
    return hash(tuple(token_ids)) if token_ids else 0


def contexts_of(request: GenerationRequest) -> list[int]:
    prompt = request.prompt_token_ids
    return contexts(prompt, encoded(prompt[: request.num_encoder_tokens]))


def next_token(context: int) -> int:
    return hash((context, 7)) % VOCAB


def answer_of(request: GenerationRequest) -> list[int]:
    """Return the tokens the request must get, alone or not."""
    answer: list[int] = []
    context = contexts_of(request)[-1]
    while len(answer) < request.max_new_tokens:
        answer.append(next_token(context))
        (context,) = contexts(answer[-1:], context)
        if answer[-1] in request.stop_token_ids:
            break
    return answer


@dataclass
class FakeRunner:
    """Runs iterations over a cache of contexts, and knows what each request has."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)
    truth: dict[str, list[int]] = field(default_factory=dict)  # the context of each of a request's tokens so far
    streamed: dict[str, list[int]] = field(default_factory=dict)  # the tokens each request was given
    num_copies: int = 0

    def expect(self, request: GenerationRequest) -> None:
        self.truth[request.request_id] = contexts_of(request)
        self.streamed[request.request_id] = []

    def slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, batch: IterationBatch) -> IterationOutput:
        self.copy(batch)
        for part in batch.requests:
            done = part.num_computed_tokens
            tokens = batch.token_ids[part.start : part.stop]
            read_at_once = encoded(tokens[: part.num_encoder_tokens])
            before = self.slots[self.slot(part.block_table, done - 1)] if done else read_at_once
            numbers = contexts(tokens, before)
            assert batch.positions[part.start : part.stop] == tuple(range(done, part.context_len))
            for position, number in enumerate(numbers, start=done):
                self.slots[self.slot(part.block_table, position)] = number
        sampled = []
        for part in batch.requests:  # after all writes, as attention comes after them in each layer
            read = [self.slots.get(self.slot(part.block_table, p)) for p in range(part.context_len)]
            truth = self.truth[part.request_id]
            assert read == truth[: part.context_len], f"{part.request_id} reads another's keys and values"
            if part.sampling is not None:
                assert part.context_len == len(truth), "a token is sampled after the last one known"
                sampled.append(SampledToken(part.request_id, next_token(truth[-1])))
        return IterationOutput(tuple(sampled))

    def deliver(self, token: SampledToken) -> None:
        truth = self.truth[token.request_id]
        truth += contexts([token.token_id], truth[-1])
        self.streamed[token.request_id].append(token.token_id)

    def copy(self, batch: IterationBatch) -> None:
        offsets = range(self.block_size)
        blocks = [[self.slots.get(src * self.block_size + i) for i in offsets] for src, _ in batch.block_copies]
        for (_, destination), contents in zip(batch.block_copies, blocks, strict=True):
            self.slots.update({destination * self.block_size + i: contents[i] for i in offsets})
        self.num_copies += len(blocks)

    def break_down(self, batch: IterationBatch) -> None:
        """Fail somewhere in the iteration: what it was to write is garbage."""
        for _, destination in batch.block_copies:
            self.slots.update({destination * self.block_size + i: -1 for i in range(self.block_size)})
        for part in batch.requests:
            for position in range(part.num_computed_tokens, part.context_len):
                self.slots[self.slot(part.block_table, position)] = -1


class Bench:
    """A policy, a fake runner, and everything that must hold between them."""

    def __init__(self, policy: str, *, num_blocks: int, block_size: int, max_batch_size: int, n_workers: int) -> None:
        self.tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
        self.scheduler = POLICIES[policy](self.tables, max_batch_size=max_batch_size, max_model_len=MAX_TOKENS)
        self.policy, self.max_batch_size, self.n_workers = policy, max_batch_size, n_workers
        self.runner = FakeRunner(block_size)
        self.requests: dict[str, GenerationRequest] = {}
        self.left: dict[str, FinishReason] = {}
        self.flight: list[IterationBatch] = []
        self.num_preempted = 0
        self.doomed: set[str] = set()  # cancelled while in flight
        self.started: list[str] = []  # in order of their first iteration
        self.wait = "", 0  # the earliest request, and batches completed since it became that or began an iteration

    def add(self, request: GenerationRequest) -> None:
        try:
            self.scheduler.add(request, 0)
        except InvalidInputError:
            is_too_long = request.max_tokens > min(MAX_TOKENS, self.tables.num_blocks * self.tables.block_size)
            assert is_too_long or request.num_encoder_tokens >= self.budget
            return
        self.requests[request.request_id] = request
        self.runner.expect(request)

    def start(self) -> bool:
        if len(self.flight) == self.n_workers:
            return False
        holders = self.holders
        batch = self.scheduler.next_batch(WorkerId(0), 0)
        self.check_preempted(set(holders) - set(self.holders), batch)
        if batch is None:
            assert self.flight or not self.unfinished, "deadlock: requests, but neither a batch nor one in flight"
            return False
        self.check(batch)
        self.flight.append(batch)
        return True

    def check(self, batch: IterationBatch) -> None:
        names = [part.request_id for part in batch.requests]
        busy = {part.request_id for other in self.flight for part in other.requests}
        assert len(set(names)) == len(names) <= self.max_batch_size
        assert not busy & set(names), "a request is in two batches at once"
        assert not set(self.left) & set(names)
        if self.policy == "orca":  # section 4.2: those that wait, in order of arrival
            assert names == [name for name in self.unfinished if name not in busy][: len(names)]
        assert batch.num_tokens <= self.budget
        for part in batch.requests:
            for block in part.block_table[part.num_computed_tokens // self.tables.block_size :]:
                assert self.tables.num_holders(block) == 1, "writes to a block that another request holds"
                assert not self.tables.is_read_only(block), "writes to a block that is kept"
        self.started += [name for name in names if name not in self.started]
        in_order = [name for name in self.requests if name in self.started]
        assert self.started == in_order, "first come, first served"
        assert not any(
            name not in self.started and name not in self.left
            for name in list(self.requests)[: list(self.requests).index(self.started[-1])]
        ), "an earlier request was passed over"
        if self.wait[0] in names:
            self.wait = self.wait[0], 0
        self.check_blocks()

    def check_preempted(self, preempted: set[str], batch: IterationBatch | None) -> None:
        self.num_preempted += len(preempted)
        order = list(self.requests)
        busy = {part.request_id for other in [*self.flight, *([batch] if batch else [])] for part in other.requests}
        assert not busy & preempted, "a request in flight lost its blocks"
        for name in preempted:
            assert name != self.unfinished[0], "the earliest request lost its blocks"
            after = order[order.index(name) + 1 :]
            assert not set(after) & set(self.holders) - busy, "one that arrived later kept its blocks"

    def check_blocks(self) -> None:
        held = [block for sequence in self.holders.values() for block in sequence.block_table]
        for block in range(self.tables.num_blocks):
            assert self.tables.num_holders(block) == held.count(block)
        assert self.tables.num_free_blocks == self.tables.num_blocks - len(set(held))

    def complete(self) -> None:
        if not self.flight:
            return
        batch = self.flight.pop(0)
        output = self.runner.run(batch)
        finished = self.scheduler.complete(batch, output, 0)
        for token in output.sampled:
            answer = answer_of(self.requests[token.request_id])
            if len(self.runner.streamed[token.request_id]) < len(answer):
                self.runner.deliver(token)
            else:
                assert self.policy in ("request-level", "request-level in microbatches"), "a token after the last"
        self.finish(finished)
        for name in self.doomed & {part.request_id for part in batch.requests}:
            assert self.left.get(name) is FinishReason.CANCELLED, "a cancelled request stays"
        earliest = next(iter(self.unfinished), "")
        self.wait = earliest, self.wait[1] + 1 if earliest == self.wait[0] else 0
        if earliest and self.policy.startswith(("orca", "paged")):
            assert self.wait[1] <= 2 * self.n_workers, "the earliest request starves"

    def cancel(self, name: str) -> None:
        is_in_flight = any(part.request_id == name for batch in self.flight for part in batch.requests)
        finished = self.scheduler.cancel(name, 0)
        self.finish(finished)
        if is_in_flight:
            assert name not in self.left
            self.doomed.add(name)
        else:
            assert name in self.left or name not in self.requests

    def fail(self) -> None:
        if self.flight:
            batch = self.flight.pop(0)
            self.runner.break_down(batch)
            self.finish(self.scheduler.fail(batch, RuntimeError("device lost"), 0))

    def finish(self, finished: Iterable[Finished[Any]]) -> None:
        for item in finished:
            request = self.requests[item.request_id]
            assert item.request_id not in self.left, "a request left twice"
            self.left[item.request_id] = item.reason
            streamed = self.runner.streamed[item.request_id]
            answer = answer_of(request)
            assert streamed == answer[: len(streamed)]
            if item.reason is FinishReason.DONE:
                assert [token.token_id for token in item.result.tokens] == answer == streamed
                by_stop = answer[-1] in request.stop_token_ids
                assert item.result.finish_reason == ("stop" if by_stop else "length")

    @property
    def budget(self) -> float:
        budgets = {"chunked": BUDGET, "chunked, small beside decodes": BUDGET, "chunked by one": 1}
        return budgets.get(self.policy, inf)

    @property
    def holders(self) -> dict[str, Any]:
        return dict(self.scheduler.pool.holders)

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.requests if name not in self.left]

    def rounds(self, number: int) -> None:
        for _ in range(number):
            while self.start():
                pass
            if not self.flight:
                break
            self.complete()

    def drain(self) -> None:
        bound = 20 + 4 * self.n_workers * (1 + len(self.unfinished)) * sum(
            self.requests[name].max_tokens for name in self.unfinished
        )
        self.rounds(bound)
        assert not self.unfinished, "a request does not end"
        assert set(self.left) == set(self.requests)
        assert self.scheduler.num_unfinished == 0
        self.check_blocks()
        assert self.tables.num_free_blocks == self.tables.num_blocks
        self.tables.clear_cache()
        assert self.tables.num_free_blocks == self.tables.num_blocks
        assert self.tables.num_cached_blocks == 0


def make_request(name: str, family: int, length: int, new: int, stops: bool, encoder: int = 0) -> GenerationRequest:
    """Prompts of one family begin alike: one is often the beginning of another, or of another's answer.

    Of a prompt that is longer, an encoder reads the first ``encoder`` tokens.
    """
    base = [family]
    while len(base) < length:
        base.append(next_token(contexts(base)[-1]))
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(base),
        max_new_tokens=new,
        stop_token_ids=frozenset({STOP} if stops else ()),
        num_encoder_tokens=encoder if encoder < length else 0,
    )


adds = st.tuples(
    st.just("add"),
    st.integers(0, 2),
    st.integers(1, 14),
    st.sampled_from([1, 2, 5, 9, 14, 20]),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 4, 6]),
)
others = st.one_of(
    st.tuples(st.just("start")),
    st.tuples(st.just("complete")),
    st.tuples(st.just("rounds"), st.integers(2, 8)),  # fill the pipeline and complete one batch, so many times
    st.tuples(st.just("fail")),
    st.tuples(st.just("cancel"), st.integers(0, 12)),
)
operations = st.lists(st.one_of(adds, others), min_size=8, max_size=50)


@settings(max_examples=120)
@given(operations, st.integers(3, 14), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@pytest.mark.parametrize("policy", POLICIES)
def test_any_history_is_served_right(
    policy: str, script: list[Any], num_blocks: int, block_size: int, max_batch_size: int, n_workers: int
) -> None:
    bench = Bench(
        policy, num_blocks=num_blocks, block_size=block_size, max_batch_size=max_batch_size, n_workers=n_workers
    )
    num_added = 0
    for step in script:
        match step:
            case ("add", family, length, new, stops, encoder):
                bench.add(make_request(f"r{num_added}", family, length, new, stops, encoder))
                num_added += 1
            case ("start",):
                bench.start()
            case ("complete",):
                bench.complete()
            case ("fail",):
                bench.fail()
            case ("rounds", number):
                bench.rounds(number)
            case ("cancel", number):
                bench.cancel(f"r{number}")
    bench.drain()


@pytest.mark.parametrize("policy", ["orca", "paged", "chunked", "request-level"])
def test_two_thousand_requests_leave_every_block_free(policy: str) -> None:
    """Through the serving loop, three batches in flight; a tenth is cancelled at any time, some iterations fail."""
    random = Random(1)
    tables = BlockTables(num_blocks=40, block_size=4)
    scheduler = POLICIES[policy](tables, max_batch_size=6, max_model_len=60)
    runner = FakeRunner(tables.block_size)
    requests: dict[str, GenerationRequest] = {}
    trace, cancellations, now = [], [], 0.0
    for number in range(2000):
        now += random.expovariate(8.0)
        length, new = random.randint(1, 30), random.randint(1, 30)
        encoder = random.choice((0, 0, 0, BUDGET - 1))
        request = make_request(f"r{number}", random.randrange(40), length, new, random.random() < 0.5, encoder)
        requests[request.request_id] = request
        trace.append((now, request))
        if random.random() < 0.1:
            cancellations.append((now + random.expovariate(1.0), request.request_id))
    answers = {name: answer_of(request) for name, request in requests.items()}

    def output(batch: IterationBatch) -> IterationOutput:
        if random.random() < 0.001:
            runner.break_down(batch)
            raise RuntimeError("device lost")
        return runner.run(batch)

    class Client:
        """Reads the stream, as the engine's listener does."""

        def on_output(self, batch: IterationBatch, output: IterationOutput, now: float) -> None:
            for token in output.sampled:
                if len(runner.streamed[token.request_id]) < len(answers[token.request_id]):
                    runner.deliver(token)

        def on_finished(self, finished: Finished[Any], now: float) -> None:
            pass

    for request in requests.values():
        runner.expect(request)
    executor = SimulatedExecutor([lambda batch: 0.02 + 0.0005 * batch.num_tokens] * 3, output)
    simulation = simulate(scheduler, executor, trace, cancellations=sorted(cancellations), listener=Client())
    reasons = Counter(served.finished.reason for served in simulation.requests)
    assert reasons.total() == 2000
    assert reasons[FinishReason.CANCELLED] > 50
    assert 0 < reasons[FinishReason.FAILED] < 200
    for served in simulation.requests:
        name, streamed = served.request_id, runner.streamed[served.request_id]
        assert streamed == answers[name][: len(streamed)]
        if served.finished.reason is FinishReason.FAILED:
            assert str(served.finished.error) == "device lost", "what the fake cache found"
        if served.finished.reason is FinishReason.DONE:
            assert [token.token_id for token in served.finished.result.tokens] == answers[name] == streamed
    assert tables.num_free_blocks == 40
    tables.clear_cache()
    assert all(tables.num_holders(block) == 0 for block in range(40))
    if policy in ("paged", "chunked"):
        assert scheduler.pool.num_preemptions > 100
        assert scheduler.pool.num_cached_tokens > 1000
        assert runner.num_copies > 20
