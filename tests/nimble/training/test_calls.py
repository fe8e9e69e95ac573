"""Training: gradients, buffers and optimisers beside eager's, for nets with every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.training.executor import TensorExecutor
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-5  # of the largest gradient of the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.other(self.two(functional.relu(self.norm(self.one(x))))) + x)


class Words(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, activation="gelu")
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(self.embedding(tokens)).mean(1))
        return result


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def tokens() -> Tensor:
    return torch.randint(0, 50, (4, 6))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.MaxPool2d(2), Block(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def odd_channels() -> nn.Module:  # no whole vectors: torch's own batch norm
    convolutions = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 6, 3, groups=6)
    return nn.Sequential(*convolutions, nn.BatchNorm2d(6), nn.Hardtanh(0, 6), nn.Flatten(), nn.Linear(6, 4))


def no_norms() -> nn.Module:  # a view of what lies channels last goes to the backward pass
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.Linear(576, 4))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.LayerNorm(32), nn.Sigmoid(), nn.Linear(32, 4))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (residual, images),
    "odd channels": (odd_channels, images),
    "no norms": (no_norms, images),
    "perceptron": (perceptron, images),
    "words": (Words, tokens),
}


def compare(model: nn.Module, reference: nn.Module) -> None:
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max().item() <= TOLERANCE * largest, name
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def pair(name: str, **options: object) -> tuple[nn.Module, nn.Module, Nimble, Callable[[], Tensor]]:
    torch.manual_seed(0)
    make, example = NETS[name]
    model = make()
    reference = copy.deepcopy(model)
    return model, reference, Nimble(model).prepare(example(), training=True, **options), example  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "rematerialises"), [*((name, True) for name in NETS), ("residual", False)])
def test_gradients_and_buffers_are_eagers_step_after_step(name: str, rematerialises: bool):
    model, reference, nimble, example = pair(name, rematerialises=rematerialises)
    for (key, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs), key  # prepare left no trace
    assert all(parameter.grad is None for parameter in model.parameters())
    optimisers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (model, reference)]
    for _ in range(3):
        x, target = example(), torch.randint(0, 4, (4,))
        for optimiser, net in zip(optimisers, (nimble, reference), strict=True):
            optimiser.zero_grad()
            functional.cross_entropy(net(x), target).backward()
        compare(model, reference)
        reference.load_state_dict(model.state_dict())  # so that steps are compared, not their sum
        for optimiser in optimisers:
            optimiser.step()
        reference.load_state_dict(model.state_dict())


def test_gradients_add_up_over_calls_and_forward_may_run_ahead():
    model, reference, nimble, example = pair("residual")
    xs = [example() for _ in range(3)]
    losses = [nimble(x).square().sum() for x in xs]  # three forward passes before the first backward pass
    for loss in reversed(losses):
        loss.backward()
    for loss in reversed([reference(x).square().sum() for x in xs]):
        loss.backward()
    compare(model, reference)


def test_results_stay_as_they_are_when_the_model_is_called_again():
    _, _, nimble, example = pair("perceptron")
    first = nimble(example())
    kept = first.detach().clone()
    for _ in range(3):
        nimble(example()).sum().backward()
    assert torch.equal(first, kept)


def test_inputs_get_gradients_too():
    _, reference, nimble, example = pair("residual")
    x = example().requires_grad_()
    y = x.detach().clone().requires_grad_()
    nimble(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6)


def test_modes_and_shapes_have_graphs_of_their_own():
    model, reference, nimble, example = pair("residual")
    nimble.eval()
    reference.eval()
    x = example()[:2]
    with torch.no_grad():
        torch.testing.assert_close(nimble(x), reference(x))
    nimble(x).sum().backward()
    reference(x).sum().backward()
    compare(model, reference)
    assert not nimble.model.training


def test_frozen_parameters_get_no_gradient():
    model, reference, nimble, example = pair("residual")
    for net in (model, reference):
        next(net.parameters()).requires_grad_(False)
    x = example()
    nimble(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert next(model.parameters()).grad is None
    last, theirs = list(model.parameters())[-1].grad, list(reference.parameters())[-1].grad
    assert last is not None
    torch.testing.assert_close(last, theirs)


def test_frozen_norms_stay_frozen_and_modes_as_they_are():
    torch.manual_seed(0)
    model = residual()
    norm = model[1]
    norm.eval()
    reference, x = copy.deepcopy(model), images()
    nimble = Nimble(model).prepare(x, training=True)
    assert not norm.training
    nimble(x).square().sum().backward()
    reference(x).square().sum().backward()
    compare(model, reference)


def test_a_schedule_made_in_inference_mode_runs_outside_of_it():
    _, reference, nimble, example = pair("perceptron")
    nimble.eval()
    x = example()
    with torch.inference_mode():
        torch.testing.assert_close(nimble(x), reference(x))
    with torch.no_grad():
        torch.testing.assert_close(nimble(x), reference(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens))
        return result


def test_tied_weights_get_the_sum_of_their_gradients():
    model, x = Tied(), torch.randint(0, 9, (3, 5))
    reference = copy.deepcopy(model)
    nimble = Nimble(model).prepare(x, training=True)
    nimble(x).square().sum().backward()
    reference(x).square().sum().backward()
    compare(model, reference)


def test_options_without_meaning_are_refused():
    model, x = nn.Linear(3, 2), torch.zeros(1, 3)
    with pytest.raises(InvalidInputError, match="'triton' or 'aten'"):
        Nimble(model).prepare(x, training=True, kernels="best")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidInputError, match="torch sees none"):
            Nimble(model).prepare(x, training=True, executor="cuda")


def test_dropout_draws_anew_each_step_and_as_the_seed_says():
    torch.manual_seed(0)
    model = Words(dropout=0.5)
    state = torch.get_rng_state()
    nimble = Nimble(model).prepare(tokens(), training=True)
    x = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(1))
    torch.set_rng_state(state)
    first, second = nimble(x), nimble(x)
    assert not torch.allclose(first, second)
    torch.set_rng_state(state)
    assert torch.equal(nimble(x), first)


def test_bf16_under_autocast():
    model, reference, nimble, example = pair("residual")
    x = example()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = nimble(x), reference(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    ours.float().square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_images_may_lie_channels_last():
    model, reference, nimble, example = pair("residual")
    for layout in (torch.channels_last, torch.contiguous_format):
        x = example().contiguous(memory_format=layout)
        nimble(x).square().sum().backward()
        reference(x).square().sum().backward()
        compare(model, reference)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if y.sum() > 0 else y * 3


def test_an_unschedulable_model_is_refused_or_trained_in_parts():
    model, x = Branching(), torch.ones(2, 4)
    with pytest.raises(CaptureError, match="fallback='eager'"):
        Nimble(model).prepare(x, training=True)
    reference = copy.deepcopy(model)
    nimble = Nimble(model).prepare(x, training=True, fallback="eager")
    nimble(x).sum().backward()
    reference(x).sum().backward()
    compare(model, reference)


def test_executors_hold_memory_that_steps_use_again():
    _, _, nimble, example = pair("residual")
    nimble(example()).sum().backward()
    assert nimble.trained is not None
    assert nimble.trained.forward is not None
    executor = nimble.trained.forward.executor
    assert isinstance(executor, TensorExecutor)
    held = executor.nbytes
    for _ in range(3):
        nimble(example()).sum().backward()
    assert executor.nbytes == held > 0
