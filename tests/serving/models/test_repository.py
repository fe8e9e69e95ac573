from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_serving.models import (
    DataType,
    DirectorySource,
    IndexEntry,
    InferRequest,
    InferResponse,
    ModelLoadError,
    ModelNotReadyError,
    ModelRepository,
    ModelSpec,
    ModelState,
    TensorSpec,
    UnknownModelError,
)


class Add:
    """A model that notes its end."""

    def __init__(self, *, version: str = "1") -> None:
        number = (TensorSpec("x", DataType.FP32, (-1,)),)
        self.spec = ModelSpec(name="add", version=version, inputs=number, outputs=number)
        self.is_closed = False

    async def infer(self, request: InferRequest) -> InferResponse:
        return InferResponse({"x": request.inputs["x"] + 1})

    async def close(self) -> None:
        self.is_closed = True


class Source:
    """Gives chosen models at a chosen time."""

    def __init__(self) -> None:
        self.models: dict[str, list[Any]] = {}
        self.errors: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    def names(self) -> Sequence[str]:
        return sorted({*self.models, *self.errors})

    async def load(self, name: str) -> Sequence[Any]:
        await self.gate.wait()
        if name in self.errors:
            raise self.errors[name]
        if name not in self.models:
            raise InvalidInputError(f"no model {name!r} here")
        return self.models[name]


def states(repository: ModelRepository) -> list[tuple[str, str, str | None, str]]:
    return [
        (entry.name, entry.version, entry.state and entry.state.value, entry.reason) for entry in repository.index()
    ]


async def let_tasks_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_greatest_version_is_the_default() -> None:
    models = [Add(version=version) for version in ("10", "9")]
    repository = ModelRepository(models)
    assert repository.find("add").model is models[0]
    assert repository.find("add", "9").model is models[1]
    assert [version.spec.version for version in repository.versions("add")] == ["9", "10"]
    assert [entry.version for entry in repository.index()] == ["9", "10"]


async def test_a_model_is_loaded_replaced_and_unloaded() -> None:
    source = Source()
    first, second = Add(), Add(version="2")
    source.models["add"] = [first]
    repository = ModelRepository(source=source)
    assert states(repository) == [("add", "", None, "")]
    with pytest.raises(UnknownModelError, match="it has not been loaded"):
        repository.find("add")
    await repository.load("add")
    assert states(repository) == [("add", "1", "READY", "")]
    source.models["add"] = [second]
    await repository.load("add")
    await let_tasks_run()
    assert first.is_closed
    assert states(repository) == [("add", "2", "READY", "")]
    await repository.unload("add")
    await let_tasks_run()
    assert second.is_closed
    assert states(repository) == [("add", "2", "UNAVAILABLE", "unloaded")]
    with pytest.raises(UnknownModelError, match="is not ready: unloaded"):
        repository.find("add")
    assert repository.index(ready_only=True) == []


async def test_a_model_that_loads_is_not_ready() -> None:
    source = Source()
    source.models["add"] = [Add()]
    source.gate.clear()
    repository = ModelRepository(source=source)
    loading = asyncio.create_task(repository.load("add"))
    await let_tasks_run()
    assert states(repository) == [("add", "", "LOADING", "")]
    with pytest.raises(ModelNotReadyError, match="it is loading"):
        repository.find("add", "1")
    source.gate.set()
    await loading
    assert repository.find("add").spec.version == "1"


async def test_a_ready_model_serves_on_while_it_reloads_or_that_fails() -> None:
    source = Source()
    old = Add()
    source.models["add"] = [old]
    repository = ModelRepository(source=source)
    await repository.load("add")
    source.errors["add"] = InvalidInputError("weights.bin is cut off")
    with pytest.raises(ModelLoadError, match=r"'add' could not be loaded: weights\.bin is cut off"):
        await repository.load("add")
    assert repository.find("add").model is old
    assert not old.is_closed


