"""Where torch cuts a size off, or Python divides it, one preparation serves the sizes at which it does the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from mlsys_nimble import InternalError, Nimble
from mlsys_nimble.backends.cpu.ranged import RangedExecutor
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

TABLE = torch.randn(70, 4)


def remainder(x: Tensor, y: Tensor) -> Tensor:
    return x[x.shape[0] % 16 // 14 :] * 2


def padded_to_a_multiple(x: Tensor, y: Tensor) -> Tensor:
    n = x.shape[0]
    rows = F.pad(x, (0, 0, 0, -n % 11)).view(-1, 11, 4).sum(1)
    return rows * 2 if n > 11 else rows - 1


def last_rows(x: Tensor, y: Tensor) -> Tensor:
    rows = x[-3:].exp()
    return rows.sum(0) if rows.shape[0] % 2 else rows.sum(0) - 1


def part_of_both(x: Tensor, y: Tensor) -> Tensor:
    both = torch.cat([x, y]) if x.shape[0] < 20 else torch.cat([y, x])
    return both.split(20)[0] * 2


def as_far_as(x: Tensor, y: Tensor) -> Tensor:
    return x[: y.shape[0] * 20].exp()


def at_most(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y])[:33].exp()


def turned(x: Tensor, y: Tensor) -> Tensor:
    return x[y.shape[0] :].roll(y.shape[0], 0) * 2


def one_row(x: Tensor, y: Tensor) -> Tensor:
    return TABLE[x.shape[0] + y.shape[0] - 5] + x


def some_rows(x: Tensor, y: Tensor) -> Tensor:
    return TABLE.narrow(0, x.shape[0], y.shape[0]) + y


def squeezed(x: Tensor, y: Tensor) -> Tensor:
    return x[: y.shape[0] // 30 + 1].exp().squeeze(0).sum(0)


NETS = [
    remainder,
    padded_to_a_multiple,
    last_rows,
    part_of_both,
    as_far_as,
    at_most,
    turned,
    one_row,
    some_rows,
    squeezed,
]


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.parametrize("function", NETS)
def test_sizes_between_those_tried_are_eagers(function: Callable[[Tensor, Tensor], Tensor]):
    x, y = torch.randn(40, 4), torch.randn(40, 4)
    dynamic = {"x": {0: ("n", 1, 40)}, "y": {0: ("m", 1, 40)}}
    model = Nimble(Net(function)).prepare((x[:9], y[:7]), dynamic=dynamic, num_threads=1, optimises=False)
    for n, m in product((1, 2, 3, 5, 11, 14, 15, 22, 38, 40), (1, 2, 11, 33, 40)):
        try:
            expected = function(x[:n], y[:m])
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error)):
                model(x[:n], y[:m])
            continue
        torch.testing.assert_close(model(x[:n], y[:m]), expected)


class Steps(nn.Module):
    """A window's step and a remainder that are 1 and the size itself at all small sizes; a size as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1, stride=32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x).relu(), x.tril(x.shape[2] % 30)


def test_what_dynamo_computes_of_sizes_is_computed_for_each():
    net = Steps()
    compiled = torch.compile(net, backend="nimble", dynamic=True)
    with torch.no_grad():
        for size in (20, 31, 40, 100):
            x = torch.randn(2, 4, size)
            torch.testing.assert_close(compiled(x), net(x))


def test_a_reshape_that_is_one_at_even_sizes_alone_is_prepared_for_each():
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[2] % 2:
                return x
            return F.pixel_unshuffle(x + F.max_pool2d(x, 2).sum(), 2) * 2

    model = Nimble(Pairs()).prepare(torch.randn(1, 2, 8, 4), dynamic={"x": {2: (1, 20)}}, num_threads=1)
    for size in (2, 3, 8, 10, 20):
        x = torch.randn(1, 2, size, 4)
        torch.testing.assert_close(model(x), Pairs()(x))


def test_sizes_among_the_results_are_integers():
    class Counts(nn.Module):
        def forward(self, x: Tensor, count: int) -> tuple[Tensor, int, int, int]:
            return x * 2, x.shape[1], count, x.shape[0] // 32

    model = Nimble(Counts()).prepare((torch.randn(9, 4), 3), dynamic={"x": {0: (1, 31)}})
    found = model(torch.randn(20, 4), 3)[1:]
    assert (found, [*map(type, found)]) == ((4, 3, 0), [int] * 3)
    model = Nimble(Counts()).prepare((torch.randn(9, 4), 3), dynamic={"x": {0: (1, 63)}})
    assert [model(torch.randn(size, 4), 3)[3] for size in (31, 32)] == [0, 1]


@pytest.mark.parametrize("function", [remainder, last_rows])
def test_one_preparation_serves_the_others(function: Callable[[Tensor, Tensor], Tensor]):
    x, y = torch.randn(40, 4), torch.randn(4, 4)
    model = Nimble(Net(function)).prepare((x[:9], y), dynamic={"x": {0: (1, 40)}}, num_threads=1)
    model(x[:25], y)
    assert isinstance(model.prepared.executor, RangedExecutor)


def test_a_fault_of_nimbles_own_is_reported_as_one(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("no strides")

    monkeypatch.setattr("mlsys_nimble.prepared.optimise", fails)
    with pytest.raises(InternalError, match=r"AssertionError: no strides"):
        Nimble(nn.Tanh()).prepare(torch.randn(3, 4), dynamic={"input": {0: (1, 9)}})
