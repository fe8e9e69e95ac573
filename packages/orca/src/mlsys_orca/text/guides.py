"""Structured output: a JSON schema, a regular expression or a grammar to the tokens that may come next.

The parsing is llguidance's. A :class:`Grammar` is checked at the edge, off the event loop; each request then has a
:class:`GrammarGuide` of its own, which the sampler asks for a mask. When a token has been chosen the sampler says so,
and the next mask is computed in a thread of this module beside the forward, without the interpreter's lock.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.text.tokenizer import Tokenizer
from numpy.typing import NDArray

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]
# No white space but these, or a small model never leaves it.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_log = logging.getLogger(__name__)
_worker = ThreadPoolExecutor(1, thread_name_prefix="orca-guides")  # starts its thread with the first mask


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of an answer, in llguidance's form. Made by :func:`grammar_of`."""

    source: str


def grammar_of(kind: GrammarKind, spec: Any) -> Grammar:
    """Return a grammar, not yet checked.

    Args:
        kind: Form of ``spec``: a JSON schema (an object, or True for any object), a regular expression, a grammar in
            Lark's or llama.cpp's notation.
        spec: The thing itself.

    Raises:
        InvalidInputError: ``spec`` has no such form.

    Example:
        >>> "[0-9]+" in grammar_of("regex", "[0-9]+").source
        True
    """
    try:
        match kind:
            case "json_schema":
                schema = {"type": "object"} if spec is True else spec
                check_names(schema)
                return Grammar(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE))
            case "regex":
                return Grammar(LLMatcher.grammar_from_regex(spec))
            case "lark":
                return Grammar(LLMatcher.grammar_from_lark(spec))
            case "gbnf":
                from llguidance import gbnf_to_lark

                return Grammar(LLMatcher.grammar_from_lark(gbnf_to_lark.gbnf_to_lark(spec)))
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(f"this {kind} cannot be read: {_one_line(str(error))}") from error


def check_names(schema: Any) -> None:
    """Refuse closed objects in whose patterns no name is left beside their properties: the parser fails behind these.

    Raises:
        InvalidInputError: ``schema`` has such an object.
    """
    nodes = [schema]
    for node in nodes:
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        patterns = node.get("patternProperties") if isinstance(node, dict) else None
        if not patterns or not isinstance(patterns, dict) or node.get("additionalProperties") is not False:
            continue
        groups = (node.get("properties"), node.get("required"))
        names = list(
            dict.fromkeys(name for group in groups if isinstance(group, dict | list) for name in map(str, group))
        )
        probe: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, True), "required": names}
        probe |= {"patternProperties": dict.fromkeys(patterns, True), "additionalProperties": False}
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(probe, JSON_STYLE), log_level=0)
        if not names or matcher.is_error():  # the whole grammar's check tells
            continue
        matcher.try_consume_tokens(list((json.dumps(dict.fromkeys(names, 0))[:-1] + ", ").encode()))
        if not matcher.is_stopped():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidInputError(
                f"'patternProperties' {', '.join(patterns)} in a closed object allow no name but {', '.join(names)}: "
                "say it of these 'properties', and leave the patterns out"
            )


def reasoned(grammar: Grammar, *, begin: str | None, end: str, end_token: int | None = None) -> Grammar:
    """Return a grammar of the same answers behind a model's reasoning.

    Args:
        grammar: Of the answer.
        begin: Text that begins the reasoning, if there is one; None: it has begun, and must end.
        end: Text that ends it.
        end_token: Id of the control token ``end``, if it is one; such a reasoning begins with the prompt or not at all.
    """
    if end_token is not None:
        if begin is not None:
            return grammar
        rules = [f"start: /(?s:.*)/ <[{end_token}]> gap @answer"]
    else:
        opened = "thought gap @answer"
        rules = [f"start: {opened}" if begin is None else f"start: ({json.dumps(begin)} thought gap)? @answer"]
        rules.append(f"thought[lazy]: /(?s:.*){_escaped(end)}/")
    is_json = grammar.source.lstrip().startswith("{")  # else it is Lark's notation
    parts = json.loads(grammar.source)["grammars"] if is_json else [{"lark_grammar": grammar.source}]
    answer = [{**parts[0], "name": "answer"}, *parts[1:]]
    rules.append(r"gap: /\n{0,2}/")
    return Grammar(json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *answer]}))


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


