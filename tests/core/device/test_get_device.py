"""Names to devices, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from mlsys_core.config import read_settings
from mlsys_core.device import CpuDevice, Device, device_kind, get_device, run_on
from mlsys_core.errors import DeviceError, InvalidInputError, PluginError
from mlsys_core.plugins import Registry, load_plugins
from mlsys_core.plugins.specs import DeviceSpec


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


def registry_with(name: str, factory: str) -> Registry:
    registry = load_plugins(read_settings({}), entry_points=[]).registry
    registry.add(DeviceSpec(name=name, help="A test's.", factory=factory), "mlsys-test")
    return registry


class Npu(CpuDevice):
    """Says which one of its kind it is."""

    kind = "npu"

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


def break_down(index: int) -> Device:
    raise KeyError("driver")


def test_a_registered_kind_gets_the_index() -> None:
    registry = registry_with("npu", f"{__name__}:Npu")
    assert [get_device(name, registry=registry).name for name in ("npu:3", "npu")] == ["npu:3", "npu:0"]
    assert device_kind("npu:7", registry=registry).name == "npu"
    with pytest.raises(InvalidInputError, match="npu, npu:INDEX"):
        get_device("tpu", registry=registry)


def test_a_factory_that_fails_or_makes_no_device_is_named_with_its_owner() -> None:
    with pytest.raises(PluginError, match=r"device 'npu' of mlsys-test failed \(KeyError: 'driver'\)"):
        get_device("npu", registry=registry_with("npu", f"{__name__}:break_down"))
    with pytest.raises(PluginError, match="gave a float, which lacks 'name'"):
        get_device("npu", registry=registry_with("npu", "math:sqrt"))


def test_work_runs_on_a_stream_of_another_device_and_its_error_comes_back() -> None:
    assert run_on(get_device("cpu"), lambda: threading.current_thread().name) == "MainThread"
    npu = Npu(0)
    assert run_on(npu, lambda: threading.current_thread().name).startswith("mlsys-cpu-stream-")
    with pytest.raises(ZeroDivisionError):
        run_on(npu, lambda: 1 // 0)


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
