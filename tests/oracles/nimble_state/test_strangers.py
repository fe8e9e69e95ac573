"""Models and inputs that nobody here foresaw: each answers as eager does, or is refused with its reason."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from torch import Tensor, nn

SCALE = 2.0  # that a model reads


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def prepared(function: Callable[..., Any], *args: Any, **held: Any) -> Nimble:
    return Nimble(Call(function, **held)).prepare(args, executor="reference")


# Strides


def write_reshaped(self: Any, x: Tensor) -> Tensor:
    y = x.reshape(-1)
    y[0] = 100.0
    return x + 1


def write_computed(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    z = y.reshape(-1)
    z += 1
    return y


STRIDED: dict[str, Callable[..., Any]] = {
    "written": write_reshaped,
    "written, computed": write_computed,
    "returned": lambda self, x: (x.reshape(-1), x.contiguous(), x[0]),
    "asked for": lambda self, x: x * (2 if x.is_contiguous() else 3) + x.stride(0),
    "flattened": lambda self, x: x.flatten() + 1,
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(3, 4),
    "turned": lambda: torch.randn(4, 3).t(),
    "every other": lambda: torch.randn(6, 8)[::2, ::2],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("first", LAYOUTS)
def test_strides_decide_what_they_decide_in_eager(name: str, first: str):
    model = prepared(STRIDED[name], LAYOUTS[first]())
    for make in (*LAYOUTS.values(), LAYOUTS["rows"]):
        x = make()
        other = torch.empty_strided(x.shape, x.stride()).copy_(x)
        got, expected = model(x), model.model(other)
        torch.testing.assert_close((got, x), (expected, other))
        if isinstance(got, tuple):
            assert shares(x, *got) == shares(other, *expected)


def shares(*tensors: Tensor) -> list[bool]:
    return [one.data_ptr() == other.data_ptr() for one, other in itertools.combinations(tensors, 2)]


def test_an_expanded_and_an_overlapping_argument():
    model = prepared(lambda self, x: (x.reshape(-1) * 2, x.sum(0)), torch.randn(1, 4).expand(3, 4))
    for x in (torch.randn(3, 4), torch.randn(6).unfold(0, 4, 1), torch.randn(1, 4).expand(3, 4)):
        torch.testing.assert_close(model(x), model.model(x))


@pytest.mark.parametrize("first", [torch.view_as_complex(torch.randn(4, 2)), torch.randn(4, dtype=torch.cfloat).conj()])
def test_views_of_conjugated_arguments(first: Tensor):
    model = prepared(lambda self, x: (x.real, x.imag, x * 2), first)
    for x in (torch.randn(4, dtype=torch.cfloat), torch.randn(4, dtype=torch.cfloat).conj()):
        torch.testing.assert_close(model(x), model.model(x))


# Random numbers


def test_a_generator_of_the_models_own_is_drawn_from_as_in_eager():
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    ours, eager = (Call(lambda s, x: x + torch.rand(3, generator=s.g), g=each) for each in generators)
    model, x = Nimble(ours).prepare(torch.zeros(3), executor="reference"), torch.zeros(3)
    for _ in range(3):
        assert torch.equal(model(x), eager(x))


def seeded(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(3)


def forked(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        return x + torch.rand(3)


RESEEDING: dict[str, Callable[..., Any]] = {
    "manual_seed": seeded,
    "fork_rng": forked,
    "a new generator": lambda self, x: x + torch.rand(3, generator=torch.Generator().manual_seed(3)),
    "its own, seeded": lambda self, x: x + torch.rand(3, generator=self.g.manual_seed(3)),
}


@pytest.mark.parametrize("name", RESEEDING)
def test_a_model_that_seeds_its_random_numbers_is_refused(name: str):
    torch.manual_seed(3)
    with pytest.raises(CaptureError, match="sets the state of one"):
        prepared(RESEEDING[name], torch.zeros(3), g=torch.Generator())


# What Python keeps


def counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return x * 2 if self.count < 9 else x * 3


KEEPING: dict[str, tuple[Callable[..., Any], str]] = {
    "a counter": (counted, "changes the attribute count at each call"),
    "a list of tensors": (lambda self, x: self.seen.append(x * 2) or x + 1, "keeps a tensor"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_replay_would_not_do_again_is_refused(name: str):
    function, said = KEEPING[name]
    with pytest.raises(CaptureError, match=said):
        prepared(function, torch.zeros(3), count=0, seen=[])


def test_a_hook_that_collects_activations_is_refused():
    seen: dict[str, Any] = {}
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    net[0].register_forward_hook(lambda module, args, result: seen.update(linear=result))
    with pytest.raises(CaptureError, match=r"keeps a tensor that it has computed from inputs \(linear.py"):
        Nimble(net).prepare(torch.zeros(2, 3), executor="reference")


class ReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE


CHANGES: dict[str, Callable[[nn.Sequential, pytest.MonkeyPatch], Any]] = {
    "a module appended": lambda net, patch: net.append(nn.Tanh()),
    "a hook": lambda net, patch: net[0].register_forward_hook(lambda module, args, result: result * 3),
    "a hook before": lambda net, patch: net[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "a hook removed": lambda net, patch: net[1]._forward_hooks.clear(),
    "forward replaced": lambda net, patch: patch.setattr(net[0], "forward", lambda x: x * 5),
    "a global number": lambda net, patch: patch.setitem(globals(), "SCALE", 3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_what_runs_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(nn.Linear(3, 3), ReadsGlobal())
    net[1].register_forward_hook(lambda module, args, result: result + 1)
    model, x = Nimble(net).prepare(torch.randn(2, 3), executor="reference"), torch.randn(2, 3)
    before = model(x)
    torch.testing.assert_close(before, net(x))
    CHANGES[name](net, monkeypatch)
    assert not torch.equal(before, net(x))
    torch.testing.assert_close(model(x), net(x))


# Encoders with padding

ROWS = {
    "to the right": [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]],
    "short": [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "to the left": [[1, 0, 0, 0, 0], [0, 0, 0, 1, 1]],
    "one empty": [[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "none": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu", "mask_check": False}])
def test_padded_positions_of_an_encoder_are_eagers(options: dict[str, Any]):
    options = dict(options)
    whole = {"mask_check": options.pop("mask_check", True)}
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    net = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), **whole).eval()
    masks = {name: torch.tensor(rows).bool() for name, rows in ROWS.items()}
    kwargs = {"src_key_padding_mask": masks["to the left"]}
    model = Nimble(net).prepare(torch.randn(2, 5, 8), example_kwargs=kwargs, executor="reference")
    for mask in masks.values():
        x = torch.randn(2, 5, 8)
        expected = net(x, src_key_padding_mask=mask)
        torch.testing.assert_close(model(x, src_key_padding_mask=mask), expected, equal_nan=True)
    assert net.forward.__func__.__module__ == "torch.nn.modules.transformer"


# Calls, results and modules of every kind


def test_the_default_dtype_and_autocast_have_schedules_of_their_own():
    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model = prepared(lambda self, x: x @ x + torch.zeros(3).sum() + torch.tensor(1.5).expand(3), x)
    assert model(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert model(x).dtype is model.model(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("result", [lambda self, x: None, lambda self, x: x.shape[0], lambda self, x: x.shape])
def test_results_without_tensors(result: Any):
    model = prepared(result, torch.zeros(3, 2))
    for x in (torch.zeros(3, 2), torch.zeros(4, 2)):
        assert (type(model(x)), model(x)) == (type(result(None, x)), result(None, x))


NO_INPUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor"),
    "meta": (lambda: torch.zeros(2, device="meta"), "lie on meta"),
    "float8": (lambda: torch.zeros(2).to(torch.float8_e4m3fn), "dtype float8"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NO_INPUTS)
def test_inputs_that_no_schedule_holds_are_refused(name: str):
    make, said = NO_INPUTS[name]
    with pytest.raises(CaptureError, match=said) as raised:
        prepared(lambda self, x: x, make())
    assert type(raised.value) is CaptureError


def test_a_prepared_model_within_another():
    inner = Nimble(nn.Linear(3, 3)).prepare(torch.zeros(2, 3), executor="reference")
    model, x = prepared(lambda self, x: self.inner(x) + 1, torch.zeros(2, 3), inner=inner), torch.randn(2, 3)
    torch.testing.assert_close(model(x), inner.model(x) + 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torchscript():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3)
    model = Nimble(torch.jit.trace(copy.deepcopy(net), x)).prepare(x, executor="reference")
    torch.testing.assert_close(model(x), net(x))
    with pytest.raises(CaptureError, match="a TorchScript module, which cannot be watched"):
        Nimble(torch.jit.script(net)).prepare(x, executor="reference")
    with pytest.raises(CaptureError, match=r"UninitializedParameter\. Call the model once before"):
        Nimble(nn.LazyLinear(3)).prepare(x, executor="reference")
