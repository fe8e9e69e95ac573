"""Random answers of five tokenizers, cut anywhere: the pieces joined are what decoding all tokens at once gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import tokenizers
from mlsys_orca.text.tokenizer import Detokenizer, Tokenizer, prompt_text
from tokenizers import decoders, models

from tests.orca.conftest import byte_alphabet

WORDS = ["the", "▁cat", "▁", "▁▁", "世界", "é", "\ufffd", "!", "▁naïve", "🙂"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["世", "🙂", "é", "\u0301", "\ufffd", "a", "👩‍👩‍👧"]


def _tokenizer(pieces: Sequence[str], decoder: decoders.Decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], 0))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "<|end|>"])
    backend.add_tokens(["<think>"])
    return Tokenizer(backend, eos_ids=())


def _byte_level(pieces: Sequence[bytes]) -> Tokenizer:
    alphabet = byte_alphabet()
    spelt = ["".join(alphabet[byte] for byte in piece) for piece in pieces]
    return _tokenizer([*alphabet, *dict.fromkeys(each for each in spelt if len(each) > 1)], decoders.ByteLevel())


def _strip() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _metaspace() -> decoders.Decoder:
    return decoders.Metaspace(replacement="▁", prepend_scheme="always")


def build() -> dict[str, Tokenizer]:
    """Return the tokenizers by kind."""
    words = [word.replace("▁", " ").encode() for word in WORDS]
    within = [b"\x96\xe4\xb8", b"\x80\xe4", b"a\xf0\x9f", b"\x99\x82", b"\xff\xc3", b"\xa9b", b"\xe4"]
    return {
        "byte level": _byte_level(words),  # GPT-2, Qwen
        "byte level within characters": _byte_level([*words, *within]),  # Llama 3, tekken
        "byte fallback, strip": _tokenizer([*BYTES, *WORDS], _strip()),  # Llama 2, Mistral, Gemma
        "byte fallback, metaspace": _tokenizer(  # T5 with bytes, from GGUF
            [*BYTES, *WORDS], decoders.Sequence([decoders.ByteFallback(), _metaspace()])
        ),
        "metaspace": _tokenizer(WORDS, _metaspace()),  # T5
    }


def draw(rng: random.Random, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield ids: any, runs of few (bytes above all), and texts as bytes that are cut, repeated or damaged."""
    raw = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    few = rng.sample(range(tokenizer.vocab_size), 3)
    for _ in range(rng.randint(1, 6)):
        kind = rng.randrange(4)
        if kind == 0:
            yield from (rng.randrange(-0, tokenizer.vocab_size + 2) for _ in range(rng.randint(1, 6)))
        elif kind == 1:
            yield from rng.choices(few, k=rng.randint(1, 12))
        else:
            text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 4))).encode()
            damaged = [byte for byte in text if kind == 2 or rng.random() < 0.8]
            yield from (raw[bytes([byte])] for byte in damaged if bytes([byte]) in raw)


def is_extended(begun: str, whole: str) -> bool:
    """Return whether ``whole`` keeps each complete character of ``begun``: only U+FFFD at its end may change."""
    return whole.startswith(begun.rstrip("\ufffd"))


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special=skip_special)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def fault(rng: random.Random, tokenizer: Tokenizer) -> str | None:
    """Draw a prompt, its answer and options; return what is wrong with the answer's text, or None."""
    ids = list(draw(rng, tokenizer))
    cut, skips = rng.randint(0, len(ids)), rng.random() < 0.5
    counting = Counting(tokenizer)
    begin = prompt_text(tokenizer, ids[:cut], skip_special=skips) if skips else ""
    detokenizer = Detokenizer(counting, prompt_ids=ids[:cut], skip_special=skips)  # type: ignore[arg-type]
    if not skips:
        text = tokenizer.decode(ids[:cut], skip_special=False)
        begin = text[: len(text) - detokenizer.num_held]
    pieces = [detokenizer.push(token_id) for token_id in ids[cut:]]
    held = detokenizer.num_held
    pieces.append(detokenizer.flush())
    whole = tokenizer.decode(ids, skip_special=skips)
    if begin + "".join(pieces) != whole:
        return f"{ids} cut at {cut}, {skips=}: {begin!r} + {pieces} is not {whole!r}"
    if held > 3 or detokenizer.flush():
        return f"{ids}: {held} characters are held"
    if counting.num_decoded > 40 * (len(ids) - cut + 1):
        return f"{ids} cut at {cut}: {counting.num_decoded} tokens were decoded"
    if not is_extended(tokenizer.decode(ids[:cut], skip_special=skips), whole):
        return f"{ids} cut at {cut}: complete characters were lost"
    return None
