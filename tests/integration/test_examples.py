"""Examples that train something run, with fewer steps than as they stand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_digits_leave_early_where_the_first_exit_is_sure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    spec = importlib.util.spec_from_file_location("early_exit", EXAMPLES / "early_exit.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, pixels, labels = example.train(steps=60)
    with torch.inference_mode():
        early, late = model(pixels)
    sure = early.softmax(-1).amax(-1) >= 0.4
    digits = example.service(model, 0.4)
    for row in range(60):
        scores = early[row] if sure[row] else late[row]
        assert digits(pixels[row]) == {"digit": int(scores.argmax()), "exit": int(not sure[row])}
    assert 0 < int(sure.sum()) < len(labels)
    assert float((late.argmax(-1) == labels).float().mean()) > 0.7
