"""Plain data: the classes that files may name, the kinds of arrays that they hold, and the key of tagged values.

``plain.py`` writes it, ``plain_reader.py`` reads it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import ConverterSpec
from torch import nn

OWN_MODULES = tuple(
    f"mlsys_windtunnel.{name}"
    for name in (
        "backends.soft",
        "checks",
        "convert",
        "finetune.residual",
        "frontend",
        "host",
        "modules",
        "parse.graph",
    )
)
CONTAINERS = {
    f"torch.nn:{cls.__name__}": cls
    for cls in (nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Sequential)
}
ARRAY_KINDS = "biufUSmM"  # dtype kinds of numpy arrays and scalars that plain data holds
MODULE_FIELDS = frozenset(vars(nn.Module()))
TAG = "$"  # the key that tells a tagged value from a plain dictionary


def class_path(cls: Any) -> str:
    """Return ``"package.module:Name"`` of a class or a function."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_allowed(module_name: str, packages: tuple[str, ...]) -> bool:
    """Return whether classes of a module may be written and read.

    Args:
        module_name: The module.
        packages: Packages beside WindTunnel's own and those of registered converters.
    """
    allowed = (*OWN_MODULES, *packages, *converter_modules())
    return any(module_name == name or module_name.startswith(f"{name}.") for name in allowed)


@lru_cache(maxsize=1)
def converter_modules() -> frozenset[str]:
    """Return the modules of the converters that installed plugins registered; their operators may be saved and read."""
    specs = installed_plugins().registry.all(ConverterSpec)
    return frozenset(spec.factory.partition(":")[0] for spec in specs)
