"""Keys of a GGUF's metadata: obeyed as llama.cpp obeys them, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from gguf.constants import Keys
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.families import model_family
from mlsys_orca.model.limits import check_numbers

BASE: dict[str, Any] = {
    "block_count": 6,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "vocab_size": 260,
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SHARED = _EXPERTS | {"expert_shared_feed_forward_length": 32}
_STATES = {
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "ssm.group_count": 2,
    "ssm.state_size": 16,
    "ssm.conv_kernel": 4,
}
_LATENT = {
    "rope.dimension_count": 8,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}
_WINDOW = {"attention.sliding_window": 8}
# Architecture -> what its files have beside the common keys.
FILES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gemma", "gemma2", "glm4", "gpt2", "granite", "llama")},
    **{name: {} for name in ("olmo2", "qwen2", "qwen3", "smollm3")},
    "cohere2": _WINDOW | {"logit_scale": 0.5},
    "command-r": {"logit_scale": 0.5},
    "deepseek2": _EXPERTS | _LATENT,
    "gemma3": _WINDOW,
    "gpt-oss": _EXPERTS | _WINDOW,
    "granitehybrid": _STATES | {"attention.head_count_kv": [0, 4, 0, 4, 0, 4], "rope.scaling.finetuned": False},
    "mamba2": _STATES,
    "phi3": _WINDOW,
    "qwen2moe": _SHARED,
    "qwen35": _STATES,
    "qwen35moe": _STATES | _SHARED,
    "qwen3moe": _EXPERTS,
    "qwen3next": _STATES | _SHARED,
    "t5": {"attention.relative_buckets_count": 32},
}
# Keys that llama.cpp does not read for these architectures, or that change nothing there.
OF_NO_USE = {
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "decoder_block_count",
    "decoder_start_token_id",
    "embedding_length_out",
    "expert_feed_forward_length",  # where no family reads it, the tensors have it
    "expert_shared_count",  # where one is as wide as all
    "features_length",
    "full_attention_interval",
    "pooling_type",
    "rope.scaling.finetuned",  # but Granite's
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "use_parallel_residual",
}
_PREFIXES_OF_OTHERS = ("altup.", "classifier.", "convnext.", "dense_", "kda.", "posnet.", "shortconv.", "wkv.")
_OF_OTHERS = {"rescale_every_n_layers", "swin_norm", "time_decay_extra_dim", "time_mix_extra_dim", "token_shift_count"}
# Values at which a key says nothing to llama.cpp.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.output_scale": (1,),
    "embedding_scale": (1,),
    "expert_gating_func": (1,),
    "expert_group_count": (1,),
    "expert_group_used_count": (1,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (1,),
    "interleave_moe_layer_step": (1,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "rope.freq_base": (10_000.0,),
    "rope.freq_base_swa": (10_000.0,),
    "rope.scaling.alpha": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (1,),
    "rope.scale_linear": (1,),
    "rope.scaling.type": ("linear", "none"),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}


def _keys(of: type) -> Iterator[str]:
    for name, value in vars(of).items():
        if isinstance(value, type):
            yield from _keys(value)
        elif isinstance(value, str) and not name.startswith("_") and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


KNOWN = sorted({*_keys(Keys), "rope.scale_linear", "attention.of_tomorrow", "rope.of_tomorrow"})
VALUES: list[Any] = [0, 1, 2, 3, 5, 0.5, 2.0, 12.0, 64.0, 10_000.0, True, False, "linear", "yarn", "none", "relu"]
VALUES += [[0, 4, 0, 4, 0, 4], [1] * 6]


def config_of(architecture: str, stated: dict[str, Any], **tensors: Any) -> ModelConfig:
    read = model_family(architecture).from_gguf
    assert read is not None
    metadata = {f"{architecture}.{key}": value for key, value in stated.items()}
    check_numbers(metadata, prefix=f"{architecture}.")  # as the loader does
    return read(GgufFields(metadata=metadata, architecture=architecture, tensor_names=frozenset(), **tensors))


def verdict(architecture: str, base: dict[str, Any], key: str, value: Any) -> str:
    """Return what becomes of a key: "none" (it says nothing), "obeyed", "refused", "wrong" (no change) or "raw"."""
    if key in OF_NO_USE | _OF_OTHERS or key.startswith((*_PREFIXES_OF_OTHERS, "{")):
        return "none"
    if value == base.get(key) or value in DEFAULTS.get(key, ()) or (not value and key not in base):
        return "none"
    before = config_of(architecture, base)
    try:
        after = config_of(architecture, base | {key: value})
    except InvalidInputError:
        return "refused"
    except Exception:  # noqa: BLE001 - that is what is looked for
        return "raw"
    if key == "feed_forward_length" and "expert_feed_forward_length" in base:
        return "none"
    if key == "attention.head_count_kv" and architecture == "deepseek2":
        return "none"  # its tensors say it
    if architecture == "mamba2" and key.startswith(("attention.", "context_", "feed_", "rope.")):
        return "none"  # it has none of these, but for a norm
    return "obeyed" if after != before else "wrong"


@pytest.mark.parametrize("architecture", sorted(FILES))
@settings(max_examples=60)
@given(key=st.sampled_from(KNOWN), value=st.sampled_from(VALUES))
def test_a_key_is_obeyed_or_refused_or_says_nothing(architecture: str, key: str, value: Any) -> None:
    assert verdict(architecture, BASE | FILES[architecture], key, value) in ("none", "obeyed", "refused")


def _llama_cpp_rope(stated: dict[str, Any], dim: int) -> tuple[list[float], float]:
    """Return the divisor of each pair's frequency, and what scales the result, as llama.cpp computes both."""
    kind = stated.get("rope.scaling.type", "linear")
    factor = stated.get("rope.scaling.factor", stated.get("rope.scale_linear", 0.0)) or 1.0
    amplitude = stated.get("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return [1.0] * (dim // 2), amplitude
    if kind == "linear":
        return [factor] * (dim // 2), amplitude
    original = stated.get("rope.scaling.original_context_length", BASE["context_length"])
    betas = [stated.get(f"rope.scaling.yarn_beta_{end}", turns) for end, turns in (("fast", 32.0), ("slow", 1.0))]
    base = stated.get("rope.freq_base", 10_000.0)
    at = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in betas]
    low, high = max(0.0, math.floor(at[0])), min(dim - 1.0, math.ceil(at[1]))
    kept = [1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low))) for pair in range(dim // 2)]
    return [1 / ((1 - part) / factor + part) for part in kept], amplitude * (1 + 0.1 * math.log(factor))


@settings(max_examples=300)
@given(
    stated=st.fixed_dictionaries(
        {},
        optional={
            "rope.scaling.type": st.sampled_from(["none", "linear", "yarn"]),
            "rope.scaling.factor": st.sampled_from([0.0, 1.0, 2.5, 8.0]),
            "rope.scale_linear": st.sampled_from([0.0, 1.0, 4.0]),
            "rope.scaling.attn_factor": st.sampled_from([1.0, 0.75]),
            "rope.scaling.original_context_length": st.sampled_from([16, 64, 4096]),
            "rope.scaling.yarn_beta_fast": st.sampled_from([16.0, 32.0]),
            "rope.scaling.yarn_beta_slow": st.sampled_from([1.0, 2.0]),
            "rope.freq_base": st.sampled_from([10_000.0, 1e6]),
        },
    ),
    own=st.none() | st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=8, max_size=8).map(tuple),
)
def test_rotary_scalings_are_those_of_llama_cpp(stated: dict[str, Any], own: tuple[float, ...] | None) -> None:
    try:
        config = config_of("llama", BASE | stated, rope_divisors=own)
    except InvalidInputError:
        assert own is not None
        assert stated["rope.scaling.type"] == "yarn"
        return
    divisors, amplitude = _llama_cpp_rope(stated, 16)

    expected = [divisor * each for divisor, each in zip(divisors, own or [1.0] * 8, strict=True)]
    assert list(config.rope_divisors or [1.0] * 8) == pytest.approx(expected, rel=1e-6)
    assert config.rope_amplitude == pytest.approx(amplitude, rel=1e-6)
    assert replace(config, rope_divisors=None, rope_amplitude=1.0).rope_theta == stated.get("rope.freq_base", 10_000.0)
