"""The CUDA device: which stream is current, order against torch's streams, indices, kernels that fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mlsys_core.device import CudaDevice
from mlsys_core.errors import DeviceError, InvalidInputError

pytestmark = pytest.mark.gpu


def test_an_index_beyond_the_last_is_refused(cuda: CudaDevice) -> None:
    import torch

    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=rf"cuda:{count} does not exist: there are {count}"):
        CudaDevice(count)


def test_submitted_work_sees_the_stream_as_the_current_one(cuda: CudaDevice) -> None:
    import torch

    seen = []
    before = torch.cuda.current_stream()
    with cuda.stream() as stream:
        stream.submit(lambda: seen.append(torch.cuda.current_stream()))
        assert seen == [stream.torch_stream]
    assert torch.cuda.current_stream() == before != seen[0]


def test_order_against_torch_s_current_stream(cuda: CudaDevice) -> None:
    import torch

    source, target = torch.zeros(1, device=cuda.name), torch.zeros(1, device=cuda.name)
    target.copy_(source)  # loads the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    source.fill_(7.0)
    written = cuda.event()
    with cuda.stream(torch_stream=torch.cuda.current_stream()) as current, cuda.stream() as stream:
        current.record(written)
        stream.wait(written)
        stream.submit(target.copy_, source)
    assert target.item() == 7.0


def test_memory_of_an_argument_is_not_reused_while_work_needs_it(cuda: CudaDevice) -> None:
    import torch

    target = torch.zeros(2**20, device=cuda.name)
    source = torch.full((2**20,), 3.0, device=cuda.name)
    target.copy_(source)
    torch.cuda.synchronize()
    target.zero_()
    torch.cuda.synchronize()
    with cuda.stream() as stream:
        stream.submit(torch.cuda._sleep, 500_000_000)
        stream.submit(target.copy_, source)
        address = source.data_ptr()
        del source
        other = torch.full((2**20,), 9.0, device=cuda.name)  # would take the memory just let go
        assert other.data_ptr() != address
    assert target.eq(3.0).all()


def test_a_stream_of_another_device_is_refused(cuda: CudaDevice) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = CudaDevice(1)
    with other.stream() as other_stream, cuda.stream() as stream:
        with pytest.raises(InvalidInputError, match="cuda:1 was given to cuda:0"):
            cuda.stream(torch_stream=other_stream.torch_stream)
        with pytest.raises(InvalidInputError, match="cannot be recorded"):
            stream.record(other.event())


def test_a_failed_kernel_is_a_device_error_with_advice(cuda: CudaDevice) -> None:
    code = """
import torch
from mlsys_core.device import CudaDevice
from mlsys_core.errors import DeviceError
device = CudaDevice()
values, index = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
torch.cuda.synchronize()
stream = device.stream()
stream.submit(torch.index_select, values, 0, index)
try:
    stream.synchronize()
except DeviceError as error:
    print(error)
"""  # in a process of its own: the failure ends CUDA there
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "a kernel on cuda:0 failed" in done.stdout, done.stderr
    assert "start the process again" in done.stdout
