"""Training calls that once failed outside of Nimble's own errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.dynamo import nimble
from torch import Tensor, nn


def gradients(model: nn.Module, result: Tensor) -> list[Tensor]:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(result.square().sum(), wanted))


def same_step(ours: Any, net: nn.Module, eager: nn.Module, *args: Tensor) -> None:
    got, expected = ours(*args), eager(*args)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(net, got), gradients(eager, expected), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", [nn.Linear(4, 3), nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6), nn.ReLU())])
def test_compiled_training_takes_any_number_of_batch_sizes(net: nn.Module):
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(net), torch.compile(net, backend=nimble)
    for batch in (2, 3, 5, 7, 3, 2, 11):
        same_step(compiled, net, eager, torch.randn((batch, 4) if isinstance(net, nn.Linear) else (batch, 4, 3)))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x)[0])
        return y


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(4, 5, 2), nn.LSTM(4, 5, bidirectional=True, bias=False), nn.GRU(4, 5), nn.RNN(4, 5)],
    ids=["lstm", "lstm both ways", "gru", "rnn"],
)
def test_recurrent_layers_train(layer: nn.Module):
    net = Recurrent(layer)
    eager = copy.deepcopy(net)
    prepared = Nimble(net).prepare(torch.randn(3, 2, 4), training=True)
    for _ in range(2):
        same_step(prepared, net, eager, torch.randn(3, 2, 4))


class Plain(nn.Module):
    """A table that is neither parameter nor buffer, and a state that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), torch.randn(3)
        self.again = self.table
        self.register_buffer("mean", torch.zeros(3))
        self.seen = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.table - self.again
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.seen = self.seen + 1
        return y - self.mean


def test_plain_tensors_are_read_and_states_kept():
    net = Plain()
    eager = copy.deepcopy(net)
    prepared = Nimble(net).prepare(torch.randn(4, 3), training=True)
    torch.testing.assert_close(net.mean, eager.mean)
    for _ in range(3):
        same_step(prepared, net, eager, torch.randn(4, 3))
        torch.testing.assert_close(net.seen, eager.seen)
        for each in (net, eager):
            each.table.mul_(1.5)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last * 2


def test_a_tensor_kept_from_nothing_is_refused():
    net = Keeps()
    with pytest.raises(CaptureError, match="attribute last"):
        Nimble(net).prepare(torch.randn(4, 3), training=True)
    assert net.last is None


class LooksFirst(nn.Module):
    """Leaves a mask out that masks nothing, unless it is being compiled: as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return y
        return y.masked_fill(~mask, 0.0)


def test_training_takes_the_branch_of_a_compiler():
    net = LooksFirst()
    eager = copy.deepcopy(net)
    whole, part = torch.ones(4, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool).tril()
    prepared = Nimble(net).prepare((torch.randn(4, 3), whole), training=True, executor="reference")
    for mask in (part, whole):
        x = torch.randn(4, 3)
        for each, run in ((net, prepared), (eager, eager)):
            each.zero_grad()
            run(x, mask).square().sum().backward()
        torch.testing.assert_close(net.linear.weight.grad, eager.linear.weight.grad)
    assert not torch.compiler.is_compiling()
