"""Rows of the doctor on the installed torch, which multiplies a small matrix on the CPU and on each CUDA device.

A torch built for another processor or driver can end the process instead of raising, so the doctor runs this module as
a child (``python -m mlsys_core.device.torch_probe`` prints the rows as JSON) and lives to tell.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple

from mlsys_core.device.checks import Check, gib, nvidia_driver, version_of

_COMMAND = (sys.executable, "-P", "-m", "mlsys_core.device.torch_probe")  # -P: a folder ./torch is not the torch meant
_REINSTALL = "pip install --force-reinstall torch"


def torch_checks(*, command: Sequence[str] = _COMMAND, timeout_s: float = 120) -> list[Check]:
    """Return the rows of a fresh process; one that dies or hangs is a row itself."""
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        fault = f"took more than {timeout_s:g} s"
    else:
        rows = next((line for line in reversed(child.stdout.splitlines()) if line.startswith("[[")), None)
        if child.returncode == 0 and rows is not None:
            return [Check(*row) for row in json.loads(rows)]
        if child.returncode < 0:
            fault = f"ended the process with {_signal_name(-child.returncode)}"
        else:
            last = (child.stderr.strip() or "no message").splitlines()[-1]
            fault = f"ended with exit code {child.returncode}: {last}"
    return [Check("Torch", "torch", f"not usable: importing and trying it {fault}", "broken", _REINSTALL)]


def try_torch() -> Iterator[Check]:
    """Import torch in this process, try it, and yield the rows."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever its import raises is the finding
        yield Check("Torch", "torch", f"not usable: {_one_line(error)}", "broken", _REINSTALL)
        return
    version = str(torch.__version__)
    fault = _multiply("cpu")
    if fault is None:
        yield Check("Torch", "torch", f"{version}, multiplies", "ok")
    else:
        yield Check("Torch", "torch", f"{version}: {fault}", "broken", _REINSTALL)
    cuda, hip = torch.version.cuda, torch.version.hip
    yield Check("Torch", "build", f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU", "info")
    threads = f"{torch.get_num_threads()} within operators, {torch.get_num_interop_threads()} between"
    yield Check("Torch", "threads", threads, "info")
    yield Check("Torch", "kernels", torch.backends.cpu.get_cpu_capability(), "info")
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    yield Check("Torch", "oneDNN", *(("yes", "ok") if has_mkldnn else ("no", "info")))
    if triton := version_of("triton"):
        yield Check("Torch", "triton", triton, "ok")
    elif platform.system() == "Linux":
        yield Check("Torch", "triton", "not installed", "missing", "pip install triton")
    else:
        yield Check("Torch", "triton", f"not installed; not made for {platform.system()}", "info")
    for index in range(torch.cuda.device_count()):
        yield _try_cuda(index)
    if torch.cuda.device_count():
        return
    if nvidia_driver() is None:
        yield Check("GPU", "CUDA", "no NVIDIA driver found: everything runs on the CPU", "info")
    elif cuda is None:
        yield Check("GPU", "CUDA", "there is a GPU, but this torch is built without CUDA", "missing", _REINSTALL)
    else:
        value = f"there is a driver, but torch (CUDA {cuda}) finds no device: is it too old, or hidden?"
        yield Check("GPU", "CUDA", value, "missing", "unset CUDA_VISIBLE_DEVICES; nvidia-smi")


def _try_cuda(index: int) -> Check:
    import torch

    name = f"cuda:{index}"
    try:
        found = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        return Check("GPU", name, f"unknown: {_one_line(error)}", "missing", _REINSTALL)
    value = f"{found.name}, {gib(found.total_memory)}, capability {found.major}.{found.minor}"
    fault = _multiply(name)
    return (
        Check("GPU", name, value, "ok")
        if fault is None
        else Check("GPU", name, f"{value}: {fault}", "missing", _REINSTALL)
    )


def _multiply(device: str) -> str | None:
    """Return None if ``device`` multiplies a small matrix correctly, else a description of the failure."""
    import torch

    try:
        left = torch.arange(64.0, device=device).reshape(8, 8)
        product = (left @ torch.full((8, 8), 2.0, device=device)).cpu()
        expected = 2 * left.cpu().sum(dim=1, keepdim=True).expand(8, 8)
    except (RuntimeError, AssertionError) as error:
        return f"cannot multiply a matrix: {_one_line(error)}"
    return None if torch.equal(product, expected) else "multiplied a matrix wrongly"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".removesuffix(": ")


if __name__ == "__main__":
    print(json.dumps([astuple(check) for check in try_torch()]))
