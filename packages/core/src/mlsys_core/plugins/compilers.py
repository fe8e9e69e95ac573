"""Compilers of modules by name, as plugins registered them. Called once for each module, before anything is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlsys_core.errors import PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.boundary import failing_as
from mlsys_core.plugins.registry import Registry
from mlsys_core.plugins.specs import CompilerSpec

Compiler = Callable[[Any, Sequence[Any]], Callable[..., Any]]  # (module, example inputs) -> what takes its place


def find_module_compiler(name: str, registry: Registry) -> Compiler:
    """Return the compiler called ``name``.

    Raises:
        InvalidInputError: there is none; the message lists the names.
        PluginError: the compiler fails by a mistake of its own, or gives nothing that can be called (when it is used).
    """
    spec = registry.chosen(CompilerSpec, name)
    factory = resolve(spec.factory)

    def compile_module(module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with failing_as(spec, registry):
            made = factory(module, tuple(example_inputs))
        if not callable(made):
            owner = registry.owner(spec)
            raise PluginError(f"compiler {name!r} of {owner}: it gave a {type(made).__name__}, which cannot be called")
        compiled: Callable[..., Any] = made
        return compiled

    return compile_module
