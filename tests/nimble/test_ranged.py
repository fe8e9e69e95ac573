"""One preparation for many sizes gives what eager gives at each, or leaves a size to a preparation of its own."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.ranged import RangedExecutor
from mlsys_nimble.errors import InternalError
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Attend(nn.Module):
    """Positions from a table, a causal mask, attention by hand, a mean over the length."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(longest, 16)
        self.register_buffer("ids", torch.arange(longest)[None])
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        x = x + self.positions(self.ids[:, :length])
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), -1e9).triu(1)
        seen = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, -1) @ v
        return self.norm(self.out(seen.transpose(1, 2).reshape(batch, length, width)) + x).mean(1)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            return self.linear(x) * 2
        return self.linear(x).relu() if x.size(0) > 11 else self.linear(x)


class Mixed(nn.Module):
    """Padding to a size, a concatenation, an expansion, rows in one, and a size that is used as a factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        first = x[:1].expand(n, -1)
        both = torch.cat([x, first, F.pad(x, (0, 0, 1, 2))], 0)
        return both.reshape(-1).sin().view(3 * n + 3, -1) + torch.arange(3 * n + 3)[:, None]


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 8, 5, stride=2), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool1d(self.first(x).relu(), 2)
        return self.second(y).flatten(1)


class Image(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1), nn.Hardswish()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)),
        )


CASES = {
    "attention": (lambda: Attend(24), (2, 5, 16), {1: (1, 24)}),
    "branches": (Branch, (5, 4), {0: (1, 20)}),
    "moves": (Mixed, (4, 3), {0: (1, 16)}),
    "frames": (Frames, (1, 2, 40), {2: (9, 60)}),
    "images": (Image, (3, 3, 10, 10), {0: (1, 9)}),
    "height": (Image, (2, 3, 10, 12), {2: (4, 20)}),
    "affine": (lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)), (4, 3, 6), {0: (1, 14)}),
}
ALONE = {  # sizes at which the model's own Python code, or torch's, takes another way
    "branches": {7, *range(12, 21)},
    "moves": {1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_size_of_the_range_is_eagers(case: str, num_threads: int):
    torch.manual_seed(0)
    make, shape, ranges = CASES[case]
    net = make().eval()
    model = Nimble(net).prepare(torch.randn(shape), dynamic={0: ranges}, num_threads=num_threads)
    executor = model.prepared.executor
    assert isinstance(executor, RangedExecutor), model._calls.ranged.reason
    (dim, (least, most)), alone = next(iter(ranges.items())), set()
    for size in [*range(most, least - 1, -1), *range(least, most + 1, 5)]:
        x = torch.randn(*shape[:dim], size, *shape[dim + 1 :])
        executor.poison()
        found = model(x)
        with torch.no_grad():
            torch.testing.assert_close(found, net(x), rtol=2e-5, atol=2e-5)
        if model.prepared.executor is not executor:
            alone.add(size)
    assert alone == ALONE.get(case, set())


class Length(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) == 7 else x + 1


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.shape[0] ** 0.5


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[0]
        for row in range(1, x.shape[0]):
            total = torch.tanh(total + x[row])
        return total


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // 2 + 1].sin()


class Remembering(nn.Module):
    """Keeps what it computed from sizes, as einops does: at each new size its code asks something else."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = lru_cache(lambda size: size // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.halves(x.shape[0] * 2), -1) + 1


@pytest.mark.parametrize("make", [Length, Root, Loop, Half, Remembering])
def test_what_no_function_of_the_size_gives_is_prepared_size_by_size(make: type[nn.Module]):
    model = Nimble(make()).prepare(torch.randn(5, 3), dynamic={"x": {0: (1, 12)}}, num_threads=1, max_schedules=2)
    assert not isinstance(model.prepared.executor, RangedExecutor)
    assert model._calls.ranged.reason
    for size in (1, 4, 7, 12):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), make()(x))


