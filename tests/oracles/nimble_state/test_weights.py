"""A model that changed after ``prepare`` answers as it now is, however it was changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.dynamo import nimble
from mlsys_nimble.state import weights
from mlsys_nimble.state.digest import Digest
from mlsys_nimble.state.weights import Attributes
from torch import Tensor, nn

EXECUTORS = ("native", "reference")


class Net(nn.Module):
    """A folded batch norm, packed products, a table that is read in place, a plain tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act: nn.Module = nn.ReLU()
        self.linear = nn.Linear(4 * 5 * 6, 8)
        self.last = nn.LayerNorm(8)
        self.shift = torch.linspace(-1, 1, 8)
        self.scale = 2.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(self.table(ids).unsqueeze(1))))
        y: Tensor = self.last(self.linear(x.flatten(1))) * self.scale + self.shift
        return y


def numpy_of(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor * 2 for name, tensor in model.state_dict().items()}


def new_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 1.5, model.parameters())


def assign(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def swap_in_average(model: nn.Module) -> None:
    """Exchange the weights' content with an exponential moving average's, as evaluation of EMA does."""
    for parameter in model.parameters():
        average = parameter.detach() * 0.7 + 0.05
        kept = parameter.data.clone()
        parameter.data.copy_(average)
        average.copy_(kept)


def swap_tensors(model: Net) -> None:
    torch.utils.swap_tensors(model.linear.bias, nn.Parameter(torch.ones(8)))


CHANGES: dict[str, Callable[[Net], Any]] = {
    ".data.mul_": lambda m: m.linear.weight.data.mul_(2),
    ".data =": lambda m: assign(m.conv.weight, "data", m.conv.weight.data * 2),
    ".data.copy_": lambda m: m.last.weight.data.copy_(torch.arange(8.0)),
    ".data, of one element": lambda m: m.linear.bias.data[7:].fill_(9),
    ".data, two elements exchanged": lambda m: m.linear.bias.data.copy_(m.linear.bias.data.flip(0)),
    ".data, of a folded norm": lambda m: m.norm.running_var.data.mul_(9),
    ".data, of a table": lambda m: m.table.weight.data.neg_(),
    "an operator in place": lambda m: m.norm.weight.add_(1),
    "vector_to_parameters": new_vector,
    "NumPy": lambda m: numpy_of(m.conv.bias).__iadd__(3),
    "NumPy, of a buffer": lambda m: numpy_of(m.norm.running_mean).__iadd__(3),
    "load_state_dict": lambda m: m.load_state_dict(doubled(m)),
    "load_state_dict, assigned": lambda m: m.load_state_dict(doubled(m), assign=True),
    "a new parameter": lambda m: assign(m.linear, "bias", nn.Parameter(torch.ones(8))),
    "no parameter": lambda m: assign(m.linear, "bias", None),
    "a new part": lambda m: assign(m, "act", nn.Tanh()),
    "a new buffer": lambda m: assign(m.norm, "running_mean", torch.full((4,), 3.0)),
    "a plain tensor": lambda m: m.shift.data.add_(1),
    "a new plain tensor": lambda m: assign(m, "shift", torch.ones(8)),
    "a number": lambda m: assign(m, "scale", 3.0),
    "a part's number": lambda m: assign(m.norm, "eps", 0.5),
    "a part's numbers": lambda m: [assign(m.conv, name, (2, 2)) for name in ("padding", "dilation")],
    "an optimiser": lambda m: step(m),
    "an average swapped in": swap_in_average,
    "swap_tensors": swap_tensors,
}


def step(model: nn.Module) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(torch.zeros(1, 5, dtype=torch.long)).square().sum().backward()
    optimiser.step()


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 10, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("change", CHANGES)
def test_prepared_models_notice(model: Net, ids: Tensor, executor: str, change: str):
    prepared = Nimble(model).prepare(ids, executor=executor)
    before = prepared(ids)
    CHANGES[change](model)
    expected = model(ids)
    assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3), "the change changes nothing"
    for _ in range(2):
        torch.testing.assert_close(prepared(ids), expected, rtol=1e-4, atol=1e-5)
    other = torch.cat([ids, ids])  # another schedule of the same model
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
def test_compiled_models_notice(model: Net, ids: Tensor, change: str):
    compiled = torch.compile(model, backend=nimble, options={"executor": "reference"})
    compiled(ids)
    CHANGES[change](model)
    for _ in range(2):
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "swap_tensors"])  # torch refuses it there
def test_models_prepared_for_training_notice(model: Net, ids: Tensor, change: str):
    with torch.enable_grad():
        prepared = Nimble(model).prepare(ids, training=True, executor="reference")
        CHANGES[change](model) if change == "an optimiser" else torch.no_grad()(CHANGES[change])(model)
        for _ in range(2):
            torch.testing.assert_close(prepared(ids), model(ids), rtol=1e-4, atol=1e-5)


