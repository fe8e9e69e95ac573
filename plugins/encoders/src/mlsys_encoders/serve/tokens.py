"""Texts to the token ids of an encoder: prompts, marks, pairs, and texts that are too long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.models.sentence import read_settings, require_known
from mlsys_serving.http import HttpError

Side = Literal["Left", "Right"]
_CHANGING = ("truncation_side", "split_special_tokens")  # keys for other ways of cutting texts into tokens
_OWN_RULES = ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer")  # classes that make their rules anew


class InputTooLongError(HttpError):
    """A text has more tokens than the model takes, and is not to be cut."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"a text has {num_tokens} tokens, and the model takes {max_tokens}: split it, or send truncate: true to "
            "have it cut",
            http_status=413,
            error_code="input_too_long",
            param="truncate",
        )


class TextTokens:
    """The tokenizer of one encoder.

    Args:
        tokenizer: The folder's, without padding; it cuts at the folder's limit.
        config: Shape of the encoder.
    """

    def __init__(self, tokenizer: Any, config: BertConfig) -> None:
        self.config = config
        self.tokenizer = tokenizer
        left = type(tokenizer).from_str(tokenizer.to_str())
        left.enable_truncation(config.max_tokens, direction="left")
        self._cutting = {"Right": tokenizer, "Left": left}

    def encode(
        self, texts: Sequence[str], *, prompt_name: str | None = None, is_cut: bool = False, side: Side = "Right"
    ) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of texts, marks among them.

        Args:
            texts: Any.
            prompt_name: Name of the prompt that goes before each; None: the folder's default.
            is_cut: Cut texts that are too long, at the end of ``side``.
            side: "Left" or "Right".

        Raises:
            InvalidInputError: No such prompt, or a text is no valid Unicode.
            InputTooLongError: A text is too long and not to be cut.
        """
        prompt = self.config.form.prompt(prompt_name)
        return self._encoded([prompt + text for text in texts], is_cut=is_cut, side=side)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, is_cut: bool = False, side: Side = "Right"
    ) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of pairs of texts, and where the model has types, [2, tokens] with the types.

        Where a pair is cut, the longer text of it loses tokens first. Raises as :meth:`encode`.
        """
        return self._encoded(list(pairs), is_cut=is_cut, side=side)

    def _encoded(self, texts: list[Any], *, is_cut: bool, side: Side) -> list[npt.NDArray[np.int64]]:
        if self.config.form.is_lower_case:
            texts = [each.lower() if isinstance(each, str) else tuple(map(str.lower, each)) for each in texts]
        try:
            found = self._cutting[side].encode_batch(texts)
        except (UnicodeError, TypeError) as error:
            raise InvalidInputError(f"a text cannot be encoded: {error}; send valid Unicode") from error
        if not is_cut:
            for each in found:
                if each.overflowing:
                    raise InputTooLongError(self._num_tokens(each), self.config.max_tokens)
        return [self._payload(each) for each in found]

    def _payload(self, encoding: Any) -> npt.NDArray[np.int64]:
        ids = np.array(encoding.ids, np.int64)
        if self.config.num_token_types < 2 or not self.config.form.has_types or not any(encoding.type_ids):
            return ids
        return np.stack([ids, np.array(encoding.type_ids, np.int64)])

    @staticmethod
    def _num_tokens(encoding: Any) -> int:
        """Return the tokens of a text before it was cut; for pairs, those at least that were lost."""
        marks: int = sum(encoding.special_tokens_mask)
        lengths = [len(each.ids) - marks for each in (encoding, *encoding.overflowing)]
        return marks + sum(length for length in lengths if length > 0)


def tokenizer_of(folder: Path, config: BertConfig) -> Any:
    """Return the tokenizer in an encoder's folder, without padding, or None.

    Raises:
        InvalidInputError: ``tokenizer_config.json`` asks for other tokens than ``tokenizer.json`` makes.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _require_same(folder, tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_tokens)
    return tokenizer


def _require_same(folder: Path, tokenizer: Any) -> None:
    """Refuse settings of ``tokenizer_config.json`` by which transformers changes what ``tokenizer.json`` makes."""
    path = folder / "tokenizer_config.json"
    raw, made = read_settings(path), json.loads(tokenizer.to_str())
    require_known(path, {key: raw.get(key) for key in _CHANGING}, truncation_side=("right",))
    rules = made["normalizer"] or {}
    if str(raw.get("tokenizer_class")).removesuffix("Fast") in _OWN_RULES:
        if rules.get("type") == "BertNormalizer":
            theirs = _rules(rules, "lowercase", "handle_chinese_chars")
            for key, asked in _rules(raw, "do_lower_case", "tokenize_chinese_chars").items():
                if asked != (has := theirs.pop(next(iter(theirs)))):
                    raise InvalidInputError(f"{path}: {key} comes to {asked!r}, and in tokenizer.json to {has!r}")
        around = tokenizer.encode("").tokens
        for key in ("cls_token", "sep_token"):
            if raw.get(key) and _content(raw[key]) not in around:
                raise InvalidInputError(f"{path}: {key} is {raw[key]!r}, and tokenizer.json puts {around} around texts")
    added = {str(each["id"]): each["content"] for each in made["added_tokens"]}
    listed = raw.get("added_tokens_decoder") or {}
    for number, each in listed.items() if isinstance(listed, dict) else ():
        if added.get(number) != _content(each):
            raise InvalidInputError(f"{path}: added_tokens_decoder has {each!r} as {number}, tokenizer.json has not")


def _rules(raw: Mapping[str, Any], lower: str, chinese: str) -> dict[str, object]:
    """Return the rules of a BERT's normalizer: accents go where capitals do, unless it is said."""
    is_lower, accents = raw.get(lower, True), raw.get("strip_accents")
    return {lower: is_lower, "strip_accents": is_lower if accents is None else accents, chinese: raw.get(chinese, True)}


def _content(token: Any) -> object:
    return token.get("content") if isinstance(token, dict) else token
