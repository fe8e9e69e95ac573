"""Configurations, the response cache, polling and shared memory, without a client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.tracing.settings import TraceSettings
from mlsys_serving.oip import DirectorySource, InferRequest, InferResponse, ModelRepository, ModelSpec, TensorSpec
from mlsys_serving.oip.config.cache import ResponseCache, cache_key
from mlsys_serving.oip.config.files import ConfigFiles, parsed
from mlsys_serving.oip.config.polling import Poller
from mlsys_serving.oip.config.settings import ModelSettings, VersionPolicy, Warmup, WarmupInput
from mlsys_serving.oip.config.warmup import warm_up
from mlsys_serving.oip.datatypes import DataType
from mlsys_serving.oip.models.version import Version
from mlsys_serving.oip.shared_memory import REGION, OpenFile, Placement, Region, SharedRegions


def test_text_and_json_are_one_configuration() -> None:
    text = 'name: "a" max_batch_size: 3 version_policy { specific { versions: [ 1, 3 ] } }'
    json = '{"name": "a", "max_batch_size": 3, "version_policy": {"specific": {"versions": [1, 3]}}}'
    found = parsed(text, is_json=False, what="it")
    assert found == parsed(json, is_json=True, what="it")
    assert found.versions.chosen(["1", "2", "3"]) == ["1", "3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instance_group [ { count: 2 } ]", "'instance_group' is not supported (serve with --instances N)"),
        ("dynamic_batching { preferred_batch_size: [ 4 ] }", "serve --policy"),
        ("dynamic_batching { default_queue_policy { max_queue_size: 4 } }", "'max_queue_size'"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "from 1 to 2, got 3"),
        ('nonsense: "x"', "'nonsense' is not supported"),
        ("max_batch_size: many", "max_batch_size"),
        ("max_batch_size: -1", "0 or more"),
        ("version_policy { specific { } }", "names no version"),
        ("version_policy { latest { } }", "1 or more"),
        ('model_warmup [ { name: "w" } ]', "has no inputs"),
        ('model_warmup [ { inputs { key: "x" value { dims: 2 } } } ]', "zero_data or random_data"),
        (
            'model_warmup { inputs { key: "x" value { dims: [ 99999999, 99999999 ] zero_data: true } } }',
            "of [99999999, 99999999]: at most",
        ),
        ('model_warmup { batch_size: 4096 inputs { key: "x" value { dims: 65536 random_data: true } } }', "4096 rows"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parsed(text, is_json=False, what="it")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic_batching { default_priority_level: 2 }", "no effect without priority_levels"),
        (
            "dynamic_batching { default_queue_policy { allow_timeout_override: true } }",
            "no effect without default_timeout_microseconds",
        ),
        ("dynamic_batching { priority_levels: 3 default_priority_level: 2 }", ""),
    ],
)
def test_what_triton_takes_and_ignores_is_taken_with_a_warning(
    text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed(text, is_json=False, what="it")
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)


SPEC = ModelSpec(
    name="a",
    inputs=(TensorSpec("x", DataType.FP32, (-1, 4)), TensorSpec("mask", DataType.BOOL, (-1, 4), optional=True)),
    outputs=(TensorSpec("y", DataType.FP32, (-1, 4)),),
    max_batch_size=4,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('input { name: "x" optional: true }', "'x' as optional, and the model needs it"),
        ('input [ { name: "x" }, { name: "x" } ]', "has input 'x' twice"),
        ('output [ { name: "y" }, { name: "y" } ]', "has output 'y' twice"),
        ('input { name: "mask" optional: true }', None),
    ],
)
def test_tensors_of_a_configuration_are_those_of_the_model(text: str, message: str | None) -> None:
    settings = parsed(text, is_json=False, what="it")
    if message is None:
        assert settings.applied(SPEC).inputs == SPEC.inputs
        return
    with pytest.raises(InvalidInputError, match=message):
        settings.applied(SPEC)


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


def test_a_cache_is_refused_by_models_with_several_responses() -> None:
    with pytest.raises(InvalidInputError, match="'a' gives several responses a request: response_cache keeps one"):
        Version(Streaming(), ModelSettings(has_cache=True))
    assert Version(Unary(), ModelSettings(has_cache=True)).settings.has_cache


def test_versions_of_models_that_are_given_are_those_of_the_policy() -> None:
    def repository(policy: VersionPolicy) -> ModelRepository:
        second = replace(SPEC, version="2")
        return ModelRepository([Unary(), Unary(second)], settings_of=lambda _: ModelSettings(versions=policy))

    assert len(repository(VersionPolicy(num_latest=2)).versions("a")) == 2
    with pytest.raises(InvalidInputError, match="model 'a': version_policy asks for version 7; there are 1, 2"):
        repository(VersionPolicy(specific=(7,)))
    with pytest.raises(InvalidInputError, match="'a' serves version 2 alone: leave the others out"):
        repository(VersionPolicy(num_latest=1))


async def test_a_warm_up_of_several_rows_needs_a_model_with_rows() -> None:
    warmup = Warmup("w", 2, (WarmupInput("x", "FP32", (4,), is_random=False),), 1)
    alone = replace(SPEC, max_batch_size=0)
    with pytest.raises(InvalidInputError, match="batch_size 2, and model 'a' takes no batches"):
        await warm_up(Version(Unary(alone), ModelSettings(warmups=(warmup,))))
    await warm_up(Version(Unary(), ModelSettings(warmups=(warmup,))))


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


def request(x: Any, **fields: Any) -> InferRequest:
    options = {"outputs": ("y",), "parameters": {}} | fields
    return InferRequest(key="1", model_name="a", model_version="1", inputs={"x": x}, **options)


arrays = st.tuples(st.sampled_from(["<f4", "<i4"]), st.lists(st.integers(-3, 3), max_size=6), st.booleans())


@given(first=arrays, second=arrays)
def test_keys_are_equal_for_equal_requests_alone(first: Any, second: Any) -> None:
    def made(dtype: str, values: list[int], is_column: bool) -> Any:
        array = np.array(values, dtype)
        return array[:, None] if is_column else array

    a, b = made(*first), made(*second)
    is_same = (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist())
    assert (cache_key(request(a), 1) == cache_key(request(b), 1)) == is_same
    assert cache_key(request(a), 1) != cache_key(request(a), 2)
    assert cache_key(request(a), 1) != cache_key(request(a, parameters={"p": 1}), 1)


def test_texts_that_join_to_the_same_bytes_have_different_keys() -> None:
    a, b = (np.array(values, np.object_) for values in ([b"ab", b"c"], [b"a", b"bc"]))
    assert cache_key(request(a), 1) != cache_key(request(b), 1)


@given(sizes=st.lists(st.integers(0, 400), max_size=30))
def test_the_cache_never_holds_more_than_its_room(sizes: list[int]) -> None:
    cache = ResponseCache(3000)
    for number, size in enumerate(sizes):
        response = InferResponse({"y": np.full(size, number, np.uint8)})
        cache.put(b"%d" % number, response)
        found = cache.get(b"%d" % number)
        assert found is not None
        assert found.outputs["y"].tolist() == [number] * size
    assert cache._nbytes <= 3000


async def test_models_that_are_new_changed_broken_and_gone_are_found(tmp_path: Path, reference: ModuleType) -> None:
    def build(directory: Path, name: str, version: str) -> Any:
        if (directory / "model").read_text() == "bad":
            raise InvalidInputError("it is bad")
        model = reference.Add(version=version)
        model.spec = ModelSpec(name=name, inputs=model.spec.inputs, outputs=model.spec.outputs, max_batch_size=8)
        return model

    def write(name: str, text: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model").write_text(text)

    write("a", "1")
    repository = ModelRepository(source=DirectorySource([tmp_path], build=build, marker="model"))
    await repository.load_all()
    poller = Poller(repository)
    first = repository.find("a")
    assert await poller.look() == {}
    write("a", "22")
    write("b", "1")
    assert await poller.look() == {}  # they may still be written
    assert await poller.look() == {"a": "loaded", "b": "loaded"}
    assert repository.find("a") is not first
    write("b", "bad")
    assert await poller.look() == {}
    assert "it is bad" in (await poller.look())["b"]
    assert repository.find("b").model is not None  # the old one goes on
    (tmp_path / "b" / "model").unlink()
    assert await poller.look() == {"b": "unloaded"}
    assert await poller.look() == {}
    await repository.close()
    with pytest.raises(InvalidInputError, match="cannot be watched"):
        Poller(ModelRepository())


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


def test_a_cache_is_refused_by_models_that_keep_state() -> None:
    row = TensorSpec("x", DataType.FP32, (-1,))
    spec = ModelSpec(name="a", inputs=(row,), outputs=(row,), is_stateful=True, takes_priorities=False)
    with pytest.raises(InvalidInputError, match="keeps state"):
        parsed("response_cache { enable: true }", is_json=False, what="it").applied(spec)
    text = "dynamic_batching { priority_levels: 2 default_priority_level: 1 }"
    with pytest.raises(InvalidInputError, match="leave out priority_levels"):
        parsed(text, is_json=False, what="it").applied(spec)