def _one_line(text: str) -> str:
    """Cut the parser's own words, which come with drawings, to one line."""
    return " ".join(text[:1000].split())[:300]


class GuideMaker:
    """Maker of guides over one tokenizer; its tables take about a second, at the first.

    Args:
        tokenizer: The model's.
        vocab_size: Size of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    @cached_property
    def _tables(self) -> LLTokenizer:
        try:
            return LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_ids)
            )
        except Exception as error:  # its errors have no class of their own
            raise InvalidInputError(f"this model's tokenizer cannot be guided: {error}") from error

    def warm_up(self) -> None:
        """Build the tables, if this tokenizer can be guided."""
        with suppress(InvalidInputError), self._lock:
            _ = self._tables

    def guide(self, grammar: Grammar) -> GrammarGuide:
        """Make a new guide; see :meth:`guides`."""
        return self.guides(grammar, 1)[0]

    def guides(self, grammar: Grammar, number: int) -> list[GrammarGuide]:
        """Make ``number`` guides of a grammar that is compiled once; blocking, so not for an event loop's thread.

        Raises:
            InvalidInputError: the grammar is wrong or too large, or the tokenizer is of no kind that can be guided.
        """
        with self._lock:
            tables = self._tables
        matcher = LLMatcher(tables, grammar.source, log_level=0)
        if matcher.is_error():
            raise InvalidInputError(
                f"the grammar of the structured output is refused: {_one_line(matcher.get_error())}"
            )

        def made(matcher: LLMatcher) -> GrammarGuide:
            return GrammarGuide(matcher, grammar.source, self._vocab_size, self._tokenizer.eos_ids)

        first = made(matcher.deep_copy())
        if not first.allowed([]).any() or first.failure:
            raise InvalidInputError(
                f"no text of this model's tokens fits the grammar of the structured output: {first.failure or 'empty'}"
            )
        matchers = [matcher, *(matcher.deep_copy() for _ in range(number - 1))]
        return [made(each) for each in matchers]


class GrammarGuide:
    """One request's :class:`~mlsys_orca.scheduling.batch.Guide`: a parser at the position of its answer."""

    def __init__(self, matcher: LLMatcher, source: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.source = source  # the grammar, in llguidance's form
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._read: list[int] = []  # the answer as far as the parser has gone
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._foreseen: tuple[list[int], Future[NDArray[np.bool_]]] | None = None
        self.failure: str | None = None  # why the parser gave up: an answer that ended so fits nothing

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        """Return the tokens that may follow ``answer``: bool [vocab_size]."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            mask = foreseen[1].result()  # in any case: one thread at a time moves the parser
            if foreseen[0] == list(answer):
                return mask
        return self._mask(list(answer))

    def foresee(self, answer: Sequence[int]) -> None:
        """Begin with the mask after ``answer``."""
        if self._foreseen is not None:
            self._foreseen[1].result()
        asked = list(answer)
        self._foreseen = asked, _worker.submit(self._mask, asked)

    def _mask(self, answer: list[int]) -> NDArray[np.bool_]:
        if answer and answer[-1] in self._eos_ids:  # nothing follows, and a parser that is done takes no more
            return self._only_the_end()
        try:
            self._go_to(answer)
            if self._matcher.is_stopped():  # the text is complete, or the parser gave up
                return self._end_of_it()
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        except Exception as error:  # noqa: BLE001 - one request's parser must not take down the iteration of all
            _log.exception("a grammar's parser failed: its answer ends here")
            self.failure = _one_line(str(error)) or type(error).__name__
            return self._only_the_end()
        if self._matcher.is_error():  # which it may find while it computes
            return self._end_of_it()
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocab_size).view(bool)

    def _end_of_it(self) -> NDArray[np.bool_]:
        if self._matcher.is_error():
            self.failure = self._matcher.get_error().partition("\n")[0][:300]
        return self._only_the_end()

    def _only_the_end(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[self._eos_ids] = True
        return mask

    def _go_to(self, answer: list[int]) -> None:
        common = 0
        for mine, theirs in zip(self._read, answer, strict=False):
            if mine != theirs:
                break
            common += 1
        if common < len(self._read):  # a guess that was wrong
            self._matcher.rollback(len(self._read) - common)
        if rest := answer[common:]:
            self._matcher.consume_tokens(rest)
        self._read = answer
