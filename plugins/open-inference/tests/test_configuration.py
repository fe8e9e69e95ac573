"""Configurations, the response cache, polling and shared memory, without a client."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.files import ConfigFiles, parsed
from mlsys_open_inference.shared_memory import REGION, OpenFile, Placement, Region, SharedRegions
from mlsys_serving.models import InferRequest, InferResponse, ModelSpec, TensorSpec
from mlsys_serving.models.datatypes import DataType
from mlsys_serving.models.settings import ModelSettings
from mlsys_serving.tracing.settings import TraceSettings

SPEC = ModelSpec(
    name="a",
    inputs=(TensorSpec("x", DataType.FP32, (-1, 4)), TensorSpec("mask", DataType.BOOL, (-1, 4), optional=True)),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 4)),),
    max_batch_size=4,
)


class Unary:
    """A model with one response a request."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        self.spec = spec

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse({"y": request.inputs["x"]})

    async def close(self) -> None:
        pass


class Streaming:
    """A model with several."""

    def __init__(self) -> None:
        self.spec = SPEC

    async def stream(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        yield InferResponse({"y": request.inputs["x"]})

    async def close(self) -> None:
        pass


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


arrays = st.tuples(st.sampled_from(["<f4", "<i4"]), st.lists(st.integers(-3, 3), max_size=6), st.booleans())


def test_a_region_that_its_client_cuts_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "region"
    path.write_bytes(bytes(64))
    place = Placement(Region("r", "k", 0, 64, OpenFile(os.open(path, os.O_RDWR))), 32, 32)
    assert place.write(b"x" * 32, "output") == 32
    assert bytes(place.read("input")) == b"x" * 32
    path.write_bytes(bytes(40))
    with pytest.raises(InvalidInputError, match="shorter than it was registered"):
        place.read("input")
    with pytest.raises(InvalidInputError, match="shorter than it was registered"):
        place.write(b"x" * 32, "output")


def test_an_answer_under_way_is_never_written_into_another_file(tmp_path: Path) -> None:
    """Its region is unregistered meanwhile: the number of its descriptor must not be given to others yet."""
    key = f"mlsys-test-{os.getpid()}-{tmp_path.name}"
    memory = SharedMemory(key, create=True, size=64)
    other = tmp_path / "other"
    other.write_bytes(bytes(64))
    try:
        num_open = _descriptors_of(key)
        regions = SharedRegions(is_allowed=True)
        regions.register("r", key, 0, 64)
        place = regions.placement({REGION: "r", "shared_memory_byte_size": 64}, "output")
        assert place is not None
        number = place.region.file.number
        regions.unregister("r")
        with other.open("r+b") as file:
            assert file.fileno() != number
            assert place.write(b"x" * 64, "output") == 64
        assert other.read_bytes() == bytes(64)
        assert bytes(memory.buf[:64]) == b"x" * 64
        assert _descriptors_of(key) == num_open + 1
        del place
        assert _descriptors_of(key) == num_open
    finally:
        memory.close()
        memory.unlink()


def _descriptors_of(key: str) -> int:
    """Return how many descriptors of this process are of a file in shared memory."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread has closed it
            found += link.readlink().name == key
    return found


def test_trace_settings_change_all_or_none() -> None:
    settings = TraceSettings()
    with pytest.raises(InvalidInputError, match="trace_file"):
        settings.update({"trace_level": ["OFF"], "trace_file": ["x"]})
    assert settings.takes()
    settings.update({"trace_level": ["OFF"], "trace_mode": ["opentelemetry"]})
    assert not settings.takes()
    settings.update({"trace_level": None, "trace_count": ["2"]})
    assert [settings.takes() for _ in range(3)] == [True, True, False]
    for name, value in (("trace_rate", "0"), ("trace_count", "-2"), ("trace_rate", "x"), ("trace_level", "MAX")):
        with pytest.raises(InvalidInputError, match=name):
            settings.update({name: [value]})
