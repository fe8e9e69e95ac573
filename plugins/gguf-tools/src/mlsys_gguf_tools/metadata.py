"""A directory's configuration as a GGUF file's metadata.

Called by :mod:`.huggingface`. What is written is read back by the family's own reader and compared: where GGUF has no
key for something, or llama.cpp assumes another value, the model is refused by the field's name. Keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig, RecurrentPart
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.families import ARCHITECTURES, model_family

_NOT_WRITTEN = frozenset({"t5", "mt5", "umt5", "gpt_oss", "deepseek_v2", "deepseek_v3"})  # as config.json names them
# config.json's model_type -> general.architecture, where they differ.
_NAMES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitehybrid",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
QWEN3_5 = frozenset({"qwen35", "qwen35moe"})
DELTA = QWEN3_5 | {"qwen3next"}  # with gated delta nets
_WITH_LAYER_NORM = frozenset({"gpt2", "command-r", "cohere2"})
_WITHOUT_ROTARY = frozenset({"gpt2", "mamba2"})
# What this reader takes from a file and llama.cpp does not, or the other way round (its loader, by architecture).
_WITH_ALL_BIASES = frozenset({"llama", "granite", "gpt2"})
_WITH_ROPE_FREQS = frozenset({"llama", "granite"})
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_SECTIONS = (11, 11, 10, 0)  # of rotary positions on three axes, alike for text
_COMMAND_R_LAYERS = 64  # from here on llama.cpp looks for norms of heads

_TENSORS = {  # of rotary scalings, and the field of GgufFields that each is read to
    "rope_freqs.weight": "rope_divisors",
    "rope_factors_long.weight": "long_divisors",
    "rope_factors_short.weight": "short_divisors",
}


def gguf_architecture(model_type: str) -> str:
    """Return what GGUF calls the architecture that ``config.json`` calls ``model_type``.

    Raises:
        InvalidInputError: GGUF has no layout for it, or it is not read here.

    Example:
        >>> gguf_architecture("mixtral")
        'llama'
    """
    name = _NAMES.get(model_type, model_type)
    if name not in ARCHITECTURES or model_family(name).from_gguf is None or name in _NOT_WRITTEN:
        raise InvalidInputError(
            f"models of architecture {model_type!r} are not written to GGUF: those are whose GGUF is read, decoders "
            "alone (docs/orca.md has the table)"
        )
    return name


def model_metadata(config: ModelConfig, raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries about the model's shape, by their keys without the architecture.

    Args:
        config: The model, as its family reads the directory.
        raw: ``config.json``.
        architecture: GGUF's name.
    """
    norm = "layer_norm_epsilon" if architecture in _WITH_LAYER_NORM else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.{norm}": config.norm_eps,
    }
    if config.head_dim * config.num_heads != config.hidden_size and architecture != "mamba2":  # which has no heads
        found |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if architecture not in _WITHOUT_ROTARY:
        found |= {"rope.dimension_count": config.rotary_dim or config.head_dim, "rope.freq_base": config.rope_theta}
        found |= _scaling(config, raw)
    if config.num_experts:
        found |= {"expert_count": config.num_experts, "expert_used_count": config.num_chosen_experts}
    if config.recurrent is not None:
        found |= _of_states(config, config.recurrent, architecture)
    return found | _of_family(config, raw, architecture)


def scaling_tensors(config: ModelConfig, raw: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return the rotary scalings that GGUF has as tensors, by name."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "long_factor" in rope:
        pairs = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: tuple(map(float, rope[key])) for name, key in pairs.items()}
    if _kind(rope) == "llama3" and config.rope_divisors is not None:
        return {"rope_freqs.weight": config.rope_divisors}
    return {}


def check_says_the_same(
    config: ModelConfig, metadata: Mapping[str, Any], names: frozenset[str], tensors: Mapping[str, tuple[float, ...]]
) -> None:
    """See that a file with that metadata and tensors of those names is read as ``config``.

    Raises:
        InvalidInputError: it is not; the message names the fields.
    """
    architecture = metadata["general.architecture"]
    family = model_family(architecture)
    assert family.from_gguf is not None
    divisors: dict[str, Any] = {_TENSORS[name]: values for name, values in tensors.items()}
    read = family.from_gguf(GgufFields(metadata=metadata, architecture=architecture, tensor_names=names, **divisors))
    wrong = [
        f"{each.name} (here {_seen(config, each.name)}, there {_seen(read, each.name)})"
        for each in fields_of(ModelConfig)
        if each.name != "architecture" and not _alike(_seen(config, each.name), _seen(read, each.name))
    ]
    if wrong:
        raise InvalidInputError(f"a GGUF of architecture {architecture!r} cannot say this model's {', '.join(wrong)}")