def test_two_sizes_vary_and_share_names():
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            b, n, _ = x.shape
            scores = x @ x.transpose(1, 2) + mask[:, None]
            return torch.softmax(scores, -1).reshape(b * n, n) @ torch.ones(n, 2)

    length = torch.export.Dim("length", min=1, max=33)
    dynamic = {"x": {0: ("batch", 1, 6), 1: length}, "mask": {0: ("batch", 1, 6), 1: ("length", 1, 33)}}
    model = Nimble(Both()).prepare((torch.randn(2, 9, 8), torch.randn(2, 9)), dynamic=dynamic, num_threads=2)
    executor = model.prepared.executor
    assert isinstance(executor, RangedExecutor), model._calls.ranged.reason
    for batch in range(1, 7):
        for size in (33, 32, 9, 3, 2, 1):
            x, mask = torch.randn(batch, size, 8), torch.randn(batch, size)
            executor.poison()
            torch.testing.assert_close(model(x, mask), Both()(x, mask), rtol=2e-5, atol=2e-5)


def test_a_changed_weight_and_a_size_out_of_the_range_are_noticed():
    net = nn.Linear(4, 4)
    model = Nimble(net).prepare(torch.randn(3, 4), dynamic={"input": {0: (1, 8)}}, num_threads=1)
    net.weight.data.mul_(3)
    for size in (2, 8, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(model(x), net(x).detach())
        assert isinstance(model.prepared.executor, RangedExecutor) == (size <= 8)


class Words(nn.Module):
    """Words from a table that is read where it lies, positions that sizes alone choose, weights that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.out = nn.Embedding(50, 16), nn.Embedding(40, 16), nn.Linear(16, 4)
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[0])
        return self.out(self.words(ids) + self.positions(places) + self.shift)


@pytest.mark.parametrize("name", ["words.weight", "positions.weight", "out.weight", "out.bias", "shift"])
def test_whatever_a_size_keeps_of_a_weight_its_change_is_noticed(name: str):
    net = Words().eval()
    model = Nimble(net).prepare(torch.arange(6), dynamic={0: {0: (1, 40)}})
    executor = model.prepared.executor
    assert isinstance(executor, RangedExecutor)
    ids = torch.arange(9)
    torch.testing.assert_close(model(ids), net(ids).detach())
    net.get_parameter(name).data.mul_(3)
    torch.testing.assert_close(model(ids), net(ids).detach())
    assert (model.prepared.executor is executor) == (name == "words.weight")  # which kernels read where it lies


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"y": {0: (1, 8)}}, "names 'y'"),
        ({"input": {3: (1, 8)}}, "no dimension 3"),
        ({"input": {0: (4, 8)}}, "do not lie in"),
        ({"input": {0: (8, 1)}}, r"the range \(8, 1\)"),
        ({"input": {0: (0, 8)}}, "begins at 1"),
        ({}, "0 sizes"),
    ],
)
def test_ranges_that_mean_nothing_are_refused(dynamic: dict, said: str):
    with pytest.raises(InvalidInputError, match=said):
        Nimble(nn.Linear(4, 4)).prepare(torch.randn(3, 4), dynamic=dynamic)


STEPS = {
    "linear": lambda x, n: F.linear(x, torch.linspace(-1, 1, 36).reshape(6, 6)),
    "norm": lambda x, n: F.layer_norm(x, (6,)),
    "softmax": lambda x, n: torch.softmax(x, 0),
    "first": lambda x, n: x + x[:1],
    "mean": lambda x, n: x - x.mean(0, keepdim=True),
    "flat": lambda x, n: x.reshape(-1).cos().view(n, 6),
    "turned": lambda x, n: (x.t() * 2).t().contiguous(),
    "gram": lambda x, n: torch.tanh(x @ x.t()) @ x / 6,
    "cat": lambda x, n: torch.cat([x[1:], x[:1]], 0),
    "cumsum": lambda x, n: torch.cumsum(x, 0) / 10,
    "places": lambda x, n: x + torch.arange(n)[:, None] / 10,
    "mask": lambda x, n: x.masked_fill(torch.ones(n, 6).tril() == 0, 0.5),
    "padded": lambda x, n: F.pad(x, (0, 0, 2, 1))[1 : n + 1],
    "sorted": lambda x, n: torch.sort(x, 0).values,
}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), threads=st.integers(1, 2))
def test_random_programs_give_eagers_answer_at_every_size(names: list[str], threads: int):
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in names:
                x = STEPS[name](x, x.shape[0])
            return x.sin()

    model = Nimble(Steps()).prepare(torch.randn(6, 6), dynamic={0: {0: (2, 14)}}, num_threads=threads)
    assert isinstance(model.prepared.executor, RangedExecutor), model._calls.ranged.reason
    for size in range(2, 15):
        x = torch.randn(size, 6)
        model.prepared.executor.poison()
        torch.testing.assert_close(model(x), Steps()(x), rtol=1e-4, atol=1e-4)


def test_torch_compile_passes_its_symbolic_sizes_on():
    net = Attend(64).eval()
    compiled = torch.compile(net, backend="nimble", dynamic=True)
    for batch, length in [(3, 9), (2, 64), (5, 17), (4, 3), (2, 9)]:
        x = torch.randn(batch, length, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), net(x), rtol=2e-5, atol=2e-5)
    from mlsys_nimble import dynamo

    found = [item for item in gc.get_objects() if type(item) is dynamo._ScheduledGraph]
    executors = [type(graph.calls.latest.executor) for graph in found if graph.calls.latest is not None]
    assert RangedExecutor in executors
    torch._dynamo.reset()


def _answers(model: Nimble, size: int) -> torch.Tensor:
    return model(torch.ones(size, 4))


def test_copies_pickles_and_forks_serve_every_size_too():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    model = Nimble(net).prepare(torch.ones(3, 4), dynamic={"input": {0: (1, 9)}}, num_threads=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for size in (2, 9):
            torch.testing.assert_close(_answers(other, size), _answers(model, size))
        assert isinstance(other.prepared.executor, RangedExecutor)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # sizes that the parent has made ready, and a new one
        close = [torch.allclose(_answers(model, size), net(torch.ones(size, 4)), atol=1e-6) for size in (2, 7)]
        os.write(write, b"1" if all(close) else b"0")
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"1"
    os.waitpid(child, 0)


def test_new_sizes_are_scheduled_once_for_all(monkeypatch: pytest.MonkeyPatch):
    """Streams, lists of workers and the plan of memory are decided once; a new size only evaluates them."""

    def decide(*_: object, **__: object) -> None:
        raise AssertionError("decided again")

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    model = Nimble(net).prepare(torch.randn(4, 6), dynamic={0: {0: (1, 64)}})
    for name in ("candidates", "by_rule", "segments_of", "lay_out", "plan_storage"):
        monkeypatch.setattr(f"mlsys_nimble.backends.cpu.executor.{name}", decide)
    monkeypatch.setattr("mlsys_nimble.planning.streams.assign_streams", decide)
    for size in (1, 9, 64):
        x = torch.randn(size, 6)
        torch.testing.assert_close(model(x), net(x).detach())
    with pytest.raises(InternalError, match="decided again"):  # which a preparation does
        Nimble(net).prepare(torch.randn(4, 6))


@pytest.mark.parametrize("weights", ["pages", "bytes"])
def test_one_preparation_tells_once_which_check_of_weights_is_in_force(
    weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlsys_nimble"), torch.no_grad():
        nimble = Nimble(Branchless().eval()).prepare(torch.randn(3, 4), dynamic={"x": {0: (1, 9)}}, weights=weights)
        for size in (2, 9, 3):
            nimble(torch.randn(size, 4))
    assert nimble._calls is not None
    (served,) = nimble._calls.all
    told = f"prepared x.0 of 1 to 9: {len(served.program.operators)} operators; {served.watch}"
    assert [record.message for record in caplog.records] == [told]
    assert "of weights" in told


class Branchless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()
