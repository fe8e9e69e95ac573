"""The loader against plugins made on the spot; the really installed ones are in tests/integration."""

from __future__ import annotations

import re
import types
from collections.abc import Callable

import pytest
from mlsys_core.config import Settings, read_settings
from mlsys_core.errors import PluginError
from mlsys_core.native import Kernel
from mlsys_core.plugins import hookimpl, load_plugins
from mlsys_core.plugins.specs import BenchmarkSpec, CommandSpec, CompilerSpec, PolicySpec


def settings(**variables: str) -> Settings:
    return read_settings(variables)


class FakeEntryPoint:
    def __init__(
        self, name: str, load: Callable[[], object] = lambda: plugin(), value: str = "somewhere.x", dist: object = None
    ):
        self.name, self.value, self.load, self.dist = name, value, load, dist


def plugin(**hooks: Callable[[], object]) -> types.ModuleType:
    module = types.ModuleType("made_here")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(specname=name)(function))
    return module


def command(name: str) -> CommandSpec:
    return CommandSpec(name=name, help="x", app="a:b")


def load(*entry_points: FakeEntryPoint, **variables: str):
    return load_plugins(settings(**variables), entry_points=entry_points)


def row(loaded, name: str):
    return next(row for row in loaded.rows if row.name == name)


def test_core_comes_first_whatever_is_filtered():
    loaded = load(MLSYS_PLUGINS_BLOCK="core")
    assert [(r.name, r.status) for r in loaded.rows] == [("core", "loaded")]
    assert "doctor" in {spec.name for spec in loaded.registry.all(CommandSpec)}


def test_our_own_come_first_and_each_row_says_whose_it_is():
    dist = types.SimpleNamespace(name="acme-dist", version="2", requires=None)
    found = [FakeEntryPoint("b", value="acme.plug", dist=dist), FakeEntryPoint("z", value="mlsys_z.plug")]
    found.append(FakeEntryPoint("a", value="acme.plug"))
    rows = load(*found, MLSYS_PLUGINS_BLOCK="b").rows[1:]
    assert [(r.name, r.distribution, r.version, r.status, r.hint) for r in rows] == [
        ("z", "mlsys_z", "unknown", "loaded", None),
        ("a", "acme", "unknown", "loaded", None),
        ("b", "acme-dist", "2", "blocked", "MLSYS_PLUGINS_BLOCK names 'b'"),
    ]


@pytest.mark.parametrize(
    ("requires", "is_refused"),
    [
        (["mlsys-core>=99"], True),
        (["other>=99", "MLSYS_Core<0.0.0.dev1"], True),
        (["other>=99", "mlsys-core>=0.0.0.dev1"], False),
        (["mlsys-core>=99; python_version < '3'"], False),
    ],
)
def test_a_plugin_of_another_core_is_refused_before_its_code_runs(requires: list[str], is_refused: bool):
    ran = []
    dist = types.SimpleNamespace(name="acme", version="2", requires=requires)
    loaded = load(FakeEntryPoint("a", lambda: ran.append(1) or plugin(), dist=dist))
    assert (row(loaded, "a").status == "broken") == is_refused == (not ran)
    if is_refused:
        assert row(loaded, "a").hint == "pip install --upgrade acme"
        assert row(loaded, "a").distribution == "acme"
        assert "acme needs mlsys-core" in loaded.registry.unavailable["a"]


@pytest.mark.parametrize(
    ("hook", "hint"),
    [
        ("mlsys_register_comands", r"did you mean mlsys_register_commands\?"),
        ("mlsys_other", r"the hooks are: (mlsys_register_\w+, ){5,}mlsys_register_\w+"),
    ],
)
def test_an_unknown_hook_is_named_with_the_one_that_may_be_meant(hook: str, hint: str):
    found = row(load(FakeEntryPoint("p", lambda: plugin(**{hook: lambda: iter(())}))), "p")
    assert found.error == f"implements an unknown hook '{hook}'"
    assert re.fullmatch(hint, found.hint)


def test_specs_of_all_kinds_arrive_with_their_owner():
    compiler = CompilerSpec(name="c", help="x", factory="math:sqrt")
    good = plugin(
        mlsys_register_compilers=lambda: [compiler],
        mlsys_register_benchmarks=lambda: iter([BenchmarkSpec(name="b", help="x", run="math:floor")]),
    )
    loaded = load(FakeEntryPoint("good", lambda: good, "gooddist.plug"))
    assert loaded.registry.get(CompilerSpec, "c") is compiler
    assert loaded.registry.load(BenchmarkSpec, "b")(2.5) == 2
    assert loaded.registry.owned_by("gooddist") == list(row(loaded, "good").specs)


