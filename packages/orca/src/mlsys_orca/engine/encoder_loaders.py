"""Encoders of files, by the loaders that plugins registered for ``orca-encoder``: Orca's own is one of them."""

from __future__ import annotations

from pathlib import Path

from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.loading import LoadContext, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec
from mlsys_orca.engine.embedding import TextEncoder, load_encoder

ENGINE = OWN = "orca-encoder"


def load_registered(path: Path, context: LoadContext) -> TextEncoder:
    """Load a Hugging Face directory; see :func:`~.embedding.load_encoder` for what it refuses."""
    return load_encoder(path, device=context.device, progress=context.progress, **context.taken("dtype"))


def load_encoder_by_name(path: Path, context: LoadContext, registry: Registry | None = None) -> TextEncoder:
    """Load ``path`` with the loader registered for its ending; Orca's own takes what no other does.

    Raises:
        InvalidInputError: the loader refuses the file or an option.
        PluginError: the loader fails by a mistake of its own, or gives no :class:`TextEncoder`.
    """
    registry = installed_plugins().registry if registry is None else registry
    spec = find_loader(path, ENGINE, registry) or registry.get(ModelLoaderSpec, OWN)
    encoder: TextEncoder = load_with(spec, path, context, registry, kind=TextEncoder)
    return encoder
