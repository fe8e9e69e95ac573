"""Captures of CUDA graphs that fail, and pools that outlive their graphs: what comes after works as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlsys_core.device import CudaDevice
from mlsys_core.device.cuda_graphs import GraphPool, capturing

pytestmark = pytest.mark.gpu


def raises(cuda: CudaDevice, x: Any) -> None:
    raise ValueError("of the work")


def waits(cuda: CudaDevice, x: Any) -> None:
    (x + 1).sum().item()


def forgets_a_stream(cuda: CudaDevice, x: Any) -> None:
    import torch

    stream = cuda.stream()
    event = cuda.event()
    cuda.current_stream().record(event)
    stream.wait(event)
    with torch.cuda.stream(stream.torch_stream):
        x.add(1)


def copies_from_host(cuda: CudaDevice, x: Any) -> None:
    import torch

    torch.ones(3).to(x.device)
    torch.rand(3, device=x.device)


def fails_on_another_stream(cuda: CudaDevice, x: Any) -> None:
    forgets_a_stream(cuda, x)
    raise ValueError("of the work")


def _capture(work: Callable[[CudaDevice, Any], None], cuda: CudaDevice, x: Any, pool: GraphPool, origin: Any) -> None:
    import torch

    with capturing(stream=origin, pool=pool):
        torch.rand(2, device=cuda.name)
        work(cuda, x)


WORKS = (raises, waits, forgets_a_stream, copies_from_host, fails_on_another_stream)


@pytest.mark.parametrize("work", WORKS)
def test_after_a_failed_capture_all_works_as_before(cuda: CudaDevice, work: Callable[[CudaDevice, Any], None]) -> None:
    import torch

    pool, x = GraphPool(cuda), torch.ones(4, device=cuda.name)
    origin = cuda.stream()
    with capturing(stream=origin, pool=pool) as earlier:
        drawn = torch.rand(4, device=cuda.name)
    before = torch.cuda.current_stream()
    with pytest.raises(Exception) as caught:  # noqa: PT011 any of torch's
        _capture(work, cuda, x, pool, origin)
    if work in (raises, fails_on_another_stream):
        assert type(caught.value) is ValueError
    assert torch.cuda.current_stream() == before
    with capturing(stream=origin, pool=pool) as graph:
        y = x * 3
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [6] * 4
    torch.cuda.manual_seed(0)
    expected = [torch.rand(4, device=cuda.name).tolist() for _ in range(2)]
    assert expected[0] != expected[1]
    torch.cuda.manual_seed(0)
    for numbers in expected:  # an earlier graph draws from the same generator
        earlier.replay()
        assert drawn.tolist() == numbers


def test_a_pool_outlives_its_graphs(cuda: CudaDevice) -> None:
    import torch

    pool, x = GraphPool(cuda), torch.ones(4, device=cuda.name)
    for _ in range(3):
        with capturing(pool=pool) as graph:
            y = x + 1
        graph.replay()
        del graph  # y still lies in the pool
    assert y.tolist() == [2] * 4
