"""Model loaders by the names of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import Registry
from mlsys_core.plugins.loading import LoadContext, endings, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec


def spec(name: str, *suffixes: str, engine: str = "orca", factory: str = "builtins:str") -> ModelLoaderSpec:
    return ModelLoaderSpec(name=name, help="x", engine=engine, suffixes=suffixes, factory=factory)


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    made.add(spec("plain", ".gguf", "config.json"), "mlsys-a")
    made.add(spec("split", ".sharded.gguf"), "mlsys-b")
    made.add(spec("other", ".toy", engine="dvabatch"), "mlsys-b")
    return made


def found(path: Path, registry: Registry) -> str | None:
    loader = find_loader(path, "orca", registry)
    return None if loader is None else loader.name


def test_the_longest_ending_of_the_engine_counts(registry: Registry) -> None:
    assert found(Path("m.gguf"), registry) == "plain"
    assert found(Path("m.sharded.GGUF"), registry) == "split"
    assert found(Path("m.toy"), registry) is None
    assert endings("orca", registry) == ".gguf, .sharded.gguf, config.json"


def test_a_folder_is_known_by_what_it_holds_and_whole_names_are_whole(registry: Registry, tmp_path: Path) -> None:
    assert found(tmp_path, registry) is None
    (tmp_path / "my-config.json").touch()
    assert found(tmp_path, registry) is None
    (tmp_path / "config.json").touch()
    assert found(tmp_path, registry) == "plain"
    (tmp_path / "a.sharded.gguf").touch()
    assert found(tmp_path, registry) == "split"


def test_two_loaders_of_one_ending_are_refused_with_both_owners(registry: Registry) -> None:
    registry.add(spec("second", ".gguf"), "mlsys-b")
    with pytest.raises(PluginError, match="'plain' of mlsys-a and 'second' of mlsys-b"):
        found(Path("m.gguf"), registry)


def refuse(path: Path, context: LoadContext) -> object:
    return context.taken("dtype")


def break_down(path: Path, context: LoadContext) -> object:
    raise ZeroDivisionError("division by zero")


def test_options_that_a_loader_does_not_take_are_refused() -> None:
    context = LoadContext(options={"dtype": "bf16", "max_len": 3})
    with pytest.raises(InvalidInputError, match="does not take --max-len"):
        refuse(Path("m"), context)


def test_a_loader_that_fails_or_gives_another_class_is_named_with_its_owner() -> None:
    registry = Registry()
    bad, wrong = spec("bad", ".a", factory=f"{__name__}:break_down"), spec("wrong", ".b", factory=f"{__name__}:refuse")
    registry.add(bad, "mlsys-b")
    registry.add(wrong, "mlsys-b")
    with pytest.raises(PluginError, match="model loader 'bad' of mlsys-b failed"):
        load_with(bad, Path("m.a"), LoadContext(), registry, kind=list)
    with pytest.raises(PluginError, match=r"it gave a dict, and orca takes a builtins\.list"):
        load_with(wrong, Path("m.b"), LoadContext(), registry, kind=list)
