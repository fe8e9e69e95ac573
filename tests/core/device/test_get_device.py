"""Names to devices, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mlsys_core.device import CpuDevice, Device, get_device
from mlsys_core.errors import DeviceError, InvalidInputError


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_the_cpu_by_name(name: str) -> None:
    device = get_device(name)
    assert isinstance(device, CpuDevice)
    assert device.name == "cpu:0"


@pytest.mark.parametrize("name", ["gpu", "", "cpu:", "cpu:x", "cpu:-1", "CPU", "cuda:0:1", "cpu\n"])
def test_an_unknown_name_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"allowed are cpu, cpu:INDEX, cuda, cuda:INDEX"):
        get_device(name)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(InvalidInputError, match="did you mean 'cuda'"):
        get_device("cuda0")


def test_a_factory_adds_a_kind_and_gets_the_index() -> None:
    made: list[int] = []

    def make(index: int) -> Device:
        made.append(index)
        return CpuDevice()

    factories = {"npu": make}
    get_device("npu:3", factories=factories)
    get_device("npu", factories=factories)
    assert made == [3, 0]
    with pytest.raises(InvalidInputError, match="npu, npu:INDEX"):
        get_device("tpu", factories=factories)


def test_a_factory_must_not_take_a_built_in_name() -> None:
    with pytest.raises(InvalidInputError, match="'cpu' is built in"):
        get_device("cpu", factories={"cpu": CpuDevice})


def test_absent_cuda_says_why_and_what_to_do() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(DeviceError, match=r"cuda:1 is not available: torch .* or use 'cpu'"):
        get_device("cuda:1")


def test_importing_devices_and_the_doctor_imports_nothing_heavy() -> None:
    code = (
        "import sys, mlsys_core.device, mlsys_core.device.checks, mlsys_core.cli.doctor;"
        "print(sorted({'torch', 'psutil', 'archspec', 'fastapi', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
