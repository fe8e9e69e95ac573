"""The real thing, on a CUDA device (``make test-gpu``): what the recorder cannot show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mlsys_bench.nimble.papers import net as net_of
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cuda.executor import CudaExecutor
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.gpu
BRANCHING = ("six-branch", "darts", "nasnet-mobile", "minilm-l6")


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def executor_of(nimble: Nimble) -> CudaExecutor:
    assert nimble.prepared is not None
    assert isinstance(nimble.prepared.executor, CudaExecutor)
    return nimble.prepared.executor


@pytest.mark.parametrize("name", ["six-branch", "gru", "resnet20-cifar", "darts", "nasnet-mobile", "minilm-l6"])
@pytest.mark.parametrize("kernels", ["triton", "aten"])
def test_nets_give_what_eager_gives(name: str, kernels: str, device: torch.device):
    if name == "minilm-l6":
        pytest.importorskip("transformers")
    module, inputs = net_of(name)
    module.to(device)
    for use_multi_stream in (False, True):
        nimble = Nimble(module).prepare(
            tuple(x.to(device) for x in inputs), kernels=kernels, use_multi_stream=use_multi_stream
        )
        for seed in range(3):
            torch.manual_seed(seed)
            fresh = [x if x.dtype == torch.int64 else torch.randn_like(x) for x in inputs]
            made = nimble(*(x.to(device) for x in fresh))
            wanted = module(*(x.to(device) for x in fresh))
            torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3 * _largest(wanted))
        num_streams = executor_of(nimble).plan.num_streams
        assert num_streams > 1 if use_multi_stream and name in BRANCHING else use_multi_stream or num_streams == 1


def _largest(result: Any) -> float:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return max(tensor.abs().max().item() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_floats(dtype: torch.dtype, device: torch.device):
    module, (x,) = net_of("resnet20-cifar")
    module.to(device, dtype)
    x = x.to(device, dtype)
    made, wanted = Nimble(module).prepare(x)(x), module(x)
    assert made.dtype == dtype
    torch.testing.assert_close(made, wanted, rtol=0.1, atol=0.1)


def test_replays_wait_for_and_are_waited_for_by_the_callers_stream(device: torch.device):
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(device)
    nimble = Nimble(module).prepare(torch.zeros(64, 256, device=device))
    x = torch.zeros(64, 256, device=device)
    nimble(x)
    for number in range(3):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            x.fill_(float(number + 1))
            y = nimble(x) * 1
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(y, module(torch.full_like(x, number + 1)), rtol=1e-4, atol=1e-4)


def test_under_inference_mode_and_autocast(device: torch.device):
    module, (x,) = net_of("resnet20-cifar")
    module.to(device)
    x = x.to(device)
    nimble = Nimble(module).prepare(x)
    with torch.inference_mode():
        torch.testing.assert_close(nimble(x), module(x), rtol=1e-3, atol=1e-3)


def test_results_outlive_later_calls_and_memory_is_shared(device: torch.device):
    module, (x,) = net_of("darts")
    module.to(device)
    nimble, other = Nimble(module).prepare(x.to(device)), Nimble(module).prepare(x.to(device), use_multi_stream=False)
    xs = [torch.randn_like(x).to(device) for _ in range(6)]
    held = [(nimble(y), other(y)) for y in xs]
    for y, results in zip(xs, held, strict=True):
        for result in results:
            torch.testing.assert_close(result, module(y), rtol=1e-3, atol=1e-3)
    first, second = executor_of(nimble).reserved_nbytes, executor_of(other).reserved_nbytes
    assert second <= first  # the second lies in the first one's pool


def test_random_operators_draw_anew(device: torch.device):
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, training=True)

    x = torch.ones(1024, device=device)
    nimble = Nimble(Noisy()).prepare(x)
    torch.cuda.manual_seed(0)
    first, second = nimble(x).clone(), nimble(x).clone()
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["resnet20-cifar", "minilm-l6"])
def test_training_gives_eagers_gradients(name: str, device: torch.device):
    if name == "minilm-l6":
        pytest.importorskip("transformers")
    module, inputs = net_of(name, batch=4)
    module.to(device).train().requires_grad_(True)
    reference = copy.deepcopy(module)
    data = tuple(x.to(device) for x in inputs)
    exact = copy.deepcopy(module).double()
    nimble = Nimble(module).prepare(data, training=True)
    for _ in range(4):
        ours, theirs, wanted = (
            _gradients(call, net, data) for call, net in ((nimble, module), (reference, reference), (exact, exact))
        )
        # Nets of random weights magnify rounding: eager's own distance from float64 is the measure.
        assert _apart(ours, wanted) <= 3 * _apart(theirs, wanted) + 1e-4
        reference.load_state_dict(module.state_dict())
        exact.load_state_dict(module.state_dict())


def _gradients(call: Any, net: nn.Module, data: tuple[Tensor, ...]) -> list[Tensor]:
    net.zero_grad()
    is_exact = next(net.parameters()).dtype == torch.float64
    result = call(*(x.double() if is_exact and x.is_floating_point() else x for x in data))
    (result if isinstance(result, Tensor) else result[-1]).square().mean().backward()
    return [p.grad.double() for p in net.parameters() if p.grad is not None]


def _apart(some: list[Tensor], wanted: list[Tensor]) -> float:
    """The distance over the length of what is wanted."""
    total = sum(float(gradient.square().sum()) for gradient in wanted)
    return float(sum(float((a - b).square().sum()) for a, b in zip(some, wanted, strict=True)) / total) ** 0.5


def test_training_under_autocast(device: torch.device):
    module, (x,) = net_of("resnet20-cifar", batch=4)
    module.to(device).train().requires_grad_(True)
    x = x.to(device)
    nimble = Nimble(module).prepare(x, training=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = nimble(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
