"""Models of files, by the loaders that plugins registered: Orca's own is one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.loading import LoadContext, endings, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec

from mlsys_orca.backends.native.kept import Copies
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel

ENGINE, OWN = "orca", "orca-llm"


def load_registered(path: Path, context: LoadContext) -> LoadedModel:
    """Load a GGUF file or a Hugging Face directory; Orca's own loader, see :func:`load_model` for what it refuses."""
    options = context.taken("dtype", "weights", "activations", "backend")
    chosen = settings()
    copies = Copies(chosen.cache_dir / "packed", chosen.packed_nbytes)
    return load_model(path, device=context.device, progress=context.progress, copies=copies, **options)


def load_by_name(path: Path, context: LoadContext, registry: Registry | None = None) -> LoadedModel:
    """Load ``path`` with the loader registered for its ending; Orca's own takes what no other does.

    Raises:
        InvalidInputError: the loader refuses the file or an option, or no loader knows it.
        PluginError: the loader fails by a mistake of its own, or gives no :class:`LoadedModel`.
    """
    registry = installed_plugins().registry if registry is None else registry
    spec = find_loader(path, ENGINE, registry)
    if spec is None:
        if path.suffix and not _begins_as_gguf(path):
            raise InvalidInputError(
                f"{path}: no loader takes it; Orca's loaders take files and folders with {endings(ENGINE, registry)}"
            )
        spec = registry.get(ModelLoaderSpec, OWN)  # files without an ending are known by their first bytes
    loaded: LoadedModel = load_with(spec, path, context, registry, kind=LoadedModel)
    return replace(loaded, device=context.device)


def _begins_as_gguf(path: Path) -> bool:
    if path.is_dir():
        return True  # of which the loader says more
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
