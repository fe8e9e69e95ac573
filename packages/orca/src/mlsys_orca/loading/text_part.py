"""The text part of a directory whose model also sees pictures, as if it were a directory of its own.

Used by :mod:`mlsys_orca.loading.huggingface` for models whose text part, asked in text only, computes as it would
alone: Gemma 3 from 4B on, Mistral Small 3.1 and 3.2, Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlsys_orca.model.config_readers import refuse_common
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout

if TYPE_CHECKING:
    from torch import Tensor

    from mlsys_orca.model.weights.quantized import QuantizedMatrix

_ALONE = MappingProxyType({"language_model.": ""})
_QWEN = MappingProxyType({"model.language_model.": "model.", "lm_head.": "lm_head."})
_ARCHITECTURES = {  # the whole's -> its text part's
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def text_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``config.json`` of the text part of the model that ``raw`` describes; None: none stands alone.

    Raises:
        InvalidInputError: the whole asks for what no family does.
    """
    part = raw.get("text_config")
    if raw["model_type"] not in _ARCHITECTURES or not isinstance(part, dict):
        return None
    refuse_common(raw)
    return {"model_type": _ARCHITECTURES[raw["model_type"]], **part}


def open_text_part(whole: Checkpoint, raw: Mapping[str, Any]) -> TextPart:
    """Return the tensors of the text part of the model that ``raw`` describes."""
    return TextPart(whole, prefixes=_QWEN if raw["model_type"].startswith("qwen3_5") else _ALONE)


class TextPart:
    """The tensors of the text part under the names they would have alone; a :class:`Checkpoint`.

    Args:
        whole: The directory.
        prefixes: Beginnings of the names of its tensors, and what they would be alone.
    """

    def __init__(self, whole: Checkpoint, *, prefixes: Mapping[str, str] = _ALONE) -> None:
        self.layout: Layout = whole.layout
        self._whole = whole
        self._names = {
            alone + name.removeprefix(prefix): name
            for prefix, alone in prefixes.items()
            for name in whole.names
            if name.startswith(prefix)
        }

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._names)

    @property
    def has_head(self) -> bool:
        """True if there is a vocabulary projection; without one the embeddings serve, whatever the configuration."""
        return "lm_head.weight" in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self._whole.shape(self._names.get(name, name))

    def nbytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes."""
        return self._whole.nbytes(self._names.get(name, name))

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Copy the tensor into ``out``, cast to its dtype."""
        self._whole.read_into(self._names.get(name, name), out, cut)

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the tensor's codes and scales, if the directory has them."""
        return self._whole.quantized(self._names.get(name, name), cut)