def check_llama_cpp_reads(config: ModelConfig, architecture: str, tensors: Mapping[str, tuple[float, ...]]) -> None:
    """See that llama.cpp, too, reads what Orca reads from such a file.

    Raises:
        InvalidInputError: it does not.
    """
    part = config.recurrent
    is_biased = config.output_bias or config.mlp_bias
    norms = config.qk_norm and architecture == "command-r" and config.num_layers < _COMMAND_R_LAYERS
    reasons = {
        "biases of attention's output or of the MLP": is_biased and architecture not in _WITH_ALL_BIASES,
        "head that is the embedding table": config.tied_embeddings and architecture == "qwen2moe",
        "rotary scaling as a tensor": "rope_freqs.weight" in tensors and architecture not in _WITH_ROPE_FREQS,
        "layers that all attend": part is not None and not part.num_layers,
        "values of another width than keys": architecture in DELTA and part and part.head_dim != part.state_size,
        f"norms of heads in a model of fewer than {_COMMAND_R_LAYERS} layers": norms,
    }
    if wrong := [what for what, holds in reasons.items() if holds]:
        raise InvalidInputError(f"llama.cpp's {architecture!r} has no {', '.join(wrong)}: it would not load the file")


def _seen(config: ModelConfig, name: str) -> Any:
    """Return a field's value, one for all ways to say it."""
    value = getattr(config, name)
    if name == "attention_scale":
        return value or config.head_dim**-0.5
    if name == "windows" and value is not None and all(each is None or each >= config.max_positions for each in value):
        return None  # wider than what is ever seen
    if name == "recurrent" and value is not None:
        return replace(value, is_tiled=False)  # rows are written in the file's order
    if name == "rotated" and value is not None and all(value):
        return None
    return value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaling(config: ModelConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if "long_factor" in rope:
        return {
            "rope.scaling.original_context_length": original or config.max_positions,
            "rope.scaling.attn_factor": config.rope_amplitude,
        }
    if (kind := _kind(rope)) not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = original or config.max_positions
        names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found |= {f"rope.scaling.{to}": float(rope[name]) for name, to in names.items() if rope.get(name)}
    return found


def _of_family(config: ModelConfig, raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the entries that only files of this architecture have."""
    width = next((window for window in config.windows or () if window is not None), None)
    window = {"attention.sliding_window": width or 0}
    match architecture:
        case "cohere2":
            return window | {"logit_scale": float(config.logit_scale)}
        case "command-r":
            return {"logit_scale": float(config.logit_scale)}
        case "gemma2":
            caps = {"attn": config.attention_softcap, "final": config.logit_softcap}
            return window | {f"{part}_logit_softcapping": float(cap or 0) for part, cap in caps.items()}
        case "gemma3":
            return window | {"rope.freq_base_swa": config.local_rope_theta}
        case "granite" | "granitehybrid":
            keys = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", **_GRANITE}
            return {key: float(raw.get(name, 1e-6 if name == "rms_norm_eps" else 1.0)) for key, name in keys.items()}
        case "phi3":
            return window
        case "qwen2moe" | "qwen3next" | "qwen35moe":
            return {
                "expert_feed_forward_length": config.intermediate_size,
                "expert_shared_feed_forward_length": config.shared_expert_size,
            }
        case "qwen3moe":
            return {"expert_feed_forward_length": config.intermediate_size}
    return {}


def _of_states(config: ModelConfig, part: RecurrentPart, architecture: str) -> dict[str, Any]:
    """Return the entries about recurrent layers, and which ones they are."""
    found: dict[str, Any] = {
        "ssm.conv_kernel": part.num_taps,
        "ssm.state_size": part.state_size,
        "ssm.group_count": part.num_groups,
        "ssm.time_step_rank": part.num_heads,
        "ssm.inner_size": part.num_values,
    }
    match architecture:
        case "mamba2":
            nothing = dict.fromkeys(("feed_forward_length", "attention.head_count", "attention.head_count_kv"), 0)
            return found | nothing
        case "granitehybrid":
            attends = [0 if is_recurrent else config.num_kv_heads for is_recurrent in part.layers]
            shared = {"expert_shared_feed_forward_length": config.shared_expert_size}
            return found | shared | {"attention.head_count_kv": attends, "rope.scaling.finetuned": False}
        case _:
            if architecture in QWEN3_5:
                found["rope.dimension_sections"] = list(_SECTIONS)
            return found | {"full_attention_interval": (*part.layers, False).index(False) + 1}
