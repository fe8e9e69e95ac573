"""Ways to train that torch offers around a model: each gives what eager gives, or is refused with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.capture.layouts import overlaps_itself
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint


class Small(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.checkpoints = checkpoints

    def inner(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)
        result: Tensor = self.last(hidden)
        return result


def pair(net: nn.Module, x: Tensor, **options: Any) -> tuple[Nimble, nn.Module]:
    return Nimble(net).prepare(x, training=True, **options), copy.deepcopy(net)


def step(call: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    owner.zero_grad()
    result = call(x)
    result.square().mean().backward()
    return result.detach(), [parameter.grad for parameter in owner.parameters()]


def test_batches_and_lengths_that_change():
    model, eager = pair(Small(), torch.randn(4, 6))
    for shape in [(4, 6), (7, 6), (1, 6), (2, 5, 6), (2, 9, 6), (4, 6)]:
        x = torch.randn(shape)
        torch.testing.assert_close(step(model, model, x), step(eager, eager, x))


def test_gradient_checkpointing_within_the_model():
    x = torch.randn(4, 6)
    model, eager = pair(Small(checkpoints=True), x)
    torch.testing.assert_close(step(model, model, x), step(eager, eager, x))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_gradient_checkpointing_around_a_prepared_model(is_reentrant: bool):
    x = torch.randn(4, 6)
    model, eager = pair(Small(), x)
    # Without use_reentrant the input need not require a gradient.
    given = x.clone().requires_grad_(is_reentrant)
    around = step(lambda x: checkpoint(model, x, use_reentrant=is_reentrant), model, given)
    torch.testing.assert_close(around, step(eager, eager, x))


OPTIMISERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, fused": lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "Adam, fused": lambda parameters: optim.Adam(parameters, 0.01, fused=True),
    "AdamW, fused": lambda parameters: optim.AdamW(parameters, 0.01, fused=True),
    "Adagrad, fused": lambda parameters: optim.Adagrad(parameters, 0.01, fused=True),
    "Adam, foreach": lambda parameters: optim.Adam(parameters, 0.01, foreach=True),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "one cycle": lambda optimiser: lr_scheduler.OneCycleLR(optimiser, 0.3, total_steps=6),
    "cosine": lambda optimiser: lr_scheduler.CosineAnnealingLR(optimiser, 4),
    "SWALR": lambda optimiser: swa_utils.SWALR(optimiser, 0.05, anneal_epochs=3),
}
AVERAGES: dict[str, Any] = {"EMA": swa_utils.get_ema_multi_avg_fn(0.9), "SWA": swa_utils.get_swa_multi_avg_fn()}


@pytest.mark.parametrize(
    ("optimiser", "scheduler", "average"),
    [
        *((name, "", "") for name in OPTIMISERS),
        *(("SGD, fused", name, "") for name in SCHEDULERS),
        ("SGD, fused", "SWALR", "SWA"),
        ("Adam, fused", "", "EMA"),
    ],
)
def test_six_steps_end_where_eager_ends(optimiser: str, scheduler: str, average: str):
    ends = []
    for net in pair(Small(), torch.randn(4, 6)):
        torch.manual_seed(2)
        works = OPTIMISERS[optimiser](net.parameters())
        follows = SCHEDULERS[scheduler](works) if scheduler else None
        averaged = swa_utils.AveragedModel(net, multi_avg_fn=AVERAGES[average]) if average else None
        for _ in range(6):
            works.zero_grad()
            net(torch.randn(4, 6)).square().mean().backward()
            works.step()
            if follows is not None:
                follows.step()
            if averaged is not None:
                averaged.update_parameters(net)
        x = torch.ones(2, 6)
        results = [net(x), *([averaged(x)] if averaged is not None else [])]
        ends.append([each.detach() for each in (*results, *net.parameters())])
    torch.testing.assert_close(*ends)


def test_statistics_of_an_average_are_refused_where_they_depend_on_a_count():
    """``update_bn`` sets the momentum to None: a batch norm then divides by a number that it counts in a tensor."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    data = [torch.randn(4, 6) for _ in range(3)]
    model, eager = pair(net, data[0])
    averaged, wanted = swa_utils.AveragedModel(model), swa_utils.AveragedModel(eager)
    with pytest.raises(CaptureError, match="depends on values"):
        swa_utils.update_bn(data, averaged)
    swa_utils.update_bn(data, averaged.module.model)  # of the wrapped model itself
    swa_utils.update_bn(data, wanted.module)
    torch.testing.assert_close(list(averaged.buffers())[1:], list(wanted.buffers())[1:])
    torch.testing.assert_close(averaged.eval()(data[0]), wanted.eval()(data[0]))


def test_functional_calls_replay():
    x = torch.randn(4, 6)
    model, eager = pair(Small(), x)
    doubled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    others = {name: 2 * parameter.detach() for name, parameter in eager.named_parameters()}
    wanted = torch.func.functional_call(eager, others, (x,))
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), wanted)


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda net, x: torch.func.grad(lambda x: net(x).square().mean())(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x,)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_or_left_to_the_model(name: str, training: bool):
    x, net = torch.randn(4, 6), Small()
    with pytest.raises(CaptureError, match=r"within a transform of torch\.func"):
        TRANSFORMS[name](Nimble(net).prepare(x, training=training), x)
    model = Nimble(net).prepare(x, training=training, fallback="eager")
    if training or name == "vmap":
        torch.testing.assert_close(TRANSFORMS[name](model, x), TRANSFORMS[name](net, x))


class Windows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        doubled = x * 2
        return doubled.unfold(0, 3, 1), doubled.as_strided((4, 2), (2, 1))


@pytest.mark.parametrize("way", ["prepare", "compile"])
def test_every_window_counts(way: str):
    net = Windows()
    x = torch.arange(8.0, requires_grad=True)
    model = torch.compile(net, backend="nimble") if way == "compile" else Nimble(net).prepare(x, training=True)
    found = []
    for run in (model, net):
        first, second = run(x)
        ((first * torch.arange(18.0).view(6, 3)).sum() + (second * 5).sum()).backward()
        found.append((first.detach(), second.detach(), x.grad))
        x.grad = None
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(("shape", "stride", "expected"), [
    ((5, 2), (1, 1), True), ((5, 2), (2, 1), False), ((2, 5), (1, 2), False), ((3, 6), (0, 1), False),
    ((1, 4), (1, 1), False), ((3, 3, 3), (3, 1, 2), True), ((), (), False),
])  # fmt: skip
def test_which_overlap(shape: tuple[int, ...], stride: tuple[int, ...], expected: bool):
    assert overlaps_itself(torch.empty(64).as_strided(shape, stride)) == expected
