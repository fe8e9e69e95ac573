"""The model families Orca runs with a forward of its own, one file each.

Grow by adding a file and a line here. Imports no torch: the classes are lazy references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.lazy import resolve

if TYPE_CHECKING:
    from mlsys_orca.models.decoder import DecoderModel

# What a file calls its architecture (GGUF general.architecture, config.json model_type) -> the class that runs it.
ARCHITECTURES: dict[str, str] = {
    "llama": "mlsys_orca.models.llama:LlamaModel",
    "mistral": "mlsys_orca.models.llama:LlamaModel",
}


def model_class(architecture: str) -> type[DecoderModel]:
    """The class that runs ``architecture``.

    Raises:
        InvalidInputError: no class does; the message lists those that are supported.

    Example:
        >>> model_class("llama").__name__
        'LlamaModel'
    """
    if architecture not in ARCHITECTURES:
        raise InvalidInputError(
            f"the architecture {architecture!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    model: type[DecoderModel] = resolve(ARCHITECTURES[architecture])
    return model
