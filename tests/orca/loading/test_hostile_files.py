"""Model files that mean harm, or are damaged: one line each, in bounded time and memory, and no code of theirs runs."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder
from mlsys_orca.model.limits import check_numbers
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 7,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def write_directory(path: Path, changes: dict[str, Any] | None = None, **files: str | bytes) -> Path:
    """A tiny Llama in Hugging Face's layout."""
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | (changes or {})).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate("abcdefg")}, unk_token="a"))
    backend.save(str(path / "tokenizer.json"))
    save_file(tensors(), path / "model.safetensors")
    for name, content in files.items():
        where = path / name.replace("__", ".")
        if isinstance(content, bytes):
            where.write_bytes(content)
        else:
            where.write_text(content)
    return path


def tensors() -> dict[str, torch.Tensor]:
    stem = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (7, 32),
        "model.norm.weight": (32,),
        f"{stem}.input_layernorm.weight": (32,),
        f"{stem}.post_attention_layernorm.weight": (32,),
        f"{stem}.self_attn.q_proj.weight": (32, 32),
        f"{stem}.self_attn.k_proj.weight": (16, 32),
        f"{stem}.self_attn.v_proj.weight": (16, 32),
        f"{stem}.self_attn.o_proj.weight": (32, 32),
        f"{stem}.mlp.gate_proj.weight": (48, 32),
        f"{stem}.mlp.up_proj.weight": (48, 32),
        f"{stem}.mlp.down_proj.weight": (32, 48),
    }
    return {name: torch.ones(shape) * 0.01 for name, shape in shapes.items()}


def test_the_directory_that_the_others_damage_loads(tmp_path: Path) -> None:
    assert load_model(write_directory(tmp_path), backend="torch").config.num_layers == 1


NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
NUMBERS += ("intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta")
IMPOSSIBLE = (0, -1, "1", [1], {"a": 1}, math.nan, math.inf, 1e300, 1 << 60, 10**400)


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in NUMBERS for value in IMPOSSIBLE),
        {"num_hidden_layers": 10_000_000},
        {"num_hidden_layers": 1.5},
        {"num_hidden_layers": 2000},  # more than the file has weights for
        {"num_key_value_heads": 3},
        {"hidden_size": 1 << 22},
        {"vocab_size": 1 << 24},
        {"rms_norm_eps": None},
        {"rope_theta": 1.0},
        {"rope_scaling": "linear"},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "linear", "factor": math.nan}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [math.nan] * 8, "short_factor": [math.nan] * 8}},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": ["a"] * 8, "short_factor": ["a"] * 8}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"rope_scaling": {"rope_type": {"a": 1}}},
        {"partial_rotary_factor": 0.0},
        {"hidden_act": ["silu"]},
        {"hidden_act": {"silu": 1}},
        {"model_type": 5},
        {"model_type": "../../llama"},
        {"model_type": ["llama"]},
        {"model_type": "mistral", "sliding_window": -4},
        {"model_type": "qwen2", "layer_types": [["full_attention"]]},
        {"model_type": "qwen2", "layer_types": 7},
        {"model_type": "gemma2", "query_pre_attn_scalar": 0},
        {"model_type": "mixtral", "num_local_experts": 10**9, "num_experts_per_tok": 2},
        {"model_type": "phi3", "original_max_position_embeddings": 0},
        {"text_config": {"model_type": "llama"}, "model_type": "gemma3"},
    ],
    ids=lambda changes: json.dumps(changes)[:70],
)
def test_a_configuration_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], refused
) -> None:
    path = write_directory(tmp_path / "model", changes)
    refused(lambda: load_model(path, backend="torch"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config__json", "[" * 100_000),
        ("config__json", '{"a":' * 100_000),
        ("config__json", '{"a": ' + "9" * 10_000 + "}"),
        ("config__json", b"\xff\xfe"),
        ("config__json", ""),
        ("config__json", "[]"),
        ("config__json", '{"model_type": "llama", "model_type": "gpt2"}'),
        ("generation_config__json", '{"eos_token_id": ' + "[" * 100_000),
        ("tokenizer_config__json", "[" * 100_000),
        ("tokenizer_config__json", '{"chat_template": "{{ "}'),
        ("tokenizer_config__json", json.dumps({"chat_template": "{% for x in y %}" * 3000})),
        ("tokenizer_config__json", '{"eos_token": [1, 2]}'),
        ("chat_template__jinja", b"\xff\xfe"),
        ("tokenizer__json", "{}"),
        ("tokenizer__json", "[" * 100_000),
        ("tokenizer__json", json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}})),
        ("model__safetensors", b""),
        ("model__safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
        ("model__safetensors", struct.pack("<Q", 2) + b"{}"),
        ("model__safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000),
        ("model__safetensors", pickle.dumps({"a": 1})),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_directory_is_named_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, refused
) -> None:
    path = write_directory(tmp_path / "model", **{name: content})
    refused(lambda: load_model(path, backend="torch"))


def header(**entry: Any) -> bytes:
    text = json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        header(a={"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}),
        header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}) + b"\0" * 4,
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}) + b"\0" * 4,
        header(**{key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for key in "ab"}) + b"\0" * 4,
        header(a={"dtype": "X", "shape": [1], "data_offsets": [0, 4]}) + b"\0" * 4,
        header(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}) + b"\0" * 4,
    ],
)  # fmt: skip
def test_safetensors_that_lie_are_refused(tmp_path: Path, content: bytes, refused) -> None:
    path = write_directory(tmp_path / "model", model__safetensors=content)
    refused(lambda: load_model(path, backend="torch"))


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../../../../etc/passwd"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "."}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "sub/x.safetensors"}},
        {"weight_map": {"a": "\0"}},
        {"weight_map": {"a": "absent.safetensors"}},
        {"weight_map": {"a": 5}},
        {"weight_map": ["a"]},
        {"weight_map": None},
        {},
        {"weight_map": {"no.such.tensor": "model.safetensors"}},
        {"weight_map": {"model.norm.weight": "model.safetensors", "b": "copy.safetensors"}},
    ],
)
def test_an_index_leads_to_shards_of_its_directory_alone(tmp_path: Path, index: dict[str, Any], refused) -> None:
    path = write_directory(tmp_path / "model")
    (path / "copy.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: SafetensorsDirectory(path))


class Bomb:
    """Whoever unpickles it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def bomb(mark: Path) -> bytes:
    data: bytes = pickle.dumps({"model.norm.weight": Bomb(mark)})
    pickle.loads(data)
    assert mark.exists()
    mark.unlink()
    return data


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "tokenizer.json", "x.gguf", "model.pt"])
@pytest.mark.parametrize("model_type", ["llama", "olmo", "bert"])
def test_no_loader_unpickles(tmp_path: Path, name: str, model_type: str, refused) -> None:
    mark, path = tmp_path / "mark", write_directory(tmp_path / "model", {"model_type": model_type})
    planted = bomb(mark)
    if name in ("pytorch_model.bin", "model.pt", "x.gguf"):
        (path / "model.safetensors").unlink()
    (path / name).write_bytes(planted)
    torch.save({"model.norm.weight": Bomb(mark)}, path / "training_args.bin")
    refused(lambda: load_model(path, backend="torch"))
    if name.endswith(".gguf"):
        refused(lambda: load_model(path / name, backend="torch"))
    assert not mark.exists()


def test_no_adapter_is_unpickled(tmp_path: Path, make_gguf: Callable[..., Path], refused) -> None:
    mark, path = tmp_path / "mark", tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 4}))
    (path / "adapter_model.bin").write_bytes(bomb(mark))
    decoder = load_model(make_gguf(), backend="torch").model
    refused(lambda: AdaptedDecoder(decoder, {"a": path}))
    (path / "adapter_model.safetensors").write_bytes(bomb(mark))
    refused(lambda: AdaptedDecoder(decoder, {"a": path}))
    for alpha in ("NaN", "1e999", '"x"', "null", "[" * 100_000):
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": ' + alpha + "}")
        refused(lambda: AdaptedDecoder(decoder, {"a": path}))
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["mine", "olmo", "llama"])
def test_code_in_a_directory_is_never_run(tmp_path: Path, model_type: str) -> None:
    mark = tmp_path / "mark"
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    path = write_directory(
        tmp_path / "model",
        {"model_type": model_type, "auto_map": auto_map, "custom_pipelines": {"x": {"impl": "code.Model"}}},
        tokenizer_config__json=json.dumps({"auto_map": auto_map, "tokenizer_class": "T"}),
        code__py=f"import pathlib; pathlib.Path({str(mark)!r}).touch()",
    )
    try:
        load_model(path, backend="torch")
    except InvalidInputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - whether it loads or not, nothing runs
    assert not mark.exists()


def test_an_encoder_is_no_language_model(tmp_path: Path, refused) -> None:
    path = write_directory(tmp_path / "model", {"model_type": "bert"})
    assert "writes no text; for embeddings install mlsys-encoders" in refused(lambda: load_model(path))


def test_a_panic_in_a_librarys_compiled_part_is_an_error_about_the_file(refused) -> None:
    class PanicException(BaseException):
        pass

    for raised in (
        PanicException("called `Option::unwrap()`\nsecond line"),
        RecursionError(),
        MemoryError(),
        KeyError(1),
    ):
        assert "x.json" in refused(lambda raised=raised: raising("x.json", raised))
    with pytest.raises(KeyboardInterrupt):
        raising("x.json", KeyboardInterrupt())


def raising(path: str, error: BaseException) -> None:
    with readable(path):
        raise error


def test_limits_are_above_all_real_models() -> None:
    check_numbers({"num_hidden_layers": 126, "hidden_size": 16384, "vocab_size": 262_144, "rope_theta": 1e9})
    check_numbers({"max_position_embeddings": 10_485_760, "num_attention_heads": 128, "layer_norm_eps": 1e-12})
    with pytest.raises(InvalidInputError, match="bits"):
        check_numbers({"anything": 10**400})
    for name in ("embedding_multiplier", "logits_scaling", "logit_scale", "attention.scale", "ssm.inner_size"):
        with pytest.raises(InvalidInputError, match=name):
            check_numbers({name: "x"})


def test_hostile_directories_take_bounded_memory_and_processor_time(tmp_path: Path, cost_of_loading) -> None:
    hostile = [
        {"num_hidden_layers": 10_000_000},
        {"hidden_size": 1 << 22},
        {"vocab_size": 1 << 24},
        {"head_dim": 1 << 16},
    ]
    paths = [write_directory(tmp_path / f"model{index}", changes) for index, changes in enumerate(hostile)]
    paths.append(write_directory(tmp_path / "deep", config__json="[" * 1_000_000))
    seconds, mib = cost_of_loading(paths)
    assert seconds < 1
    assert mib < 100
