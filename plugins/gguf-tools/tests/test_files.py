"""``mlsys orca quantize`` of every family: the file computes what the directory does, and has its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_gguf_tools.cli import app
from mlsys_gguf_tools.writing import plan, write
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.weights.gguf_file import GgufFile
from typer.testing import CliRunner

from tests.conformance.orca.families import CASES, LLAMA3, SHAPE, VOCAB, Case, log_probabilities, write_checkpoint

PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate([20, 3, 33, 1])]
NUM_TOKENS = 300  # 256 bytes, some merges, control tokens, and rows of the table without a token
GEMMA = {"query_pre_attn_scalar": 32}  # the head's width, which GGUF takes for granted
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
WRITTEN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gpt2": {},
    "qwen3": {},
    "phi3": {},
    "phi3-partial": {},
    "phi3-longrope-short": {},
    "mixtral": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "qwen2-moe": {"tie_word_embeddings": False},
    "qwen3-moe": {},
    "smollm3": {},
    "llama-yarn": {},
    "llama-dynamic": {},
    "gemma": {},
    "granite-tied": {"rope_parameters": LLAMA3},
    "olmo2": PLAIN_ROPE,
    "cohere": PLAIN_ROPE,
    "cohere2": {},
    "glm4": {},
    "mamba2": {},
    "mamba2-tied": {},
    "granite-hybrid": {},
    "granite-hybrid-dense": {},
    "qwen3-next": {"linear_key_head_dim": 20},
    "qwen3-5": {"linear_key_head_dim": 20},
    "qwen3-5-moe": {"linear_key_head_dim": 20},
}
REFUSED = {  # what a GGUF cannot say, or llama.cpp does not read
    "qwen2-moe": "head that is",
    "qwen3-biases": "biases of attention's output",
    "olmo2": "rotary scaling as a tensor",
    "cohere-norms": "norms of heads",
    "qwen2-tied-window": "windows",
    "gpt2-untied": "activation",
    "mistral-window": "windows",
    "gemma2": "attention_scale",
    "glm": "'glm' are not written",
    "gpt-oss": "'gpt_oss' are not written",
    "deepseek-v3": "'deepseek_v3' are not written",
    "qwen3-moe-of-all": "experts_sum_to_one",
    "qwen3-next": "values of another width than keys",
    "granite-hybrid-rotary": "rotated",
}


def write_tokenizer(path: Path) -> None:
    """A byte-level vocabulary with merges, an end of text and a turn's end."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("1", "2"), ("Ċ", "Ċ"), ("l", "l"), ("'", "s")]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    steps: list[Any] = [
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|turn|>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}<|turn|>"})
    )
    end, turn = (backend.token_to_id(token) for token in ("<|end|>", "<|turn|>"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn]}))


def write_directory(path: Path, name: str, changes: dict[str, Any]) -> Path:
    """A checkpoint with a tokenizer that a GGUF can have."""
    case = CASES[name]
    write_checkpoint(path, replace(case, config=case.config | {"vocab_size": NUM_TOKENS} | changes))
    write_tokenizer(path)
    return path


def quantize(path: Path, out: Path, kind: str) -> Path:
    write(plan(path, out, kind), out)
    return out


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_computes_as_the_directory(tmp_path: Path, name: str) -> None:
    path = write_directory(tmp_path, name, WRITTEN[name])
    given = load_model(path, dtype="fp32")
    read = load_model(quantize(path, tmp_path / "model.gguf", "F32"), dtype="fp32", weights="float")
    ours, theirs = (torch.cat(log_probabilities(loaded, PROMPTS)) for loaded in (read, given))
    assert theirs.std() > 0.3
    # Qwen3.5's heads stand, and are summed, in another order there.
    assert torch.allclose(ours, theirs, atol=2e-4 if name.startswith("qwen3-5") else 2e-5, rtol=0)
    assert read.tokenizer.encode("the 12\n\nshall's") == given.tokenizer.encode("the 12\n\nshall's")
    assert read.tokenizer.eos_ids == given.tokenizer.eos_ids
    assert len(read.tokenizer.eos_ids) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gguf_cannot_say_is_refused_before_work_starts(tmp_path: Path, name: str) -> None:
    path = write_directory(tmp_path, name, {})
    with pytest.raises(InvalidInputError, match=REFUSED[name]):
        plan(path, tmp_path / "model.gguf", "Q8_0")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_file_of_four_bits_from_a_directory_or_from_a_file_of_floats_is_the_same(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": NUM_TOKENS, "initializer_range": 0.05}
    wide = Case("Llama", SHAPE | shape)
    write_checkpoint(tmp_path, wide)
    write_tokenizer(tmp_path)
    direct = quantize(tmp_path, tmp_path / "direct.gguf", "Q4_K_M")
    again = quantize(quantize(tmp_path, tmp_path / "floats.gguf", "F32"), tmp_path / "again.gguf", "Q4_K_M")
    files = [GgufFile(path) for path in (direct, again)]
    assert files[0].metadata == files[1].metadata
    assert files[0].names == files[1].names
    kinds = set()
    for name in files[0].names:
        assert files[0].tensors[name].type == files[1].tensors[name].type
        assert (files[0].data(name) == files[1].data(name)).all()
        kinds.add(files[0].tensors[name].type.name)
    assert kinds == {"F32", "Q4_K", "Q6_K"}
    assert files[0].tensors["output.weight"].type.name == "Q6_K"
    assert files[0].metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    exact = torch.cat(log_probabilities(load_model(tmp_path, dtype="fp32"), PROMPTS))
    ours = torch.cat(log_probabilities(load_model(direct, dtype="fp32"), PROMPTS))
    assert torch.corrcoef(torch.stack((ours.flatten(), exact.flatten())))[0, 1] > 0.95
    template = load_model(direct, dtype="fp32").chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "the"}]) == "the<|turn|>"


def test_the_command_writes_a_file_and_refuses_in_one_line(tmp_path: Path) -> None:
    path, out = write_directory(tmp_path, "gpt2", {}), tmp_path / "out.gguf"

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [str(path), *arguments], catch_exceptions=False)

    done = run(str(out), "--type", "q8_0", "--threads", "1")
    assert done.exit_code == 0
    assert "bits each" in done.stdout
    assert GgufFile(out).tensors["blk.0.ffn_up.weight"].type.name == "Q8_0"
    before = out.read_bytes()
    for arguments, message in (
        ([str(out)], "exists"),
        ([str(tmp_path / "other.gguf"), "--type", "IQ1_S"], "IQ1_S"),
        ([str(tmp_path / "nowhere" / "other.gguf")], "is no place"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run(*arguments)
    with pytest.raises(InvalidInputError, match="not the model itself"):
        CliRunner().invoke(app, [str(out), str(out), "--overwrite"], catch_exceptions=False)
    assert out.read_bytes() == before
    assert run(str(out), "--type", "F16", "--overwrite").exit_code == 0
    assert GgufFile(out).tensors["blk.0.ffn_up.weight"].type.name == "F16"


def test_values_that_are_not_finite_leave_no_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_directory(tmp_path, "gpt2", {})
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"blk\.1\.ffn_up\.weight"):
        quantize(path, tmp_path / "out.gguf", "Q8_0")
    assert not [file for file in tmp_path.iterdir() if "out.gguf" in file.name]
