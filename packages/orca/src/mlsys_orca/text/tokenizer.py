"""Tokenisation: text to token ids and back.

Built by the loaders (from a GGUF file's vocabulary or a directory's ``tokenizer.json``); used by the front, which
encodes prompts, and by each client's stream, which turns tokens to text as they come through a :class:`Detokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice

import tokenizers
from mlsys_core.errors import InvalidInputError

_UNTYPED = "\uf8ff"  # a character for private use: a piece that begins with it is found in no text
REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no complete character
LEAST_MAX_CHARS = 65_536  # a text of fewer is always tokenised: characters no vocabulary has may share one token
_LONG = 4096  # characters or tokens from which on the backend's batch calls are taken: they leave Python's lock


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character that byte-level vocabularies spell bytes with (as published with GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A vocabulary with its rules. Thread-safe.

    Args:
        backend: The ``tokenizers`` object; its added special tokens are the model's control tokens.
        eos_ids: Tokens that end a generation.
        special_tokens: Texts by role, as chat templates name them (``bos_token``, ``eos_token``, ...).

    Example:
        >>> tokenizer = load_model("model.gguf").tokenizer  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello"))  # doctest: +SKIP
        'Hello'
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: Iterable[int], special_tokens: dict[str, str] | None = None
    ) -> None:
        self._backend = backend
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens = dict(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones among them."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: no text of more than that many times n characters has n tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def warm_up(self) -> None:
        """Build what the first requests would otherwise wait for."""
        _ = self.max_token_chars, self.control_ids, self._byte_tokens, self._plain

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The special tokens' ids by text; what :meth:`encode` finds only with ``allow_special``."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The special tokens' ids."""
        return frozenset(self.control_tokens.values())

    @cached_property
    def _added(self) -> frozenset[str]:
        """Added tokens, special or not: they are spelt as they are, not in the vocabulary's alphabet of bytes."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same rules, but the text of control tokens is text (a switch of the backend, so a backend of its own)."""
        plain = tokenizers.Tokenizer(self._model_for_text())
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(plain, part, getattr(self._backend, part))
        # In order, since tokens beyond the model's vocabulary are numbered as they come.
        added = sorted(self._backend.get_added_tokens_decoder().items())
        plain.add_tokens([token for _, token in added if not (token.special and token.content in self._hidden)])
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _hidden(self) -> frozenset[str]:
        """Control tokens that a Unigram model would find in any text, since they are among its pieces."""
        model = self._backend.model
        if not isinstance(model, tokenizers.models.Unigram):
            return frozenset()
        return frozenset(text for text in self.control_tokens if model.token_to_id(text) is not None)

    def _model_for_text(self) -> tokenizers.models.Model:
        model: tokenizers.models.Model = self._backend.model
        if not self._hidden:
            return model
        state = json.loads(self._backend.to_str())["model"]
        pieces = [(_UNTYPED + piece if piece in self._hidden else piece, score) for piece, score in state["vocab"]]
        return tokenizers.models.Unigram(pieces, state["unk_id"], state.get("byte_fallback", False))

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: Any text.
            allow_special: Read the text of a control token (``<|im_end|>``) as that token. Leave False for text from
                outside, which could otherwise forge turns; True for what a template rendered.
            add_bos: Add what the model's file says goes around a bare prompt, if anything: a mark before it, or one
                after it (T5). A rendered chat has it already.

        Raises:
            InvalidInputError: ``text`` holds a lone surrogate, so it is no Unicode text.
        """
        try:
            backend = self._backend if allow_special else self._plain
            return _encoding(backend, text, add_special_tokens=add_bos).ids
        except (UnicodeError, TypeError) as error:
            raise InvalidInputError(f"the text cannot be encoded: {error}; send valid Unicode") from error

    def encode_all(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        """Return the token ids of each of ``texts``, as :meth:`encode`.

        Raises:
            InvalidInputError: one holds a lone surrogate.
        """
        if sum(map(len, texts)) < _LONG:
            return [self.encode(text, allow_special=allow_special) if text else [] for text in texts]
        try:
            backend = self._backend if allow_special else self._plain
            return [encoding.ids for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]
        except (UnicodeError, TypeError) as error:
            raise InvalidInputError(f"a text cannot be encoded: {error}; send valid Unicode") from error

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ``token_ids``; bytes that make no character become U+FFFD.

        Args:
            token_ids: Ids below the vocabulary's size; others are skipped.
            skip_special: Leave control tokens out.
        """
        text = self._decode(token_ids, skip_special)
        if REPLACEMENT in text and self._byte_tokens:  # the backend gives up a whole run of bytes for one wrong byte
            return self._decode(self._valid(token_ids, skip_special), skip_special)
        return text

    def _decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        if len(token_ids) < _LONG:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special)
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special)[0]

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """Bytes by the id of the token that stands for one, in the order of the bytes; empty where no token does."""
        decoder = self._backend.decoder
        if decoder is None or "ByteFallback" not in json.dumps(json.loads(decoder.__getstate__())):
            return {}
        ids = ((self._backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        found = {token_id: byte for token_id, byte in ids if token_id is not None}
        return found if len(found) == 256 else {}

    def _valid(self, token_ids: Sequence[int], skip_special: bool) -> list[int]:
        """Return ``token_ids`` with each byte that is of no character replaced by U+FFFD's bytes."""
        by_byte, valid, run = list(self._byte_tokens), list[int](), bytearray()
        for token_id in (*(each for each in token_ids if self.has_text(each, skip_special=skip_special)), None):
            if token_id in self._byte_tokens:
                run.append(self._byte_tokens[token_id])
                continue
            text = re.sub("[\udc80-\udcff]", REPLACEMENT, run.decode(errors="surrogateescape"))
            valid += [by_byte[byte] for byte in text.encode()]
            valid += [] if token_id is None else [token_id]
            run.clear()
        return valid

    def has_text(self, token_id: int, *, skip_special: bool) -> bool:
        """Return whether :meth:`decode` looks at the token: it is known, and no control token that is left out."""
        return self._backend.id_to_token(token_id) is not None and not (skip_special and token_id in self.control_ids)

    def num_open(self, token_ids: Sequence[int], text: str) -> int:
        """Return how many U+FFFD at the end of ``text``, which is that of ``token_ids``, may yet become a character."""
        if not text.endswith(REPLACEMENT):
            return 0
        raw = b"".join(self.token_bytes(token_id) or b"" for token_id in token_ids[-4:])
        num_bytes = next((len(raw[start:]) for start in (-3, -2, -1) if _is_begun(raw[start:])), 0)
        return num_bytes if self._byte_tokens else min(1, num_bytes)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token stands for, which need not be whole characters; None: the token is unknown."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return None
        if piece in self.control_tokens:
            return piece.encode()
        if isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            is_spelt = piece not in self._added and all(char in _BYTE_OF for char in piece)
            return bytes(_BYTE_OF[char] for char in piece) if is_spelt else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds within an answer, U+FFFD for a part of a character."""
        return (self.token_bytes(token_id) or b"").decode(errors="replace")

    def to_json(self) -> str:
        """Return the tokenizer as a ``tokenizer.json`` text, for libraries that read that."""
        return str(self._backend.to_str())

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled exactly ``text``, if there is one."""
        return self._backend.token_to_id(text)


def _encoding(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
    if len(text) < _LONG:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _is_begun(raw: bytes) -> bool:
    """Return whether ``raw`` is the beginning of one character."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


class Detokenizer:
    """Decoder of one request's tokens as they come, yielding whole characters only.

    A character may be spread over several tokens; its text comes with the last of them. Where the prompt ends within
    a character, the whole character is the answer's. The pieces joined, :meth:`flush`'s included, are what
    :meth:`Tokenizer.decode` gives for all tokens at once. Each push decodes a bounded number of tokens.

    Args:
        tokenizer: The model's.
        prompt_ids: The prompt; its last tokens are the context that decoders need which treat the start of a text apart
            (SentencePiece drops a leading space).
        skip_special: Leave control tokens out.

    Example:
        >>> detokenizer = Detokenizer(tokenizer)  # doctest: +SKIP
        >>> [detokenizer.push(token) for token in tokenizer.encode("né")]  # doctest: +SKIP
        ['n', '', 'é']
    """

    _CONTEXT = 4  # tokens of the prompt kept: enough to be past any rule about the start

    def __init__(self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Only a window is ever decoded: the tokens before the last boundary (context), then those since.
        self._window = list(islice(filter(self._has_text, reversed(prompt_ids)), self._CONTEXT))[::-1]
        self._num_sent = self._num_held = 0  # characters of its text
        self._mark()

    @property
    def num_held(self) -> int:
        """Characters at the end of the text, each U+FFFD so far, that the next tokens may complete."""
        return self._num_held

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that it completes, empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode()
        if len(text) == self._num_sent + self._num_held and not self._has_text(token_id):
            self._window.pop()
            return ""
        self._num_held = self._tokenizer.num_open(self._window, text)
        piece = text[self._num_sent : len(text) - self._num_held]
        if piece:  # what is held lies in the tokens since the boundary: a lead byte is never within another character
            del self._window[: self._num_context]
            self._mark()
        return piece

    def flush(self) -> str:
        """End the request; return what is left: U+FFFD for a character that never became whole."""
        piece = self._decode()[self._num_sent :]
        self._num_sent += len(piece)
        return piece

    def _mark(self) -> None:
        """Set the boundary behind the window: its text, but what is held, was yielded or is the prompt's."""
        text = self._decode()
        self._num_context = len(self._window)
        self._num_held = self._tokenizer.num_open(self._window, text)
        self._num_sent = len(text) - self._num_held

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special=self._skip_special)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special=self._skip_special)


def prompt_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Return the prompt's text up to where a :class:`Detokenizer` of its answer begins."""
    text = tokenizer.decode(prompt_ids)
    return text[: len(text) - Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special=skip_special).num_held]
