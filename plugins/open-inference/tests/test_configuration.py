"""Configurations of models, without a client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.files import ConfigFiles, parsed
from mlsys_serving.models.spec import ModelSettings


def test_text_and_json_are_one_configuration() -> None:
    text = """name: "words" max_batch_size: 4
    dynamic_batching { default_queue_policy { default_timeout_microseconds: 250000 allow_timeout_override: true } }"""
    value = {
        "name": "words",
        "max_batch_size": 4,
        "dynamic_batching": {
            "default_queue_policy": {"default_timeout_microseconds": 250000, "allow_timeout_override": True}
        },
    }
    expected = ModelSettings(max_batch_size=4, default_timeout_s=0.25, may_override_timeout=True)
    assert parsed(text, is_json=False, what="x") == parsed(json.dumps(value), is_json=True, what="x") == expected


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("instance_group [{ count: 2 }]", "instance_group"),
        ("response_cache { enable: true }", "response_cache"),
        ("version_policy { latest { num_versions: 1 } }", "version_policy"),
        ('model_warmup [{ name: "x" }]', "model_warmup"),
        ('input [{ name: "x" data_type: TYPE_FP32 dims: [2] }]', "input"),
        ("dynamic_batching { priority_levels: 2 }", "priority_levels"),
        ("dynamic_batching { preferred_batch_size: [4] }", "preferred_batch_size"),
        ("ensemble_scheduling { step [] }", "ensemble_scheduling"),
    ],
)
def test_other_fields_are_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{field}' is not supported .*who has a repository of Triton's"):
        parsed(text, is_json=False, what="words.pbtxt")


def test_configurations_of_no_model_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.pbtxt", "typo.json", "readme.txt"):
        (tmp_path / name).write_text("")
    ConfigFiles(tmp_path).warn_unused(["a", "b"])
    assert "typo.json is of no model here; there are: a, b" in caplog.text
    assert "a.pbtxt" not in caplog.text
    assert "readme" not in caplog.text


def test_json_that_is_no_object_is_no_configuration() -> None:
    for text in ("[]", "null", '"x"', " [ ]"):
        with pytest.raises(InvalidInputError, match="it: a configuration in JSON is an object"):
            parsed(text, is_json=True, what="it")


def test_a_folder_of_configurations_goes_before_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"max_batch_size": 1}')
    (tmp_path / "all").mkdir()
    files = ConfigFiles(tmp_path / "all", lambda _: tmp_path / "own")
    assert files.settings("a").max_batch_size == 1  # type: ignore[union-attr]
    (tmp_path / "all" / "a.pbtxt").write_text("max_batch_size: 2")
    assert files.settings("a").max_batch_size == 2  # type: ignore[union-attr]
    (tmp_path / "all" / "a.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="keep one of them"):
        files.settings("a")
    with pytest.raises(InvalidInputError, match="is no folder"):
        ConfigFiles(tmp_path / "none")
