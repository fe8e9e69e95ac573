"""Boundary to plugins' code: turn unexpected exceptions into one line that names the owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlsys_core.errors import MlsysError, PluginError
from mlsys_core.plugins.registry import Registry
from mlsys_core.plugins.specs import Spec, noun


@contextmanager
def failing_as(spec: Spec, registry: Registry) -> Iterator[None]:
    """Turn exceptions of the code behind ``spec``, other than errors on purpose, into a :class:`PluginError`.

    Example:
        >>> from mlsys_core.plugins.specs import ExporterSpec
        >>> with failing_as(ExporterSpec(name="csv", help="x", factory="a:b"), Registry()):
        ...     {}["missing"]
        Traceback (most recent call last):
        ...
        mlsys_core.errors.PluginError: exporter 'csv' of an unknown distribution failed (KeyError: 'missing'); ...
    """
    try:
        yield
    except MlsysError:
        raise
    except Exception as error:  # a plugin's own mistake: the message names the plugin, MLSYS_DEBUG shows the rest
        owner = registry.owner(spec) or "an unknown distribution"
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise PluginError(
            f"{noun(type(spec))} {spec.name!r} of {owner} failed ({what}); MLSYS_DEBUG=1 shows where"
        ) from error
