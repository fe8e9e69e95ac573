"""Nothing goes around ``core.device``: torch.cuda is called there and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(path for folder in ("packages", "plugins") for path in (ROOT / folder).glob("*/src/**/*.py"))


def uses_of_torch_cuda(text: str) -> list[int]:
    """Return the lines that name ``torch.cuda``, by attribute or by import."""
    if "cuda" not in text:
        return []
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name):
            lines += [node.lineno] if node.value.id == "torch" else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            lines += [node.lineno] if "cuda" in (node.module or "") or "cuda" in {a.name for a in node.names} else []
        elif isinstance(node, ast.Import):
            lines += [node.lineno] if any(a.name.startswith("torch.cuda") for a in node.names) else []
    return lines


@pytest.mark.parametrize("text", ["torch.cuda.synchronize()", "from torch import cuda", "import torch.cuda as c"])
def test_a_use_is_seen(text: str) -> None:
    assert uses_of_torch_cuda(text) == [1]
    assert uses_of_torch_cuda("torch.backends.cuda.matmul\nimport torch\ntorch.cpu.get_capabilities()") == []


def test_torch_cuda_is_used_in_core_device_alone() -> None:
    assert len(SOURCES) > 400
    outside = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if not ("mlsys_core" in path.parts and "device" in path.parts)
        and (lines := uses_of_torch_cuda(path.read_text(encoding="utf-8")))
    }
    assert outside == {}
