"""The CUDA executor's calls against a recorder: their order is the plan's, and what they compute is the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cuda import executor as pools
from mlsys_nimble.backends.cuda.executor import MAX_CAPTURES, CudaExecutor
from mlsys_nimble.backends.cuda.plan import Record, Run, Wait
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.program import Program
from mlsys_nimble.options import Options
from mlsys_nimble.passes import optimise
from mlsys_nimble.training import calls
from torch import Tensor, nn
from torch.nn import functional


@pytest.fixture(autouse=True)
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_SHARED", {})


class Branches(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = [functional.dropout(torch.tanh(branch(x)), self.dropout) for branch in self.branches]
        return torch.cat(made, -1), x


def program_of(model: nn.Module, *inputs: Tensor) -> Program:
    return optimise(capture(model, inputs).program)[0]


def executor_for(model: nn.Module, driver: Any, *inputs: Tensor, **options: Any) -> CudaExecutor:
    return CudaExecutor(program_of(model, *inputs), driver=driver, kernels="aten", **options)


@pytest.mark.parametrize("use_multi_stream", [True, False])
def test_a_capture_gives_the_commands_of_the_plan_in_their_order(driver: Any, use_multi_stream: bool):
    x = torch.randn(2, 8)
    executor = executor_for(Branches(), driver, x, use_multi_stream=use_multi_stream)
    assert (executor.plan.num_streams > 1) == use_multi_stream
    executor.run([x])
    log = driver.log
    begin, end = log.index(("begin", "pool0", "stream0")), log.index(("end",))
    events: dict[int, str] = {}
    found = log[begin + 1 : end]
    for command, call in zip(executor.plan.commands, found, strict=True):
        match command:
            case Run(_, stream):
                assert call == ("run", f"stream{stream}")
            case Record(event, stream):
                events[event] = call[1]
                assert call == ("record", events[event], f"stream{stream}")
            case Wait(event, stream):
                assert call == ("wait", events[event], f"stream{stream}")
    assert log[end + 1] == log[begin - 1] == ("forget_workspaces",)  # the graph's own are made and left within
    assert log[end + 2 :] == [("replay", "caller"), ("copy", "caller", 48)]  # the result that is not the caller's own
    assert log[:2] == [("record", "event1", "caller"), ("wait", "event1", "stream0")]  # the pre-run, after the caller
    assert log[begin - 2] == ("synchronize",)


def test_inputs_are_copied_once_their_address_has_changed(driver: Any):
    model, x = Branches(), torch.randn(2, 8)
    executor = executor_for(model, driver, x)
    for _ in range(3):
        torch.testing.assert_close(executor.run([x])[0], model(x)[0])
        x.mul_(0.5)
    assert [call for call in driver.log if call[0] == "copy"] == [("copy", "caller", 48)] * 3  # the result
    for _ in range(3):
        y = torch.randn(2, 8)
        torch.testing.assert_close(executor.run([y])[0], model(y)[0])
    copies = [call for call in driver.log if call[0] == "copy" and call[2] == 16]
    assert copies == [("copy", "caller", 16)] * 4  # one to capture again, and one for each call
    assert sum(call[0] == "begin" for call in driver.log) == 2
    transposed = torch.randn(8, 2).T
    torch.testing.assert_close(executor.run([transposed])[0], model(transposed)[0])


def test_results_are_the_callers_while_it_holds_them(driver: Any):
    model = Branches()
    executor = executor_for(model, driver, torch.randn(2, 8), shares_pool=False, returns_in_place=True)
    xs = [torch.randn(2, 8) for _ in range(MAX_CAPTURES + 2)]
    held = [executor.run([x])[0] for x in xs]  # more than there are captures: the last run without a graph
    for x, y in zip(xs, held, strict=True):
        torch.testing.assert_close(y, model(x)[0])
    replays = driver.num_replays
    del held, y
    for x in xs:
        torch.testing.assert_close(executor.run([x])[0], model(x)[0])
    assert driver.num_replays == replays + len(xs)


def test_a_schedule_made_in_inference_mode_serves_outside_of_it(driver: Any):
    model = Branches()
    executor = executor_for(model, driver, torch.randn(2, 8))
    for in_inference_mode in (True, True, False, True):
        with torch.inference_mode(in_inference_mode):
            x = torch.randn(2, 8)
            torch.testing.assert_close(executor.run([x])[0], model(x)[0])


def test_inputs_that_are_returned_are_themselves(driver: Any):
    x = torch.randn(2, 8)
    assert executor_for(Branches(), driver, x).run([x])[1] is x


def test_replays_of_a_pool_take_turns_whatever_stream_they_are_put_on(driver: Any):
    x = torch.randn(2, 8)
    one, other = executor_for(Branches(), driver, x), executor_for(Branches(), driver, x)
    one.run([x]), other.run([x])
    driver.log.clear()
    one.run([x])
    driver.stream = "second"
    other.run([x])
    event = driver.log[2][1]
    assert driver.log == [
        ("replay", "caller"),
        ("copy", "caller", 48),
        ("record", event, "caller"),  # now, so that what the caller put there since is over too
        ("wait", event, "second"),
        ("replay", "second"),
        ("copy", "second", 48),
    ]


def test_no_replay_writes_to_memory_that_a_caller_got(driver: Any):
    """Another stream may still read a result that the caller has dropped; only the allocator knows of it."""
    model, x = Branches(), torch.randn(2, 8)
    executor = executor_for(model, driver, x)
    result = executor.run([x])[0]
    written = {made.untyped_storage()._cdata for capture in executor._captures for made in capture.results.values()}
    assert result.untyped_storage()._cdata not in written
    assert driver.num_replays == 1


def test_calls_go_on_where_no_graph_can_be_captured(driver: Any, caplog: pytest.LogCaptureFixture):
    model, x = Branches(), torch.randn(2, 8)
    executor = executor_for(model, driver, x)
    run = driver.run

    def refuse(stream: str, function: Callable[..., Any], arguments: Any) -> Any:
        if driver._graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run(stream, function, arguments)

    driver.run = refuse
    for _ in range(2):
        y = torch.randn(2, 8)
        torch.testing.assert_close(executor.run([y])[0], model(y)[0])
    assert driver.num_replays == 0
    assert sum(call[0] == "begin" for call in driver.log) == 1
    assert driver.log[-1] == ("forget_workspaces",)  # also after a capture that failed
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graph can be captured, so operators run one by one: operation not permitted when stream is capturing"
    ]


class Solves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x + 9 * torch.eye(len(x))) * 2


def test_solvers_are_not_captured(driver: Any, caplog: pytest.LogCaptureFixture):
    """Once a capture of cuSOLVER's has failed, it fails outside of captures too."""
    model, x = Solves(), torch.rand(4, 4)
    executor = executor_for(model, driver, x)
    torch.testing.assert_close(executor.run([x])[0], model(x))
    assert all(call[0] not in ("begin", "replay") for call in driver.log)
    assert not caplog.records


class Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x * self.scale + shift


def test_numbers_on_the_cpu_are_moved_to_the_device(driver: Any):
    """As a kernel would fault on their address, and a graph would keep their first value."""
    inputs = [torch.randn(2, 8), torch.tensor(3.0)]
    program = program_of(Scaled(), *inputs)
    driver.device, run, seen = torch.device("meta"), driver.run, list[str]()

    def watch(stream: str, function: Callable[..., Any], arguments: Any) -> Any:
        seen.extend(argument.device.type for argument in arguments)
        return run(stream, function, arguments)

    driver.run = watch
    executor = CudaExecutor(program, driver=driver, kernels="aten")
    executor.run(inputs)
    driver.log.clear()
    executor.run(inputs)
    assert set(seen) == {"meta"}
    assert [call for call in driver.log if call[0] == "copy"][:2] == [("copy", "caller", 16), ("copy", "caller", 1)]


def test_schedules_share_a_pool_unless_told_otherwise(driver: Any):
    x = torch.randn(2, 8)
    for shares in (True, True, False):
        executor_for(Branches(), driver, x, shares_pool=shares).run([x])
    assert [call[1] for call in driver.log if call[0] == "begin"] == ["pool0", "pool0", "pool1"]


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += x
        return self.count * 2


def test_buffers_are_changed_once_a_call(driver: Any):
    model, x = Counter(), torch.ones(3)
    executor = executor_for(model, driver, x)
    for number in range(1, 4):
        torch.testing.assert_close(executor.run([x])[0], torch.full((3,), 2.0 * number))
        assert model.count.tolist() == [number] * 3


def test_random_operators_draw_anew_and_a_pre_run_leaves_the_generator_alone(driver: Any):
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, training=True)

    x = torch.ones(64)
    executor = executor_for(Noisy(), driver, x)
    torch.manual_seed(3)
    first, second = executor.run([x])[0].clone(), executor.run([x])[0].clone()
    assert not torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 2.0}


# Training: the executor that a GPU would run, on the recorder


@pytest.fixture
def on_recorder(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], calls.TrainingCalls]:
    def make_executor(
        name: str, program: Program, *, shares_pool: bool, returns_in_place: bool, **_: Any
    ) -> CudaExecutor:
        places = {"shares_pool": shares_pool, "returns_in_place": returns_in_place}
        return CudaExecutor(program, driver=driver, kernels="aten", **places)

    monkeypatch.setattr(calls, "make_executor", make_executor)
    return lambda model: calls.TrainingCalls(model, Options())


def net() -> nn.Sequential:
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(8 * 16, 4))


def test_training_gives_eagers_gradients_and_copies_only_the_batch(driver: Any, on_recorder: Any):
    torch.manual_seed(0)
    model = net()
    reference = copy.deepcopy(model)
    trained = on_recorder(model)
    trained.prepare((torch.randn(4, 3, 6, 6),), {})
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(6):
        x = torch.randn(4, 3, 6, 6)
        driver.log.clear()
        trained.call((x,), {}).square().sum().backward()
        reference(x).square().sum().backward()
        if step == 3:  # gradients add up
            continue
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        reference.load_state_dict(model.state_dict())
        if step == 5:
            assert [call[2] for call in driver.log if call[0] == "copy"].count(x.numel()) <= 2
            assert not any(call[0] == "begin" for call in driver.log)  # nothing is captured any more


def test_forward_passes_may_run_ahead_of_backward_passes(driver: Any, on_recorder: Any):
    torch.manual_seed(0)
    model = net()
    reference = copy.deepcopy(model)
    trained = on_recorder(model)
    xs = [torch.randn(4, 3, 6, 6) for _ in range(3)]
    losses = [trained.call((x,), {}).square().sum() for x in xs]
    for loss in losses:
        loss.backward()
    for x in xs:
        reference(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
