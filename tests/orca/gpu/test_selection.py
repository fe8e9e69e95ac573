import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.cli.main import run
from mlsys_core.device import cuda
from mlsys_orca.api.server import available_memory_nbytes
from mlsys_orca.backends import triton as gpu
from mlsys_orca.loading.load import load_model


def test_a_model_on_the_cpu_needs_no_triton(make_gguf: Callable[..., Path]) -> None:
    script = (
        "import sys; from mlsys_orca.loading.load import load_model\n"
        "loaded = load_model(sys.argv[1], dtype='fp32', backend='torch')\n"
        "assert 'triton' not in sys.modules and 'mlsys_orca.backends.triton.decoder' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, make_gguf()], check=True)


def test_a_model_of_another_kind_stays_as_it_is() -> None:
    model: Any = object()
    assert gpu.to_gpu(model) is model


def test_without_triton_a_model_stays_on_torch(
    make_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(make_gguf(), dtype="fp32", backend="torch").model
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert gpu.to_gpu(model) is model
    assert "Triton is not installed" in caplog.text


def test_the_command_says_which_device(make_gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["orca", "chat", str(make_gguf()), "--device", "nowhere", "--prompt", "x"]) != 0
    assert "device 'nowhere' is unknown: allowed are cpu, cpu:INDEX" in capsys.readouterr().err


def test_memory_is_counted_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_check_cuda", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000 + index, 2000))
    assert available_memory_nbytes("cuda:3") == 1003
    assert available_memory_nbytes("cpu") > 2000