@pytest.mark.parametrize(
    "raised", [RuntimeError("boom"), SystemExit(3), ImportError("no such"), AttributeError("x"), AssertionError()]
)
def test_an_import_that_raises_breaks_only_itself(raised: BaseException):
    def bad() -> object:
        raise raised

    loaded = load(
        FakeEntryPoint("bad", bad),
        FakeEntryPoint("good", lambda: plugin(mlsys_register_commands=lambda: [command("g")])),
    )
    assert row(loaded, "bad").status == "broken"
    assert row(loaded, "bad").cause is raised
    assert type(raised).__name__ in row(loaded, "bad").error
    assert loaded.registry.get(CommandSpec, "g")


def test_a_raising_hook_takes_down_only_its_own_plugin_and_whole():
    def boom() -> object:
        raise ValueError("in the hook")

    bad = plugin(mlsys_register_commands=lambda: [command("half")], mlsys_register_policies=boom)
    good = plugin(mlsys_register_commands=lambda: [command("whole")])
    loaded = load(FakeEntryPoint("bad", lambda: bad), FakeEntryPoint("good", lambda: good))
    names = {spec.name for spec in loaded.registry.all(CommandSpec)}
    assert "whole" in names
    assert "half" not in names
    assert row(loaded, "bad").error == "ValueError: in the hook"


@pytest.mark.parametrize("returned", [None, [None], ["doctor"], [object()], 3])
def test_only_specs_are_accepted(returned: object):
    loaded = load(FakeEntryPoint("bad", lambda: plugin(mlsys_register_commands=lambda: returned)))
    assert "not a spec" in row(loaded, "bad").error


def test_names_taken_twice_name_both_owners():
    one = FakeEntryPoint("one", lambda: plugin(mlsys_register_commands=lambda: [command("same")]), "dist_a.x")
    two = FakeEntryPoint("two", lambda: plugin(mlsys_register_commands=lambda: [command("same")]), "dist_b.x")
    loaded = load(one, two)
    assert "registered by both dist_a and dist_b" in row(loaded, "two").error
    assert row(loaded, "one").status == "loaded"


def test_one_plugin_naming_a_thing_twice_is_refused():
    twice = plugin(mlsys_register_commands=lambda: [command("same"), command("same")])
    assert row(load(FakeEntryPoint("p", lambda: twice)), "p").status == "broken"


def test_one_name_in_two_kinds_is_fine():
    both = plugin(
        mlsys_register_commands=lambda: [command("same")],
        mlsys_register_compilers=lambda: [CompilerSpec(name="same", help="x", factory="a:b")],
    )
    assert row(load(FakeEntryPoint("p", lambda: both)), "p").status == "loaded"


def test_a_plugin_name_taken_twice_is_refused():
    loaded = load(FakeEntryPoint("p", plugin, "a.x"), FakeEntryPoint("p", plugin, "b.x"))
    assert [r.status for r in loaded.rows if r.name == "p"] == ["loaded", "broken"]
    assert "used by both a and b" in loaded.broken[0].error


def test_strict_raises_what_was_raised():
    def bad() -> object:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        load(FakeEntryPoint("bad", bad), MLSYS_PLUGINS_STRICT="1")


def test_asked_for_by_name_but_absent_or_broken_fails_with_the_cause():
    def bad() -> object:
        raise ZeroDivisionError("here")

    with pytest.raises(PluginError, match="'absent', which is not installed"):
        load(MLSYS_PLUGINS="absent")
    with pytest.raises(PluginError, match=r"'bad' .* is broken") as caught:
        load(FakeEntryPoint("bad", bad), MLSYS_PLUGINS="bad")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_blocked_or_filtered_plugin_is_never_imported():
    def never() -> object:
        raise AssertionError("imported")

    assert row(load(FakeEntryPoint("p", never), MLSYS_PLUGINS_BLOCK="p"), "p").status == "blocked"
    other = FakeEntryPoint("other", plugin)
    assert row(load(FakeEntryPoint("p", never), other, MLSYS_PLUGINS="other"), "p").status == "filtered"


def test_a_failed_lookup_says_what_there_is_and_why_something_is_missing():
    def bad() -> object:
        raise RuntimeError("boom")

    policies = [PolicySpec(name="paged", kind="scheduling", help="x", factory="a:b")]
    registry = load(
        FakeEntryPoint("bad", bad), FakeEntryPoint("p", lambda: plugin(mlsys_register_policies=lambda: policies))
    ).registry
    with pytest.raises(
        PluginError, match=r"no policy is called 'pagd'; did you mean 'paged'\?.*bad: RuntimeError: boom"
    ):
        registry.get(PolicySpec, "pagd")


def test_every_lazy_reference_of_the_installed_plugins_resolves():
    from dataclasses import fields

    from mlsys_core.lazy import resolve
    from mlsys_core.plugins import installed_plugins

    loaded = installed_plugins()
    assert loaded.broken == []
    references = {
        getattr(spec, field.name)
        for row in loaded.rows
        for spec in row.specs
        for field in fields(spec)
        if field.name in {"app", "factory", "run"}
    }
    assert len(references) > 15
    for reference in references:
        found = resolve(reference)
        assert callable(found) or isinstance(found, Kernel), reference
