"""Modules that a server imports at its start: a Llama that is not divided needs nothing of other models and ways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mlsys_orca

_SOURCE = Path(mlsys_orca.__file__).parents[1]
MOST = 86  # modules of Orca


def test_a_server_of_a_whole_model_imports_no_machinery_of_divided_ones() -> None:
    found = _closure("mlsys_orca.api.supervised")
    assert {
        "mlsys_orca.model.decoder",
        "mlsys_orca.api.service",
        "mlsys_orca.engine.worker",
        "mlsys_orca.backends.native.decoder",
    } <= found
    divided = {name for name in found if name.startswith("mlsys_orca.parallel")}
    # the error of a broken group, which the worker catches, and how parts are cut
    assert divided == {"mlsys_orca.parallel", "mlsys_orca.parallel.placement", "mlsys_orca.parallel.shard"}


def test_a_server_of_a_llama_imports_no_parts_of_other_models() -> None:
    found = _closure("mlsys_orca.api.supervised") | _closure("mlsys_orca.model.families.llama")
    families = {name for name in found if name.startswith("mlsys_orca.model.families.")}
    assert families == {"mlsys_orca.model.families.llama"}
    rare = {f"mlsys_orca.model.{part}" for part in ("experts", "latent", "recurrent", "encoder_decoder", "adapters")}
    rare |= {f"mlsys_orca.backends.native.{part}" for part in ("lowering_parts", "recurrence")}
    assert not found & rare
    assert not {name for name in found if name.startswith(("mlsys_orca.backends.triton", "mlsys_orca.backends.trans"))}
    assert len(found) <= MOST


def _closure(module: str) -> set[str]:
    """Return Orca's modules that importing ``module`` brings."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in found or file is None:
            continue
        found.add(name)
        parent, _, _ = name.rpartition(".")
        waiting += [parent, *_imports(ast.parse(file.read_text()).body)]
    return found


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what statements of a module import when it is imported; functions' own imports come later."""
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{each.name}" for each in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                yield from _imports(orelse)
            case ast.If(body=inner, orelse=orelse) | ast.Try(body=inner, orelse=orelse):
                yield from _imports([*inner, *orelse])


def _file_of(module: str) -> Path | None:
    if not module.startswith("mlsys_orca"):
        return None
    path = _SOURCE.joinpath(*module.split("."))
    found = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return found[0] if found else None
