"""Texts and positions of an answer's tokens: together they are the answer."""

from __future__ import annotations

import pytest
import tokenizers
from mlsys_orca.api.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.text.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers

from tests.orca.conftest import byte_alphabet

TEXT = "the cat cats 日é"


def sentencepiece() -> Tokenizer:
    """Words after a space, bytes for the rest, as Llama 2's; a text's first space is dropped."""
    pieces = [("<unk>", 0), ("<s>", 0), *((f"<0x{byte:02X}>", -10) for byte in range(256))]
    pieces += [("▁the", -1), ("▁cat", -1), ("cat", -1), ("▁", -2), ("s", -3), ("é", -3)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(fused)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, eos_ids=[])


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(byte_alphabet())}, []))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens(["naïve"])
    return Tokenizer(backend, eos_ids=[])


def sampled(ids: list[int]) -> list[SampledToken]:
    return [SampledToken("", token_id, -0.5) for token_id in ids]


@pytest.mark.parametrize("tokenizer", [sentencepiece(), byte_level()], ids=["sentencepiece", "bytes"])
def test_tokens_joined_are_the_text_and_begin_where_their_positions_say(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    tokens = sampled(ids)
    assert (
        b"".join(bytes(each.bytes or ()) for each in chat_logprobs(tokens, tokenizer).content).decode().strip() == TEXT
    )
    found = completion_logprobs(tokens, tokenizer, TextOffsets(tokenizer).of(ids))
    whole = [(at, text) for at, text in zip(found.text_offset, found.tokens, strict=True) if text[:6] != "bytes:"]
    assert all(TEXT[max(0, at) :].startswith(text if at else text.lstrip()) for at, text in whole)
    assert [text for text in found.tokens if text[:6] == "bytes:"][:3] == [r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5"]
    streamed = TextOffsets(tokenizer)
    whole_answer = TextOffsets(tokenizer).of(ids)
    assert [at for token_id in ids for at in streamed.of([token_id])] == whole_answer


def test_tokens_that_differ_in_a_space_or_a_byte_stay_apart_among_the_likeliest() -> None:
    tokenizer = sentencepiece()
    spaced, bare = (tokenizer.token_id(piece) or 0 for piece in ("▁cat", "cat"))
    parts = [tokenizer.token_id("<0xE6>") or 0, tokenizer.token_id("<0xE7>") or 0]
    best = ((bare, -1.5), (parts[0], -3.0), (parts[1], -4.0))
    found = completion_logprobs([SampledToken("", spaced, -0.5, best)], tokenizer, [0])
    assert found.top_logprobs == [{" cat": -0.5, "cat": -1.5, r"bytes:\xe6": -3.0, r"bytes:\xe7": -4.0}]


def test_control_tokens_that_the_text_leaves_out_take_no_place_in_it() -> None:
    tokenizer = sentencepiece()
    prompt_ids = [tokenizer.token_id("▁the") or 0]
    ids = [1, tokenizer.token_id("▁cat") or 0, 1, tokenizer.token_id("s") or 0]
    assert TextOffsets(tokenizer, prompt_ids=prompt_ids).of(ids) == [0, 0, 4, 4]
    assert TextOffsets(tokenizer, prompt_ids=prompt_ids, skip_special=False).of(ids) == [0, 3, 7, 10]


def test_added_tokens_are_spelt_as_they_are() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_text(tokenizer.encode("naïve")[0]) == "naïve"
