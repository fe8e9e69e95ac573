"""Unigram vocabularies in GGUF files, against the same vocabulary as SentencePiece's own rules spell it."""

from __future__ import annotations

from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.gguf_tokenizer import tokenizer_from_gguf

PIECES = {
    "<pad>": (0.0, 3),
    "</s>": (0.0, 3),
    "<unk>": (0.0, 2),
    "▁": (-3.0, 1),
    "a": (-4.0, 1),
    "b": (-4.0, 1),
    "▁ab": (-4.5, 1),
    "ab": (-6.0, 1),
    "ba": (-7.5, 1),
    "<extra_id_0>": (-1000.0, 4),
    "[PAD10]": (-10000.0, 5),
}


def fields(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "t5",
        "pre": "default",
        "tokens": list(PIECES),
        "scores": [score for score, _ in PIECES.values()],
        "token_type": [kind for _, kind in PIECES.values()],
        "eos_token_id": 1,
        "unknown_token_id": 2,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items() if value is not None}


def spelled(text: str, **changes: Any) -> list[str]:
    tokens = list(PIECES)
    return [tokens[token_id] for token_id in tokenizer_from_gguf(fields(**changes)).encode(text, add_bos=True)]


def test_the_likeliest_pieces_are_taken_and_the_text_ends_with_its_mark() -> None:
    # "▁ab" -4.5 before "▁" + "ab" -9; "ba" -7.5 before "b" + "a" -8.
    assert spelled("ab ba") == ["▁ab", "▁", "ba", "</s>"]
    assert spelled("  ab   ab ") == ["▁ab", "▁ab", "</s>"]
    assert spelled("") == ["</s>"]


def test_options_of_the_file_are_obeyed() -> None:
    assert spelled("ab", add_space_prefix=False) == ["ab", "</s>"]
    assert spelled("ab", add_eos_token=False) == ["▁ab"]
    assert spelled("ab  ab", remove_extra_whitespaces=False) == ["▁ab", "▁", "▁ab", "</s>"]


def test_unknown_characters_and_texts_of_control_tokens() -> None:
    assert spelled("ac") == ["▁", "a", "<unk>", "</s>"]
    assert "</s>" not in spelled("</s>")[:-1]  # text from outside forges no end
    assert "<extra_id_0>" in spelled("a <extra_id_0> b")


def test_text_comes_back() -> None:
    tokenizer = tokenizer_from_gguf(fields())
    assert tokenizer.decode([0, *tokenizer.encode("ab ba a", add_bos=True)]) == "ab ba a"
    assert tokenizer.eos_ids == {1}


@pytest.mark.parametrize(
    "changes", [{"scores": [0.0]}, {"token_type": None}, {"unknown_token_id": 99}, {"precompiled_charsmap": [1, 2, 3]}]
)
def test_damage_is_said(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="vocabulary"):
        tokenizer_from_gguf(fields(**changes))
