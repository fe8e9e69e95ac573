"""A hook is there because something reads it: no kind of spec is registered and then ignored."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mlsys_core.plugins import hookspecs, specs

ROOT = Path(__file__).parents[3]
SOURCES = sorted(path for folder in ("packages", "plugins") for path in (ROOT / folder).glob("*/src/**/*.py"))
KINDS = sorted(
    kind.__name__ for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, specs.Spec)
)
KINDS.remove("Spec")


def kinds_read(text: str) -> set[str]:
    """Return the kinds of spec that a module looks up: named as a value, and neither made nor only an annotation."""
    tree = ast.parse(text)
    made = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    annotations = [
        annotation
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(annotation, ast.AST)
    ]
    passed_over = made | {id(inner) for annotation in annotations for inner in ast.walk(annotation)}
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.arguments)]
    values = [value for node in called for value in (getattr(node, "args", []), getattr(node, "kw_defaults", []))]
    values += [node.defaults for node in called if isinstance(node, ast.arguments)]
    names = [value for group in values for value in group if isinstance(value, ast.Name | ast.Attribute)]
    found = {name.id if isinstance(name, ast.Name) else name.attr for name in names if id(name) not in passed_over}
    return found & set(KINDS)


def test_there_is_a_hook_for_each_kind() -> None:
    assert len(KINDS) == sum(name.startswith("mlsys_register_") for name in vars(hookspecs)) == 13


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("registry.all(DeviceSpec)", {"DeviceSpec"}),
        ("registry.load(specs.PolicySpec, name)", {"PolicySpec"}),
        ("def group(kind=CommandSpec): ...", {"CommandSpec"}),
        ("def one(spec: DeviceSpec) -> DeviceSpec: return DeviceSpec(name='a', help='b', factory='c')", set()),
        ("from mlsys_core.plugins.specs import DeviceSpec", set()),
    ],
)
def test_a_reader_is_told_from_a_maker(text: str, read: set[str]) -> None:
    assert kinds_read(text) == read


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_spec_has_a_reader(kind: str) -> None:
    texts = (path.read_text("utf-8") for path in SOURCES if path.name != "_plugin.py")
    is_read = any(kind in text and kind in kinds_read(text) for text in texts)
    assert is_read, f"nothing looks up {kind}: what a plugin registers with its hook would be ignored"
