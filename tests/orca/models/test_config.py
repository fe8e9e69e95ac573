from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config_readers import GgufFields, config_from_huggingface
from mlsys_orca.model.families import ARCHITECTURES, model_family
from mlsys_orca.model.rope import llama3_divisors

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


def test_a_mistral_slides_a_window_over_every_layer() -> None:
    read = model_family("mistral").from_huggingface
    raw = RAW | {"num_key_value_heads": 4, "max_position_embeddings": 32768}
    assert read(raw | {"sliding_window": 100}).windows == (100, 100)
    assert read(raw).windows == (4096, 4096)  # what the family's own default is
    assert read(raw | {"sliding_window": None}).windows is None
    assert read(raw).max_positions == 32768


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, None),
        ({"sliding_window": 8}, None),  # stated, and switched off
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
    ],
)
def test_a_qwen_slides_its_window_where_its_layers_say(changes: dict[str, Any], windows: Any) -> None:
    assert model_family("qwen2").from_huggingface(RAW | changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "type 'chunked_attention'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding_window"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "do not fit 2 layers"),
        ({"use_bidirectional_attention": True}, "later tokens"),
    ],
)
def test_layers_that_attend_otherwise_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model_family("qwen2").from_huggingface(RAW | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "vocab_size": "many"}, "lacks hidden_size, vocab_size"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"quantization_config": "int4"}, "quantised"),
        ({"add_cross_attention": True}, "attention over an encoder's states"),
        ({"is_causal": False}, r"attention to later tokens \(is_causal\)"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"rope_scaling": {"rope_type": "xpos", "factor": 4.0}}, "'xpos'.*default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' needs 8 factors"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_unimplemented_options_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
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
        read = model_family("llama").from_gguf
        assert read is not None
        fields = GgufFields(metadata=metadata | changes, architecture="llama", tensor_names=names, **options)
        return read(fields).rope_divisors

    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert divisors({}) is None
    assert divisors(linear) == (4.0,) * 8
    assert divisors({}, rope_divisors=(2.0,) * 8) == (2.0,) * 8
    assert divisors(linear, rope_divisors=(2.0,) * 8) == (8.0,) * 8


def test_every_architecture_has_its_class() -> None:
    assert all(model_family(name) for name in ARCHITECTURES)
    with pytest.raises(InvalidInputError, match="'codegen' is not supported"):
        model_family("codegen")
