"""Turn a ``config.json`` into a ``transformers`` configuration that this engine can run, or refuse it by name.

The first step of the path for architectures without a family of ours (:mod:`.decoder`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_orca.backends.transformers.image_rules import VISION_ARCHITECTURES
from mlsys_orca.model.config import UnsupportedModelError, refuse
from mlsys_orca.model.config_readers import refuse_common

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_transformers_config(path: Path, raw: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """Return the configuration, that of its text part, and the tokens of context in which this is exact.

    A model of text alone is its own text part; of others those are taken whose images :mod:`.vision` reads.

    Rotary scaling that depends on the length of the batch it is computed in would make an answer depend on its
    neighbours: ``dynamic`` and ``longrope`` are cut to the context in which they change nothing.

    Args:
        path: The directory.
        raw: Its ``config.json``.

    Raises:
        UnsupportedModelError: it is no decoder of text that keeps keys and values only.
        MissingDependencyError: ``transformers`` is not installed.
    """
    refuse(raw.get("quantization_config") is not None, "weights quantised by other tools (quantization_config)")
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        refuse_common(part)
        for key, what in _OTHERWISE.items():
            refuse(bool(part.get(key)), f"{what} ({key})")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the architecture {raw['model_type']!r} runs through transformers only, which is not installed: "
            'pip install "mlsys-orca[transformers]"'
        ) from error
    try:
        whole: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError) as error:
        if raw["model_type"] in transformers.CONFIG_MAPPING:  # it has the architecture, and this is none of it
            said = (str(error).strip().splitlines() or [""])[-1][:200]
            raise InvalidInputError(f"{path} has a configuration that transformers refuses: {said}") from error
        raise UnsupportedModelError(
            f"an architecture that transformers {transformers.__version__} does not have, and code from the "
            "model's directory is never run"
        ) from error
    refuse(bool(whole.is_encoder_decoder), "an encoder beside the decoder")
    config: Any = whole.get_text_config()
    is_read = config is whole or whole.model_type in VISION_ARCHITECTURES
    refuse(not is_read, f"more than a text model, or one that sees as {' or '.join(VISION_ARCHITECTURES)} do")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    refuse(bool(unknown), f"layers of type {', '.join(map(repr, unknown))} (full and sliding attention are)")
    max_positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 2:
        raise UnsupportedModelError("a context without a limit (config.json has no max_position_embeddings)")
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or max_positions
        if rope["rope_type"] == "longrope":
            max_positions = min(max_positions, original)
        elif rope["rope_type"] == "dynamic":
            max_positions = min(max_positions, original)
            rope["rope_type"] = "default"
    config.use_cache = False
    return whole, config, max_positions


# Keys of config.json that make a model something else than a stack of attention and MLPs.
_OTHERWISE = {
    "alibi": "a bias by distance",
    "num_kv_shared_layers": "layers that read the keys and values of others",
    "kv_lora_rank": "latent attention",
    "is_encoder_decoder": "an encoder beside the decoder",
}


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings: one, or one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (part for part in rope.values() if isinstance(part, dict) and "rope_type" in part)
