"""Model loaders by file name, and compilers of modules by name: the search for one, and the call of it.

An engine's own loaders are registered like a third party's, and are found in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.plugins.registry import Registry
from mlsys_core.plugins.specs import CompilerSpec, ModelLoaderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """Data passed to a loader beside the path. Owner: the engine's command."""

    device: str = "cpu"  # the registered name of the device that the model is to be on, for get_device
    trust_code: bool = False  # True if the user lets files run code while they load
    progress: Callable[[int, int], None] | None = None  # call it with bytes read so far and bytes in all
    options: Mapping[str, Any] = field(default_factory=dict)  # further options that the user gave, by their names

    def taken(self, *names: str) -> dict[str, Any]:
        """Return the options, which must be among ``names``; a loader without options passes no names.

        Raises:
            InvalidInputError: the user gave another; the message lists the options.

        Example:
            >>> LoadContext(options={"dtype": "bf16"}).taken("dtype", "weights")
            {'dtype': 'bf16'}
        """
        if unknown := sorted(set(self.options) - set(names)):
            options = [f"--{name.replace('_', '-')}" for name in unknown]
            known = ", ".join(f"--{name.replace('_', '-')}" for name in names) or "none"
            raise InvalidInputError(f"this model's loader does not take {options[0]} (it takes: {known})")
        return dict(self.options)


def find_loader(path: Path, engine: str, registry: Registry) -> ModelLoaderSpec | None:
    """Return the loader of ``engine`` for ``path``; None: no loader has an ending of its name.

    The longest ending counts; one that begins with no dot is a whole name. A folder is known by its own name or by
    those of the files in it, its own first.

    Raises:
        PluginError: two loaders take the same ending.

    Example:
        >>> registry = Registry()
        >>> spec = ModelLoaderSpec(name="toy", help="Toys.", engine="orca", suffixes=(".toy",), factory="a:b")
        >>> registry.add(spec, "mlsys-toys")
        >>> find_loader(Path("model.toy"), "orca", registry).name, find_loader(Path("model.toy"), "dvabatch", registry)
        ('toy', None)
    """
    specs = [spec for spec in registry.all(ModelLoaderSpec) if spec.engine == engine]
    found = _longest(path, [path.name], specs, registry)
    if found is None and path.is_dir():
        found = _longest(path, sorted(each.name for each in path.iterdir()), specs, registry)
    return found


def endings(engine: str, registry: Registry) -> str:
    """Return the endings that the loaders of ``engine`` take, for messages."""
    return ", ".join(
        sorted({suffix for spec in registry.all(ModelLoaderSpec) if spec.engine == engine for suffix in spec.suffixes})
    )


def load_with(spec: ModelLoaderSpec, path: Path, context: LoadContext, registry: Registry, *, kind: type) -> Any:
    """Return the loader's model of ``path``.

    Args:
        spec: the loader.
        path: a file or folder.
        context: its settings.
        registry: names the loader's owner in errors.
        kind: the class that the engine's models must have.

    Raises:
        PluginError: the loader fails by a mistake of its own, or gives something else.
        MlsysError: as the loader refuses the file.
    """
    model = registry.part(spec)(path, context)
    if not isinstance(model, kind):
        raise PluginError(
            f"model loader {spec.name!r} of {registry.owner(spec)}: it gave a {type(model).__name__}, and "
            f"{spec.engine} takes a {kind.__module__}.{kind.__qualname__}"
        )
    return model


def _longest(
    path: Path, names: Iterable[str], specs: Iterable[ModelLoaderSpec], registry: Registry
) -> ModelLoaderSpec | None:
    matches = [
        (len(suffix), spec)
        for spec in specs
        for suffix in spec.suffixes
        if any(_ends(name.lower(), suffix.lower()) for name in names)
    ]
    if not matches:
        return None
    longest = max(length for length, _ in matches)
    best = list({spec.name: spec for length, spec in matches if length == longest}.values())
    if len(best) > 1:
        owners = " and ".join(f"{spec.name!r} of {registry.owner(spec)}" for spec in best)
        raise PluginError(f"{path}: several model loaders take it: {owners}; block a plugin with MLSYS_PLUGINS_BLOCK")
    return best[0]


def _ends(name: str, suffix: str) -> bool:
    return name == suffix or (suffix.startswith(".") and name.endswith(suffix))


Compiler = Callable[[Any, Sequence[Any]], Callable[..., Any]]  # (module, example inputs) -> what takes its place


def find_module_compiler(name: str, registry: Registry) -> Compiler:
    """Return the compiler called ``name``.

    Raises:
        InvalidInputError: there is none; the message lists the names.
        PluginError: the compiler fails by a mistake of its own, or gives nothing that can be called (when it is used).
    """
    spec = registry.chosen(CompilerSpec, name)
    factory = registry.part(spec)

    def compile_module(module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made = factory(module, tuple(example_inputs))
        if not callable(made):
            owner = registry.owner(spec)
            raise PluginError(f"compiler {name!r} of {owner}: it gave a {type(made).__name__}, which cannot be called")
        compiled: Callable[..., Any] = made
        return compiled

    return compile_module
