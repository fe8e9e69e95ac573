"""Frequencies for longer contexts against transformers' own, and what the two kinds of files say about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.families import model_family
from mlsys_orca.model.layers import Rotary
from mlsys_orca.model.rope import rope_from_huggingface

RAW: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 256}
SHORT, LONG = [1 + i / 40 for i in range(32)], [1 + i for i in range(32)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 48, "beta_slow": 0.5},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-scales": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-attention-factor": YARN | {"attention_factor": 0.9},
    "yarn-no-factor": YARN | {"factor": None},
    "longrope": LONGROPE | {"original_max_position_embeddings": 256},
    "longrope-factor": LONGROPE | {"original_max_position_embeddings": 256, "factor": 3.0},
    "longrope-attention-factor": LONGROPE | {"original_max_position_embeddings": 256, "attention_factor": 1.5},
    "longrope-short": LONGROPE | {"original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    theirs = transformers.LlamaConfig(**(RAW | {"rope_parameters": dict(scaling)}))
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=4096)
    config = model_family("llama").from_huggingface(RAW | {"rope_parameters": scaling})
    rotary = Rotary(config, device=torch.device("cpu"))
    assert torch.allclose(rotary.inverse_frequencies, frequencies, rtol=1e-6, atol=0)
    assert config.rope_amplitude == pytest.approx(amplitude, rel=1e-9)
    cos, sin = rotary(torch.tensor([0, 7]))
    assert cos[0].unique().tolist() == pytest.approx([amplitude])
    assert torch.allclose((cos**2 + sin**2).sqrt(), torch.tensor(amplitude))
    assert config.max_positions == 4096


def test_a_yarn_file_that_states_the_first_context_serves_the_stretched_one() -> None:
    """The form in which Qwen2.5's documentation has users write it."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert model_family("qwen2").from_huggingface(RAW | {"rope_scaling": scaling}).max_positions == 16_384


def test_dynamic_scaling_ends_the_context_where_it_would_begin() -> None:
    read = model_family("llama").from_huggingface
    scaling = {"type": "dynamic", "factor": 4.0}
    config = read(RAW | {"rope_scaling": scaling})
    assert (config.rope_divisors, config.max_positions) == (None, 4096)
    config = read(RAW | {"rope_scaling": scaling | {"original_max_position_embeddings": 1024}})
    assert (config.rope_divisors, config.max_positions) == (None, 1024)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_names_of_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": SHORT, "long_factor": LONG}
    config = model_family("phi3").from_huggingface(
        RAW | {"rope_scaling": scaling, "original_max_position_embeddings": 256}
    )
    assert config.rope_divisors == tuple(map(float, LONG))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "xpos"}, "rotary scaling 'xpos'"),
        ({"rope_type": "linear"}, "no number at 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": "1"}, "no number at 'low_freq_factor'"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 3, "short_factor": [1.0] * 3}, "needs 8 factors"),
    ],
    ids=["unknown", "linear", "llama3", "longrope"],
)
def test_unknown_and_incomplete_input_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        rope_from_huggingface({"rope_scaling": scaling}, 16, max_positions=64)


def test_scaling_that_is_stated_twice_is_refused() -> None:
    new, old = {"rope_type": "default", "rope_theta": 1e6}, {"type": "yarn", "factor": 4.0}
    with pytest.raises(InvalidInputError, match=r"rope_scaling .* beside other rope_parameters"):
        rope_from_huggingface({"rope_parameters": new, "rope_scaling": old}, 16, max_positions=64)
    both = {"rope_parameters": new, "rope_scaling": {"type": "default"}}
    assert rope_from_huggingface(both, 16, max_positions=64)["rope_theta"] == 1e6


def gguf_rope(metadata: dict[str, Any], **factors: tuple[float, ...]) -> ModelConfig:
    keys = {"phi3.attention.sliding_window": 0, "phi3.vocab_size": 260, "phi3.rope.freq_base": 10_000.0} | {
        f"phi3.{key}": value
        for key, value in {
            "block_count": 2,
            "context_length": 4096,
            "embedding_length": 256,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **metadata,
        }.items()
    }
    read = model_family("phi3").from_gguf
    assert read is not None
    return read(GgufFields(metadata=keys, architecture="phi3", tensor_names=frozenset(), **factors))


def test_a_gguf_file_has_yarn_in_its_metadata() -> None:
    config = gguf_rope(
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 256}
    )
    expected = rope_from_huggingface({"rope_parameters": YARN | {"rope_theta": 1e4}}, 64, max_positions=4096)
    assert config.rope_divisors == expected["rope_divisors"]
    assert config.rope_amplitude == pytest.approx(expected["rope_amplitude"])
    with pytest.raises(InvalidInputError, match="yarn_log_multiplier"):
        gguf_rope({"rope.scaling.yarn_log_multiplier": 0.1})


@pytest.mark.parametrize(("original", "expected"), [(256, LONG), (4096, SHORT)])
def test_a_gguf_file_has_longrope_in_two_tensors(original: int, expected: list[float]) -> None:
    metadata = {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": 1.19}
    config = gguf_rope(metadata, long_divisors=tuple(LONG), short_divisors=tuple(SHORT))
    assert (config.rope_divisors, config.rope_amplitude) == (tuple(expected), 1.19)
