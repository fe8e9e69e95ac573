"""Scheduling policies by name: what is found, what is refused and how, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.specs import PolicySpec
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import find_policy, make_scheduler

from tests.orca.test_policies import BUILT_IN, load_registry, request

PLUGIN = """
from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import PolicySpec


class Old:
    def __init__(self, block_tables, max_batch_size):
        raise AssertionError("not to be reached")


@hookimpl
def mlsys_register_policies():
    return [
        PolicySpec(name="greedy-window", kind="batching", help="x", factory="outdated_plugin:Old"),
        PolicySpec(name="old", kind="scheduling", help="x", factory="outdated_plugin:Old"),
    ]
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with Orca's policies and those of a third party that does not follow the protocol."""
    (tmp_path / "outdated_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    return load_registry("mlsys_orca._plugin", "outdated_plugin")


def make(name: str, registry: Registry | None = None, **options: Any) -> Any:
    return make_scheduler(
        name,
        registry or installed_plugins().registry,
        block_tables=BlockTables(num_blocks=8),
        max_batch_size=2,
        max_model_len=64,
        options=options,
    )


def test_the_built_in_policies_are_registered():
    registry = load_registry("mlsys_orca._plugin")
    assert sorted(spec.name for spec in registry.all(PolicySpec) if spec.kind == "scheduling") == BUILT_IN
    for name in BUILT_IN:
        scheduler = make(name, registry)
        scheduler.add(request("a", [1, 2]), 0)
        assert scheduler.num_unfinished == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_limits_reach_the_policy(name: str):
    scheduler = make(name)
    assert scheduler.pool.max_batch_size == 2
    with pytest.raises(InvalidInputError, match="at most 64"):
        scheduler.add(request("a", [1] * 61), 0)
    scheduler.add(request("a", [1] * 60), 0)


def test_an_unknown_name_lists_those_there_are(theirs: Registry):
    with pytest.raises(InvalidInputError) as caught:
        find_policy("page", theirs)
    assert "did you mean 'paged'?" in str(caught.value)
    assert str(caught.value).endswith("(there are: chunked, old, orca, paged, request-level)")
    with pytest.raises(InvalidInputError, match="no scheduling policy"):
        find_policy("greedy-window", theirs)  # a batching policy
    with pytest.raises(InvalidInputError) as caught:
        find_policy("x", Registry())
    assert str(caught.value) == "no scheduling policy is called 'x' (there are: none)"


def test_a_policy_of_a_plugin_that_did_not_load_is_explained():
    with pytest.raises(
        InvalidInputError, match=r"called 'x' .*\. Plugins not loaded: absent: ModuleNot.*; lost: ModuleNot"
    ):
        find_policy("x", load_registry("mlsys_orca._plugin", "lost", "absent"))


def test_options_reach_the_policy_and_wrong_ones_are_named():
    assert make("chunked", max_batch_tokens=3)._max_batch_tokens == 3
    with pytest.raises(
        InvalidInputError, match=r"'chunked' has no option 'budget' \(it has: max_batch_tokens, max_chunk_tokens, pr"
    ):
        make("chunked", budget=3)
    with pytest.raises(InvalidInputError, match=r"'orca' has no option 'max_model_lem' \(it has: none\)"):
        make("orca", max_model_lem=3)
    with pytest.raises(InvalidInputError, match="watermark is 2"):
        make("paged", watermark=2)


def test_a_factory_that_does_not_follow_the_protocol_is_named(theirs: Registry):
    with pytest.raises(PluginError, match=r"'old' cannot be made.*max_model_len"):
        make("old", theirs)
