"""SentencePiece vocabularies whose pieces are joined, against the algorithm written out plainly."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import tokenizers
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.gguf_tokenizer import tokenizer_from_gguf
from mlsys_orca.text.tokenizer import Detokenizer, Tokenizer
from tokenizers import models, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = """The quick brown fox jumps over the lazy dog. The the then there these they   them\n\n
def f(x):\n    return [i ** 2 for i in range(x)]\n\tprint("don't", 12345, 3.14)  # comment
naïve café Ångström straße — Привет, мир! 日本語のテキスト
<html><b>bold</b></html> https://example.org/a?b=c&d=e 100% e.g. etc.... aaaaaaaa bbbb
"""
TEXTS = [
    "",
    " ",
    "   ",
    "hello",
    " hello",
    "  hello  world ",
    "The quick brown fox",
    "don't we'll I'VE they'd",
    "tabs\tand\nlines\n\n\r\n end  ",
    "naïve café Ångström straße",
    "Привет, мир! Γειά σου Κόσμε",
    "日本語のテキスト 中文文本 한국어",
    "مرحبا بالعالم שלום नमस्ते ไทย",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ☃️",
    "e\u0301 a\u0308 zero\u200bwidth \u00a0nbsp \u3000ideographic",
    "\x00\x07\x7f\ufeff\ufffd",
    "▁ is not a space ▁▁",
    "a" * 61,
    "def f(x):\n\treturn [i**2 for i in range(x)]  # comment\n",
    "</s> <s>[INST] <unk> <0x0A>",
]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Return the vocabulary of a SentencePiece file of the corpus: control tokens, bytes, then pieces by rank."""
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)  # type: ignore[call-arg]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.train_from_iterator([CORPUS.replace(" ", "▁")] * 3, trainer)
    learnt = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda entry: entry[1])]
    learnt = sorted(learnt, key=lambda piece: len(piece) == 1)  # as SentencePiece: characters last
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>", *learnt]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(learnt)]
    return tokens, [0.0] * 260 + [-float(rank) for rank in range(len(learnt))], types


TOKENS, SCORES, TYPES = vocabulary()


def fields(**changes: Any) -> dict[str, Any]:
    base = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": TYPES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items() if value is not None}


def join_pieces(text: str, *, prefix: bool = True) -> list[int]:
    """The algorithm: of all neighbours join the two whose joint piece scores highest, the leftmost of equals."""
    ids = {token: token_id for token_id, token in enumerate(TOKENS) if TYPES[token_id] == NORMAL}
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while joints := [(SCORES[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
        i = -max(joints)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(fields())


def random_texts() -> list[str]:
    random = Random(4)
    words = [*CORPUS.split(" "), " ", "  ", "\n", "é", "語", "😀", "aa", "the"]
    return ["".join(random.choices([*words, " "], k=random.randrange(1, 30))) for _ in range(100)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_becomes_the_pieces_of_the_algorithm_and_itself_again(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == join_pieces(text)
    assert tokenizer.decode(ids) == text.replace("▁", " ")  # which it cannot tell apart
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == text.replace("▁", " ")


def test_texts_at_random(tokenizer: Tokenizer) -> None:
    for text in random_texts():
        assert tokenizer.encode(text) == join_pieces(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_space_is_put_before_where_the_file_says_so() -> None:
    bare = tokenizer_from_gguf(fields(add_space_prefix=False))
    for text in [*TEXTS, *random_texts()]:
        assert bare.encode(text) == join_pieces(text, prefix=False)
        assert bare.decode(bare.encode(text)) == text.replace("▁", " ")


def test_control_tokens_are_tokens_when_allowed_and_text_otherwise(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("</s>hi", allow_special=True) == [2, *join_pieces("hi")]
    assert 2 not in tokenizer.encode("</s>hi")
    assert tokenizer.encode("hi<tool>hi") == [*join_pieces("hi"), TOKENS.index("<tool>"), *join_pieces("hi")]
    assert tokenizer.encode("hi", add_bos=True) == [1, *join_pieces("hi")]
    assert tokenizer_from_gguf(fields(add_bos_token=False)).encode("hi", add_bos=True) == join_pieces("hi")
    assert tokenizer_from_gguf(fields(add_eos_token=True)).encode("hi", add_bos=True) == [1, *join_pieces("hi"), 2]
    assert tokenizer.eos_ids == {2}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.decode([1, *join_pieces("hi"), 2]) == "hi"


def test_bytes_that_are_no_character_are_replaced(tokenizer: Tokenizer) -> None:
    emoji = tokenizer.encode("😀")
    assert len(emoji) > 4
    assert tokenizer.decode(emoji[:-1]).count("\ufffd") == 3
    stream = Detokenizer(tokenizer)
    assert [stream.push(token_id) for token_id in emoji][-3:] == ["", "", "😀"]


def test_without_bytes_what_is_in_no_piece_is_unknown() -> None:
    kept = [i for i, kind in enumerate(TYPES) if kind != BYTE]
    parts = {"tokens": TOKENS, "scores": SCORES, "token_type": TYPES}
    fewer = tokenizer_from_gguf(fields(**{name: [part[i] for i in kept] for name, part in parts.items()}))
    assert fewer.encode("😀😀")[-1] == 0
    assert fewer.encode("😀😀").count(0) == 1  # in a row they are one


def test_transformers_makes_the_same_of_the_same_merges(tokenizer: Tokenizer) -> None:
    """Its Llama tokenizer, as directories have it, over merges of the pieces in the order they were learnt."""
    import transformers

    vocab = {token: token_id for token_id, token in enumerate(TOKENS)}
    plain = {token for token, kind in zip(TOKENS, TYPES, strict=True) if kind == NORMAL}
    ranked = sorted(plain, key=lambda token: -SCORES[vocab[token]])
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    for text in [*TEXTS[:-1], *random_texts()]:
        ids = theirs.encode(text, add_special_tokens=False)
        if "▁" not in text and not text.startswith(" "):  # a space is put before those only where none is
            assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"\d+ tokens, 0 scores"),
        ({"token_type": [1]}, r"\d+ scores, 1 token types"),
        ({"tokens": None}, "0 tokens"),
        ({"model": "bert"}, "kind 'bert'.*'llama', 't5'"),
    ],
    ids=["scores", "types", "tokens", "kind"],
)
def test_incomplete_and_unknown_input_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tokenizer_from_gguf(fields(**changes))
