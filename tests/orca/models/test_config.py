from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.models import ARCHITECTURES, model_class
from mlsys_orca.models.config import config_from_gguf, config_from_huggingface, llama3_divisors

RAW: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
}


def test_absent_keys_have_the_familys_defaults() -> None:
    config = config_from_huggingface(RAW, "llama")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert (config.norm_eps, config.max_positions, config.tied_embeddings) == (1e-6, 2048, False)


def test_both_ways_of_writing_rotary_settings_are_read() -> None:
    new = config_from_huggingface(
        RAW | {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}, ""
    )
    old = config_from_huggingface(RAW | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5}, "")
    assert new.rope_theta == old.rope_theta == 5e5
    assert new.rope_divisors == old.rope_divisors == (2.0,) * 8


def test_a_window_bounds_the_context() -> None:
    window = {"max_position_embeddings": 32768, "sliding_window": 4096}
    assert config_from_huggingface(RAW | window, "llama").max_positions == 4096
    assert config_from_huggingface(RAW | window | {"sliding_window": None}, "llama").max_positions == 32768
    assert (
        config_from_huggingface(RAW | {"model_type": "mistral", "max_position_embeddings": 9999}, "").max_positions
        == 4096
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "vocab_size": "many"}, "lacks hidden_size, vocab_size"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear and llama3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        config_from_huggingface(RAW | changes, "llama")


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    divisors = llama3_divisors(
        5e5, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert list(divisors) == sorted(divisors)
    assert any(1.0 < divisor < 8.0 for divisor in divisors)


def test_gguf_scaling_comes_from_metadata_and_from_the_files_factors(metadata: dict[str, Any]) -> None:
    def divisors(changes: dict[str, Any], **options: Any) -> tuple[float, ...] | None:
        names = frozenset({"output.weight"})
        return config_from_gguf(metadata | changes, "llama", tensor_names=names, **options).rope_divisors

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert divisors({}) is None
    assert divisors(linear) == (4.0,) * 8
    assert divisors({}, rope_divisors=(2.0,) * 8) == (2.0,) * 8
    assert divisors(linear, rope_divisors=(2.0,) * 8) == (8.0,) * 8


def test_every_architecture_has_its_class() -> None:
    assert all(model_class(name) for name in ARCHITECTURES)
    with pytest.raises(InvalidInputError, match="'bloom' is not supported"):
        model_class("bloom")
