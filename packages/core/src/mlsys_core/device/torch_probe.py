"""Probe of the installed torch: it multiplies a small matrix on the CPU and on each CUDA device.

A torch built for another processor or driver can end the process instead of raising, so the doctor runs this module as
a child (``python -m mlsys_core.device.torch_probe`` prints the facts as JSON) and lives to tell.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_COMMAND = (sys.executable, "-P", "-m", "mlsys_core.device.torch_probe")  # -P: a folder ./torch is not the torch meant


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """One CUDA device as torch sees it."""

    index: int
    name: str
    total_nbytes: int  # bytes of device memory
    capability: str  # compute capability, "9.0"
    error: str | None = None  # fault of a matrix product on it; None: the product is right


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The installed torch."""

    version: str | None  # None: not installed, or not importable
    error: str | None = None  # why it cannot be imported or cannot multiply; None: it works
    cuda_version: str | None = None  # CUDA it was built with, "12.8"
    hip_version: str | None = None  # ROCm it was built with
    num_threads: int = 0  # threads within an operator
    num_interop_threads: int = 0  # threads between operators
    cpu_capability: str = "unknown"  # instruction set its kernels use here, "AVX512"
    has_mkldnn: bool = False  # oneDNN kernels
    cuda_devices: tuple[CudaFacts, ...] = ()


def torch_facts() -> TorchFacts:
    """Import torch in this process and try it."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever its import raises is the finding
        return TorchFacts(None, _one_line(error))
    return TorchFacts(
        version=str(torch.__version__),
        error=_multiply("cpu"),
        cuda_version=torch.version.cuda,
        hip_version=torch.version.hip,
        num_threads=torch.get_num_threads(),
        num_interop_threads=torch.get_num_interop_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        has_mkldnn=torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        cuda_devices=tuple(_cuda_facts(index) for index in range(torch.cuda.device_count())),
    )


def torch_facts_of_child(*, command: Sequence[str] = _COMMAND, timeout_s: float = 120) -> TorchFacts:
    """Return :func:`torch_facts` of a fresh process; one that dies or hangs is reported in ``error``."""
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(None, f"importing and trying it took more than {timeout_s:g} s")
    if child.returncode < 0:
        return TorchFacts(None, f"importing and trying it ended the process with {_signal_name(-child.returncode)}")
    facts = next((line for line in reversed(child.stdout.splitlines()) if line.startswith("{")), None)
    if child.returncode > 0 or facts is None:
        last = (child.stderr.strip() or "no message").splitlines()[-1]
        return TorchFacts(None, f"importing and trying it ended with exit code {child.returncode}: {last}")
    return _from_json(json.loads(facts))


def _from_json(fields: Mapping[str, Any]) -> TorchFacts:
    return TorchFacts(**{**fields, "cuda_devices": tuple(CudaFacts(**device) for device in fields["cuda_devices"])})


def _cuda_facts(index: int) -> CudaFacts:
    import torch

    try:
        properties = torch.cuda.get_device_properties(index)
    except (RuntimeError, AssertionError) as error:
        return CudaFacts(index, "unknown", 0, "unknown", _one_line(error))
    capability = f"{properties.major}.{properties.minor}"
    return CudaFacts(index, properties.name, properties.total_memory, capability, _multiply(f"cuda:{index}"))


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
    print(json.dumps(asdict(torch_facts())))
