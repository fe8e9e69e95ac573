from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import default_dtype, load_model

Make = Callable[..., Path]


def test_a_gguf_file_comes_whole(make_gguf: Make) -> None:
    reads: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    loaded = load_model(make_gguf(), dtype="fp32", progress=lambda done, total: reads.append((done, total)))
    config = loaded.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 4, 2, 16)
    assert (config.vocab_size, config.max_positions, config.tied_embeddings) == (260, 128, True)
    assert loaded.name == "tiny"
    assert loaded.tokenizer.eos_ids == {1}
    assert loaded.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([{"role": "user", "content": "Hi"}]) == "<s>user\nHi</s>"
    assert loaded.model.dtype == torch.float32
    done = [read for read, _ in reads]
    assert done == sorted(done)
    assert reads[-1][0] == reads[-1][1] > 64 * 260
    assert torch.get_num_threads() == threads


def test_content_decides_not_the_name(make_gguf: Make, tmp_path: Path) -> None:
    odd = make_gguf().rename(tmp_path / "weights.bin")
    assert load_model(odd, dtype="bf16").model.dtype == torch.bfloat16
    alone = tmp_path / "directory"
    alone.mkdir()
    odd.rename(alone / "model.gguf")
    assert load_model(str(alone), dtype="fp32").name == "model"


def test_a_model_without_template_or_bos_loads(make_gguf: Make) -> None:
    assert load_model(make_gguf({"tokenizer.chat_template": None}), dtype="fp32").chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.expert_count": 8}, "lacks llama.expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "cannot pass 9 of 8 experts"),
        ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window = 16"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.rope.dimension_count": 8}, "part of a head"),
        ({"llama.attention.value_length": 8}, "another width"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3"),
        ({"llama.attention.head_count_kv": [2, 1]}, "from layer to layer"),
        ({"llama.feed_forward_length": 128}, "shape.*96.*configuration implies.*128"),
        ({"llama.block_count": 3}, "no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 1}, "does not use: blk.1"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of' is not known"),
        ({"tokenizer.chat_template": "{% if %}"}, "cannot be parsed"),
        ({"split.count": 2}, "--merge"),
    ],
)
def test_a_tokenizer_that_gives_wrong_text_is_refused(make_gguf: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_model(make_gguf(changes), dtype="fp32")


def test_other_architectures_are_refused_with_those_supported(make_gguf: Make) -> None:
    with pytest.raises(InvalidInputError, match=r"'rwkv6' is not supported; supported are .*llama, .*mistral"):
        load_model(make_gguf(architecture="rwkv6"))


def test_a_bias_nobody_reads_is_refused(make_gguf: Make, weights: dict[str, np.ndarray]) -> None:
    with pytest.raises(InvalidInputError, match=r"does not use: blk.0.attn_norm.bias"):
        load_model(make_gguf(tensors=weights | {"blk.0.attn_norm.bias": np.zeros(64, np.float32)}))


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(InvalidInputError, match="of GGUF files none"):
        load_model(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"no model")
    with pytest.raises(InvalidInputError, match="not a GGUF file"):
        load_model(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"no model")
    with pytest.raises(InvalidInputError, match=r"a\.gguf, b\.gguf"):
        load_model(tmp_path)


def test_options_are_refused_by_name(make_gguf: Make) -> None:
    with pytest.raises(InvalidInputError, match="fp32, bf16"):
        load_model(make_gguf(), dtype="fp8")
    with pytest.raises(InvalidInputError, match="'warp:3'"):
        load_model(make_gguf(), device="warp:3")
    with pytest.raises(InvalidInputError, match="0 threads"):
        load_model(make_gguf(), num_threads=0)


def test_the_default_dtype_is_native_to_the_cpu() -> None:
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    assert default_dtype("cpu") == ("bf16" if native else "fp32")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_files_load_as_their_dequantised_values(
    make_gguf: Make, weights: dict[str, np.ndarray], kind: gguf.GGMLQuantizationType
) -> None:
    quantised = load_model(make_gguf(kind=kind), dtype="fp32", backend="torch").model
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if values.ndim == 2 else values
        for name, values in weights.items()
    }
    plain = load_model(make_gguf(tensors=rounded), dtype="fp32", backend="torch").model
    for ours, theirs in zip(quantised.buffers(), plain.buffers(), strict=True):  # type: ignore[attr-defined]
        if not ours.is_mkldnn:
            assert torch.equal(ours, theirs)