async def test_why_a_load_failed_is_in_the_index() -> None:
    source = Source()
    source.errors = {"bad": InvalidInputError("weights.bin is cut off"), "odd": KeyError("secret")}
    repository = ModelRepository(source=source)
    with pytest.raises(ModelLoadError):
        await repository.load("bad")
    with pytest.raises(KeyError):
        await repository.load("odd")
    assert states(repository) == [
        ("bad", "", "UNAVAILABLE", "weights.bin is cut off"),
        ("odd", "", "UNAVAILABLE", "internal error, see the server's log"),
    ]
    with pytest.raises(UnknownModelError, match=r"is not ready: weights\.bin is cut off"):
        repository.find("bad", "1")


async def test_a_source_that_gives_the_wrong_models_is_refused() -> None:
    source = Source()
    source.models = {"empty": [], "other": [Add()], "add": [Add(), Add()]}
    repository = ModelRepository(source=source)
    for name, message in (("empty", "no version"), ("other", "called 'add'"), ("add", "two models of one version")):
        with pytest.raises(ModelLoadError, match=message):
            await repository.load(name)
    with pytest.raises(InvalidInputError, match="two models of one version"):
        ModelRepository([Add(), Add()])


async def test_a_model_is_closed_when_nothing_runs_on_it() -> None:
    model = Add()
    repository = ModelRepository([model])
    version = repository.find("add")
    version.hold()
    await repository.unload("add")
    await let_tasks_run()
    assert not model.is_closed
    assert states(repository) == [("add", "1", "UNLOADING", "")]
    with pytest.raises(ModelNotReadyError, match="it is unloading"):
        repository.find("add")
    closing = asyncio.create_task(repository.close())
    await let_tasks_run()
    assert not closing.done()
    version.release()
    await closing
    assert model.is_closed
    await repository.unload("add")  # as it is
    with pytest.raises(UnknownModelError):
        await repository.unload("nope")
    with pytest.raises(ModelLoadError, match="this server's models are fixed"):
        await repository.load("add")


async def test_loads_of_one_name_follow_each_other() -> None:
    source = Source()
    source.models["add"] = [Add()]
    repository = ModelRepository(source=source)
    await asyncio.gather(repository.load("add"), repository.load("add"), repository.load_all())
    assert states(repository) == [("add", "1", "READY", "")]


def directories(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).mkdir(parents=True)
        (root / path / "manifest.json").write_text("{}")


async def test_directories_hold_models_with_and_without_versions(tmp_path: Path) -> None:
    directories(tmp_path, "plain", "numbered/1", "numbered/12", "numbered/03")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    built: list[tuple[str, str, str]] = []

    def build(directory: Path, name: str, version: str) -> Any:
        built.append((str(directory.relative_to(tmp_path)), name, version))
        return Add(version=version)

    source = DirectorySource([tmp_path], build=build, marker="manifest.json")
    assert source.names() == ["numbered", "plain"]
    await source.load("numbered")
    await source.load("plain")
    assert sorted(built) == [
        ("numbered/1", "numbered", "1"),
        ("numbered/12", "numbered", "12"),
        ("plain", "plain", "1"),
    ]
    with pytest.raises(InvalidInputError, match="no model 'empty' here; there are: numbered, plain"):
        await source.load("empty")
    own = DirectorySource([tmp_path / "plain", tmp_path / "numbered"], build=build, marker="manifest.json")
    assert own.names() == ["numbered", "plain"]
    with pytest.raises(InvalidInputError, match="is no directory"):
        DirectorySource([tmp_path / "file"], build=build, marker="manifest.json")
    directories(tmp_path, "other/plain")
    both = [tmp_path / "plain", tmp_path / "other"]
    with pytest.raises(InvalidInputError, match=r"/plain and .*other/plain are models of one name, 'plain'"):
        DirectorySource(both, build=build, marker="manifest.json")
    assert DirectorySource([tmp_path / "plain"] * 2, build=build, marker="manifest.json").names() == ["plain"]


def test_the_index_entry_of_a_model_nobody_asked_for_has_no_state() -> None:
    assert IndexEntry("a").state is None
    assert ModelState("READY") is ModelState.READY
