"""Tokenizers of directories as GGUF metadata: the kinds that it can name, and what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from mlsys_core.errors import InvalidInputError
from mlsys_gguf_tools.vocabulary import vocabulary_metadata
from mlsys_orca.loading.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from mlsys_orca.text.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def byte_level(
    *, split: str | None, digits: bool = False, behavior: str = "isolated", whole: bool = False
) -> tokenizers.Tokenizer:
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("1", "2"), ("Ċ", "Ċ"), ("l", "l")]
    vocab = {token: i for i, token in enumerate([*LETTERS, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split), behavior=behavior))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return backend


def pieces(*, prefix: bool) -> tokenizers.Tokenizer:
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("▁", "▁")]
    letters = ["▁", *map(chr, range(33, 127))]
    tokens = [*PIECES, *(letter for letter in letters if letter not in PIECES)]
    tokens += [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def written(backend: tokenizers.Tokenizer, *, eos: str = "<|end|>", **special: str) -> dict[str, Any]:
    roles = {"eos_token": eos} | special
    tokenizer = Tokenizer(backend, eos_ids=[backend.token_to_id(eos)], special_tokens=roles)
    size = backend.get_vocab_size() + 5
    return vocabulary_metadata(json.loads(backend.to_str()), tokenizer, vocab_size=size, template=None)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("smollm", lambda: byte_level(split=None, digits=True)),
        ("gpt-2", lambda: byte_level(split=None)),
        ("dbrx", lambda: byte_level(split=PRE_TOKENIZERS["dbrx"].splits[0])),
        ("tekken", lambda: byte_level(split=PRE_TOKENIZERS["tekken"].splits[0], whole=True)),
        ("llama-bpe", lambda: byte_level(split=PRE_TOKENIZERS["llama-bpe"].splits[0], whole=True)),
    ],
)
def test_the_way_a_byte_level_vocabulary_cuts_text_is_found(name: str, make: Callable[[], Any]) -> None:
    found = written(make())
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == name
    assert found["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    assert found["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepieces_vocabulary_keeps_its_bytes_marks_and_order(prefix: bool) -> None:
    backend = pieces(prefix=prefix)
    found = written(backend, eos="</s>", bos_token="<s>", unk_token="<unk>")
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is prefix
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    read = tokenizer_from_gguf(found)
    assert read.encode("tell the\nü", add_bos=True) == backend.encode("tell the\nü").ids


def test_a_vocabulary_that_cuts_text_in_no_known_way_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no kind of tokenizer"):
        written(byte_level(split=r"\p{L}", behavior="removed"))
    other = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<|end|>": 1}, "a"))
    with pytest.raises(InvalidInputError, match="WordLevel"):
        written(other)
