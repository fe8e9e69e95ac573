"""Memory pools by name."""

from __future__ import annotations

import pytest
from mlsys_core.config import read_settings
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.memory import BlockPool, RunPool, find_pool
from mlsys_core.plugins import load_plugins
from mlsys_core.plugins.specs import MemoryPoolSpec


def test_the_cores_own_are_the_defaults() -> None:
    assert isinstance(find_pool(None, "blocks")(4), BlockPool)
    assert isinstance(find_pool(None, "runs")(1, 9), RunPool)


def test_an_unknown_name_and_a_pool_of_the_other_kind_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no memory pool is called 'blok'; did you mean 'block'"):
        find_pool("blok", "blocks")
    with pytest.raises(InvalidInputError, match="'run' hands out runs; this takes pools of blocks: block"):
        find_pool("run", "blocks")


def test_a_plugins_pool_that_fails_is_named_with_its_owner() -> None:
    registry = load_plugins(read_settings({}), entry_points=[]).registry
    registry.add(MemoryPoolSpec(name="bad", kind="blocks", help="x", factory="math:sqrt"), "mlsys-test")
    with pytest.raises(PluginError, match="memory pool 'bad' of mlsys-test failed"):
        find_pool("bad", "blocks", registry)("four")
