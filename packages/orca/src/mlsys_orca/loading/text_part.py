"""The text part of a directory whose model also sees pictures, as if it were a directory of its own.

Used by :mod:`mlsys_orca.loading.huggingface` for models whose text part, asked in text only, computes as it would
alone: Gemma 3 from 4B on, Mistral Small 3.1 and 3.2, Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlsys_orca.model.config_readers import refuse_common
from mlsys_orca.model.weights.checkpoint import Checkpoint, View, renamed

if TYPE_CHECKING:
    pass

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


def open_text_part(whole: Checkpoint, raw: Mapping[str, Any]) -> View:
    """Return the tensors of the text part of the model that ``raw`` describes, under the names they have alone."""
    return renamed(whole, _QWEN if raw["model_type"].startswith("qwen3_5") else _ALONE)


def has_head(part: Checkpoint) -> bool:
    """Return whether a text part has a vocabulary projection; without one its embeddings serve, whatever is stated."""
    return "lm_head.weight" in part.names
