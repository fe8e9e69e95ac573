"""The cellular scheduler: any graphs, workers, and order of completions."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.plan.plan import END, FOLLOWING, START
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import Round
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, QueueFullError, WorkerId

from .cellular import chain, fan, layout, outputs, seq2seq, tree
from .reference import scheduler_of

REQUESTS = st.one_of(
    st.tuples(st.just("chain"), st.integers(1, 9)),
    st.tuples(st.just("seq2seq"), st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.just("tree"), st.lists(st.integers(0, 20), max_size=9)),
)
MAKE = {"chain": chain, "seq2seq": seq2seq, "tree": tree}
STOP = 99


class Checker:
    """Runs rounds in the order given, and checks of each cell what must hold when it runs."""

    def __init__(self, scheduler: CellularScheduler, of, *, stop_after: int | None = None) -> None:
        self.scheduler, self.of, self.stop_after = scheduler, of, stop_after
        self.state = scheduler._state
        self.ran: Counter[tuple[str, int]] = Counter()  # (request id, node of its plan)
        self.in_flight: dict[int, deque[Round]] = {}
        self.finished: dict[str, object] = {}
        self.names: dict[int, str] = {}

    def submit(self, worker: int) -> bool:
        batch = self.scheduler.next_batch(WorkerId(worker), 0.0)
        if batch is None:
            return False
        for task in batch.tasks:
            assert task.size <= self.of.cells[task.cell].max_batch_size
            rounds = [each for other, queue in self.in_flight.items() if other != worker for each in queue]
            elsewhere = {sub for each in rounds for other in each.tasks for sub in other.subs.tolist()}
            assert not elsewhere & set(task.subs.tolist()), "a subgraph is on two workers"
        self.in_flight.setdefault(worker, deque()).append(batch)
        return True

    def complete(self, worker: int) -> bool:
        queue = self.in_flight.get(worker)
        if not queue:
            return False
        batch = queue.popleft()
        for task in batch.tasks:
            for row, (node, sub) in enumerate(zip(task.nodes.tolist(), task.subs.tolist(), strict=True)):
                steps = task.steps if task.lengths is None else int(task.lengths[row])
                live = self.scheduler._admission.by_index[int(self.state.tables.sub_request[sub])]
                for each in range(node, node + steps):
                    self._run(live, each - live.node_start)
        for left in self.scheduler.complete(batch, outputs(batch, self.of, word=self._word), 0.0):
            assert left.request_id not in self.finished, "a request finished twice"
            self.finished[left.request_id] = left
        return True

    def _run(self, live, node: int) -> None:
        """All that ``node`` reads has been computed before it."""
        request_id, plan = live.request.request_id, live.request.plan
        self.ran[request_id, node] += 1
        for source in sources_of(plan)[node]:
            assert self.ran[request_id, source] == 1, f"{request_id}: node {node} ran before {source}"

    def _word(self, task, step: int, row: int) -> int:
        if self.stop_after is None:
            return 0
        sub = int(task.subs[row])
        index = int(task.nodes[row]) + step - int(self.state.tables.sub_start[sub])
        return STOP if index >= self.stop_after else 0


def sources_of(plan) -> list[list[int]]:
    """The nodes each node waits for: inside its subgraph, and every node of the subgraphs before."""
    found: list[list[int]] = [[] for _ in range(plan.num_nodes)]
    for node in range(plan.num_nodes):
        if plan.nodes[node, 1] >= 0:
            found[plan.nodes[node, 1]].append(node)
    for node, successor in plan.more:
        found[successor].append(node)
    following = plan.subs[:, FOLLOWING].tolist()
    starts, ends = plan.subs[:, START].tolist(), plan.subs[:, END].tolist()
    for before, after in [(sub, after) for sub, after in enumerate(following) if after >= 0] + list(plan.sub_more):
        for node in range(starts[after], ends[after]):
            found[node] += range(starts[before], ends[before])
    return found


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=8),
    num_workers=st.integers(1, 3),
    batching=st.sampled_from(["cell", "chunk"]),
    max_tasks=st.integers(1, 5),
    cancel=st.sets(st.integers(0, 7), max_size=2),
    data=st.data(),
)
def test_every_cell_runs_once_in_order(requests, num_workers, batching, max_tasks, cancel, data):
    of = layout()
    config = SchedulerConfig(max_tasks_to_submit=max_tasks, batching=batching)
    scheduler = CellularScheduler(of, config=config, devices=range(num_workers))
    checker = Checker(scheduler, of)
    todo = [(f"r{number}", kind, sizes) for number, (kind, *sizes) in enumerate(requests)]
    cancelled = set()
    waiting = deque(todo)
    for _ in range(10_000):
        is_idle = not waiting and not scheduler.num_unfinished and not any(checker.in_flight.values())
        if is_idle and not any(checker.submit(worker) for worker in range(num_workers)):
            break  # nor is there anything formed that was not handed out
        act = data.draw(st.integers(0, 2 * num_workers), label="act")
        if act == 0 and waiting:
            request_id, kind, sizes = waiting.popleft()
            scheduler.add(MAKE[kind](of, request_id, *sizes), 0.0)
            if int(request_id[1:]) in cancel:
                checker.submit(0)
                left = scheduler.cancel(request_id, 0.0)
                assert [each.reason for each in left] == [FinishReason.CANCELLED]
                cancelled.add(request_id)
        elif act <= num_workers:
            checker.submit(act - 1 if act else 0)
        else:
            checker.complete(act - num_workers - 1)
        if act == 0 and not waiting:  # whatever the draws: go on
            for worker in range(num_workers):
                checker.submit(worker)
                checker.complete(worker)
    assert set(checker.finished) == {request_id for request_id, *_ in todo} - cancelled
    for request_id, kind, sizes in todo:
        nodes = MAKE[kind](of, request_id, *sizes).plan.num_nodes
        times = [checker.ran[request_id, node] for node in range(nodes)]
        assert times == [1] * nodes or (request_id in cancelled and max(times) <= 1)
    admission = scheduler._admission
    assert not admission.by_index
    assert not admission.leaving
    assert admission.room.num_held == 0


@pytest.mark.parametrize("batching", ["cell", "chunk"])
@pytest.mark.parametrize("lookahead", ["speculative", "one"])
@pytest.mark.parametrize("stop_after", [0, 1, 4, 6, 50])
def test_a_chain_ends_at_its_stop(batching: str, lookahead: str, stop_after: int):
    of = layout(stop=STOP)
    config = SchedulerConfig(batching=batching, lookahead=lookahead)
    scheduler = CellularScheduler(of, config=config)
    checker = Checker(scheduler, of, stop_after=stop_after)
    for number in range(6):
        scheduler.add(seq2seq(of, f"r{number}", 3, 9), 0.0)
    while scheduler.num_unfinished:
        while checker.submit(0):
            pass
        while checker.complete(0):
            pass
    steps = min(stop_after + 1, 9)
    for left in checker.finished.values():
        assert [int(values[0]) for values in left.result.values] == [0] * (steps - 1) + [STOP if stop_after < 9 else 0]
        assert left.result.num_cells == 3 + steps
    if lookahead == "one":
        assert scheduler.counters.discarded_cells == 0
    elif stop_after in (0, 1):
        assert scheduler.counters.discarded_cells > 0


@pytest.mark.parametrize("max_tasks", [1, 2, 5])
@pytest.mark.parametrize("batching", ["cell", "chunk"])
def test_a_new_arrival_waits_at_most_max_tasks_steps(max_tasks: int, batching: str):
    of = layout(batch_sizes=(1, 2, 4, 8))
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=max_tasks, batching=batching))
    checker = Checker(scheduler, of)
    for number in range(4):
        scheduler.add(chain(of, f"old{number}", 40), 0.0)
    waited: list[int] = []
    for number in range(4):
        while checker.submit(0):  # a round is under way ...
            pass
        scheduler.add(chain(of, f"new{number}", 3), 0.0)  # ... when a request arrives
        steps = 0
        while checker.in_flight[0]:
            steps += sum(task.steps for task in checker.in_flight[0][0].tasks)
            checker.complete(0)
        assert checker.submit(0)
        live = scheduler._admission.by_id[f"new{number}"]
        assert live.sub_start in checker.in_flight[0][-1].tasks[0].subs
        waited.append(steps)
    assert max(waited) <= max_tasks


def test_criteria_and_priorities_of_algorithm_1():
    of = layout(batch_sizes=(1, 2))
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=1))
    scheduler.add(seq2seq(of, "a", 1, 3), 0.0)
    first = scheduler.next_batch(WorkerId(0), 0.0)
    scheduler.complete(first, outputs(first, of), 0.0)  # now a's decoder is ready
    scheduler.add(chain(of, "b", 3), 0.0)
    scheduler.add(chain(of, "c", 3), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert of.cells[batch.tasks[0].cell].name == "encoder"  # (a): as many ready as a batch takes, whatever the priority
    scheduler.complete(batch, outputs(batch, of), 0.0)
    scheduler.cancel("c", 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    assert of.cells[batch.tasks[0].cell].name == "decoder"  # neither is full or running: the higher priority


def test_a_type_that_does_not_run_goes_before_one_that_does():
    of = layout(batch_sizes=(1, 2, 4, 8))
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=1), devices=(0, 0))
    for name in ("a", "b"):
        scheduler.add(seq2seq(of, name, 1, 4), 0.0)
    first = scheduler.next_batch(WorkerId(0), 0.0)
    scheduler.complete(first, outputs(first, of), 0.0)
    scheduler.add(chain(of, "c", 2), 0.0)
    running = scheduler.next_batch(WorkerId(0), 0.0)
    assert of.cells[running.tasks[0].cell].name == "decoder"
    scheduler.add(tree(of, "d", [0]), 0.0)
    other = scheduler.next_batch(WorkerId(1), 0.0)
    assert of.cells[other.tasks[0].cell].name == "encoder"  # (b): the decoder has a running task


def test_small_later_tasks_are_left_for_others():
    of = layout(batch_sizes=(2, 4))
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=5, batching="chunk"))
    scheduler.add(tree(of, "a", [0, 0, 0, 0]), 0.0)  # five leaves: one task of four, and one is below Bsizes.Min()
    assert [task.size for task in scheduler.next_batch(WorkerId(0), 0.0).tasks] == [4]


def test_the_same_requests_are_not_gathered_again():
    of = layout()
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=2))
    for name in ("a", "b"):
        scheduler.add(chain(of, name, 6), 0.0)
    tasks = []
    while scheduler.num_unfinished:
        while (batch := scheduler.next_batch(WorkerId(0), 0.0)) is not None:
            tasks.append(batch.tasks[0])
            last = batch
            scheduler.complete(last, outputs(last, of), 0.0)
    assert [task.kept for task in tasks] == [None] + [(-1, 0)] * 5
    assert scheduler.counters.gathers == 1
    assert [task.is_stored for task in tasks][-1]


def test_a_failed_round_fails_its_requests_alone():
    of = layout(batch_sizes=(1, 2))
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_tasks_to_submit=1))
    for name in ("a", "b", "c"):
        scheduler.add(chain(of, name, 2), 0.0)
    batch = scheduler.next_batch(WorkerId(0), 0.0)
    left = scheduler.fail(batch, ValueError("no"), 0.0)
    assert {(each.request_id, each.reason) for each in left} == {("a", FinishReason.FAILED), ("b", FinishReason.FAILED)}
    checker = Checker(scheduler, of)
    while checker.submit(0):
        checker.complete(0)
    assert list(checker.finished) == ["c"]


@pytest.mark.parametrize("compiled", [True, False])
def test_an_ended_request_takes_only_its_own_nodes_along(compiled: bool):
    """The encoder of the request that is cancelled is not released yet; that of the other was the first of all."""
    of = layout()
    scheduler = scheduler_of(of, compiled=compiled)
    scheduler.add(chain(of, "a", 1), 0.0)
    scheduler.add(fan(of, "b", 1), 0.0)
    scheduler.cancel("b", 0.0)
    checker = Checker(scheduler, of)
    while checker.submit(0):
        checker.complete(0)
    assert list(checker.finished) == ["a"]


def test_deadlines():
    of = layout()
    scheduler = CellularScheduler(of)
    scheduler.add(chain(of, "a", 9, deadline_s=1.0), 0.0)
    scheduler.add(chain(of, "b", 9, deadline_s=5.0), 0.0)
    assert scheduler.wake_at(0.0) == 1.0
    assert [(each.request_id, each.reason) for each in scheduler.expire(1.0)] == [("a", FinishReason.EXPIRED)]
    assert scheduler.num_unfinished == 1
    scheduler.cancel("b", 2.0)
    assert scheduler.wake_at(2.0) is None


def test_requests_wait_for_rows_and_are_refused_beyond_the_bound():
    of = layout()
    scheduler = CellularScheduler(of, config=SchedulerConfig(max_waiting=1), num_rows=[9, 9])
    scheduler.add(chain(of, "a", 8), 0.0)
    scheduler.add(chain(of, "b", 8), 0.0)
    with pytest.raises(QueueFullError, match="1 requests wait already"):
        scheduler.add(chain(of, "c", 8), 0.0)
    with pytest.raises(InvalidInputError, match="more than the state pool has"):
        scheduler.add(chain(of, "d", 9), 0.0)
    checker = Checker(scheduler, of)
    while checker.submit(0):
        checker.complete(0)
    assert list(checker.finished) == ["a", "b"]


def test_cheap_steps_fill_a_round():
    of = layout()
    scheduler = CellularScheduler(of, config=SchedulerConfig(batching="chunk", round_s=0.01))
    scheduler.add(chain(of, "a", 100), 0.0)
    now, steps = 0.0, []
    while (batch := scheduler.next_batch(WorkerId(0), now)) is not None:
        steps.append(batch.tasks[0].steps)
        now += 0.0005 * steps[-1] if len(steps) < 3 else 0.004 * steps[-1]  # from the third round on, a step is dear
        scheduler.complete(batch, outputs(batch, of), now)
    assert steps == [5, 20, 20, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]
    with pytest.raises(InvalidInputError, match="round_s"):
        SchedulerConfig(round_s=-1.0)