def test_the_other_schedules_of_a_changed_model_are_made_anew(model: Net, ids: Tensor):
    prepared = Nimble(model).prepare(ids, executor="native")
    other = torch.cat([ids, ids])
    prepared(other)
    model.linear.weight.data.mul_(2)
    torch.testing.assert_close(prepared(ids), model(ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared(other), model(other), rtol=1e-4, atol=1e-5)


def test_values_read_in_place_are_not_read_twice(model: Net, ids: Tensor):
    prepared = Nimble(model).prepare(ids, executor="native")
    assert prepared.prepared is not None
    watched = prepared.prepared.watch.nbytes
    prepared(ids)
    first = prepared.prepared
    model.table.weight.data.neg_()
    torch.testing.assert_close(prepared(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert prepared.prepared is first
    parameters = [p for p in model.parameters() if p is not model.table.weight]
    assert watched >= sum(p.nbytes for p in parameters)
    assert watched < sum(p.nbytes for p in parameters) + model.table.weight.nbytes


class Wide(nn.Module):
    """Two linear layers that share a weight of 1 MiB, and a third with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x).relu()).relu())
        return y


WIDE_CHANGES: dict[str, Callable[[Wide], Any]] = {
    ".data.mul_, shared": lambda m: m.second.weight.data.mul_(2),
    "one element in place": lambda m: m.third.weight[7, 9].fill_(1e3),
    "a quarter, NumPy": lambda m: numpy_of(m.third.weight)[100:228].__imul__(5),
    "load_state_dict": lambda m: m.load_state_dict(doubled(m)),
    "an optimiser": lambda m: wide_step(m),
    ".data =, shared": lambda m: assign(m.first.weight, "data", m.first.weight * 2),
}


def wide_step(model: nn.Module) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()


def test_large_weights_are_noticed_at_the_next_call():
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(2, 512)
    prepared = Nimble(model).prepare(x, executor="native")
    for name, change in WIDE_CHANGES.items():
        change(model)
        expected = model(x)
        torch.testing.assert_close(prepared(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()), msg=name)


@pytest.mark.parametrize("way", ["refresh", "bytes", "pages"])
def test_one_element_of_a_large_weight_written_behind_torchs_back(way: str):
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(2, 512)
    prepared = Nimble(model).prepare(x, weights="pages" if way == "refresh" else way)
    assert not prepared.refresh()
    model.third.weight.data[300, 3] = 1e3
    expected = model(x)
    if way == "refresh":
        assert prepared.refresh()
    torch.testing.assert_close(prepared(x), expected, rtol=1e-4, atol=1e-3)


def test_refresh_reaches_the_parts_of_a_model_that_runs_eagerly_between():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x * 2 if float(x.sum()) > 0 else x - 1

    model, x = Broken(), torch.randn(2, 256)
    prepared = Nimble(model).prepare(x, fallback="eager")
    prepared(x)
    model.linear.weight.data[200, 3] += 50
    assert prepared.refresh()
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_branch_on_a_weight_is_made_anew():
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("is_on", torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.is_on.item() else x - 1

    model, x = Switch(), torch.randn(3)
    prepared = Nimble(model).prepare(x, executor="reference")
    torch.testing.assert_close(prepared(x), x * 2)
    model.is_on.data.zero_()
    torch.testing.assert_close(prepared(x), x - 1)


def test_a_buffer_that_lies_otherwise_and_is_written_by_both():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3, 2).t())

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x
            return self.seen * 2

    model, x = Counter(), torch.randn(2, 3)
    eager, prepared = copy.deepcopy(model), Nimble(model).prepare(x, executor="native")
    for _ in range(3):
        torch.testing.assert_close(prepared(x), eager(x))
        for each in (model, eager):
            each.seen.data.mul_(0.5)
    torch.testing.assert_close(model.seen, eager.seen)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 1000])
def test_every_byte_counts(size: int, monkeypatch: pytest.MonkeyPatch):
    from mlsys_nimble.state import digest

    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(digest, "load_digest", lambda: None)
        tensor = torch.arange(size, dtype=torch.int16)
        found = Digest([tensor])
        seen = {found.read()}
        for place in range(size):
            tensor[place] += 1 << 9
            seen.add(found.read())
        assert len(seen) == size + 1


def test_bytes_that_change_places_count():
    tensor = torch.arange(64, dtype=torch.int64)
    digest = Digest([tensor])
    before = digest.read()
    tensor.copy_(tensor.roll(8))
    assert digest.read() != before


@pytest.fixture(params=["native", "Python"])
def digests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        from mlsys_nimble.state import digest

        monkeypatch.setattr(digest, "load_digest", lambda: None)
        monkeypatch.setattr(weights, "_compiled", lambda *_: None)


@pytest.mark.usefixtures("digests")
def test_attributes_that_are_equal_are_the_same_and_others_not(model: Net):
    found = Attributes(model)
    assert not found.have_changed()
    model.scale = float("2.0")  # equal, another object
    assert not found.have_changed()
    assert not found.have_changed()
    model.train()  # modes are not watched
    assert not found.have_changed()
    model.conv.stride = tuple([1, 1])  # noqa: C409 - another object
    assert not found.have_changed()
    model.conv.stride = (1, 1.0)
    assert found.have_changed()
    model.conv.stride = (1, 1)
    model.scale = 2  # another type: dtypes may differ
    assert found.have_changed()
    model.scale = 2.0
    assert not found.have_changed()
    model.norm.running_mean = model.norm.running_mean.clone()  # equal, another tensor
    assert found.have_changed()
