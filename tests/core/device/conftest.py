"""Devices under test, and the few acts whose meaning differs between them: block a stream, write and read a cell."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlsys_core.device import CudaDevice, Device, Stream, get_device
from mlsys_core.errors import DeviceError, MissingDependencyError


class Bench:
    """Work that differs on every device: cells are one-element tensors there."""

    def __init__(self, device: Device) -> None:
        import torch

        self.device = device
        self._torch = torch
        self._gates: list[threading.Event] = []
        if device.kind == "cuda":  # load the kernels now: loading one later waits for the whole device
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
            a, b = self.cell(), self.cell()
            self.copy(a, b)
            self.write(a, 1.0)
            a.item()

    def cell(self) -> Any:
        cell = self._torch.zeros(1, device=self.device.name)
        if self.device.kind == "cuda":
            self._torch.cuda.synchronize(self.device.index)
        return cell

    def write(self, cell: Any, value: float) -> None:
        cell.fill_(value)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def block(self, stream: Stream) -> Callable[[], None]:
        """Keep ``stream`` busy until the returned function is called (CUDA: for some tenths of a second)."""
        if self.device.kind == "cuda":
            stream.submit(self._torch.cuda._sleep, 1_000_000_000)
            return lambda: None
        gate = threading.Event()
        self._gates.append(gate)
        stream.submit(gate.wait, 20)  # bounded: a test that fails before the release closes the stream first
        return gate.set

    def release_all(self) -> None:
        for gate in self._gates:
            gate.set()


def open_device(name: str) -> Device:
    """Skips where there is no such device, unless the environment insists on a GPU: then a run without one fails."""
    try:
        return get_device(name)
    except (DeviceError, MissingDependencyError) as error:
        if os.environ.get("MLSYS_REQUIRE_GPU") == "1":
            pytest.fail(f"MLSYS_REQUIRE_GPU=1, but {error}")
        pytest.skip(str(error))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


@pytest.fixture
def cuda() -> CudaDevice:
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    bench = Bench(device)
    yield bench
    bench.release_all()
