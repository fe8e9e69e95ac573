"""Read tool calls from an answer as it grows: its text, the name of a call when it is known, arguments as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from mlsys_orca.api.tagged_calls import Function, tagged_calls_of
from mlsys_orca.api.text_stream import Part
from mlsys_orca.api.tools import MARKS, SEPARATORS, Notation

# What a call begins with, up to its arguments. One that is written otherwise is read when it is complete.
_HEAD = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# The same in Mistral's later templates: a name, perhaps the call's id, and a mark.
_NAMED_HEAD = re.compile(r"\s*([^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*(?=\{)")


class _ObjectScanner:
    """Finder of the brace that ends a JSON object, which begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Take the next piece; return the index behind the object's end, None if it is not in there."""
        for index, char in enumerate(text):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


class ToolParser:
    """Parser that takes an answer as it grows, and tells text from calls.

    Args:
        notation: The template's.
        functions: Those that may be called, where a notation leaves to their schemas what is text.

    Example:
        >>> parser = ToolParser("hermes")
        >>> [(part.kind, part.name, part.text) for part in parser.push('<tool_call>{"name": "f", "arguments": {"x"')]
        [('call', 'f', ''), ('call', None, '{"x"')]
        >>> [part.text for part in parser.push(": 1}}</tool_call>")]
        [': 1}']
    """

    def __init__(self, notation: Notation, functions: Sequence[Function] = ()) -> None:
        self._functions = functions if notation == "tagged" else None
        self._begin, self._end, _ = MARKS[notation]
        self._separator = SEPARATORS[notation]
        self._is_named = notation == "mistral-args"  # a call's name stands outside of JSON, and nothing ends it
        self._is_bare = notation == "llama3"  # a call has no mark
        self._held = ""  # what cannot be told yet
        self._blank = ""  # white space at the answer's start, which is text if text follows
        self._mark: str | None = (
            None  # inside of a call, before its arguments: what was read of it before the held text
        )
        self._scanner: _ObjectScanner | None = None  # inside of arguments
        self._is_behind = False  # behind the arguments, before the call's end
        self._has_text = False  # some was passed on
        self._follows_call = False  # line ends are not text there
        self._num_calls = 0

    @property
    def is_open(self) -> bool:
        """True if the arguments of the last call have no end yet."""
        return self._scanner is not None

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return what is certain of it and of what was held."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """End the answer; return what was held, as a call if it is one, nothing if it ``is_cut`` within marks."""
        held, self._held = self._held, ""
        parts: list[Part] = []
        if self._scanner is not None or self._is_behind:
            return parts
        if self._mark is not None:
            self._read_block(parts, held.rstrip(), "" if is_cut else self._mark + held, is_cut=True)
            return parts
        self._show(parts, "" if is_cut and held.strip() else held)
        if self._blank and not self._num_calls:
            parts.append(Part("text", self._blank))
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Read one thing of the held text; return False if more text is needed."""
        if self._scanner is not None:
            return self._read_arguments(parts, self._scanner)
        if self._is_behind:
            return self._read_tail()
        if self._mark is not None:
            return self._read_head(parts, self._mark)
        if self._follows_call and self._held:
            self._held = self._held.lstrip("\n")
            self._follows_call = not self._held
        start = self._start()
        if start is None:
            keep = self._overlap()
            shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._show(parts, shown)
            return False
        self._show(parts, self._held[:start])
        behind = start if self._is_bare else start + len(self._begin)
        self._mark, self._held = self._held[start:behind], self._held[behind:]
        return True

    def _read_head(self, parts: list[Part], mark: str) -> bool:
        head = (_NAMED_HEAD if self._is_named else _HEAD).match(self._held)
        if head is not None and (name := head[1] if self._is_named else _text_of(head[1])) is not None:
            self._begin_call(parts, name)
            self._held, self._mark, self._scanner = self._held[head.end() :], None, _ObjectScanner()
            return True
        stop = self._held.find(self._end) if self._end else -1
        if stop < 0:
            return False
        block, self._held = self._held[:stop], self._held[stop + len(self._end) :]
        self._mark = None
        self._read_block(parts, block, mark + block + self._end)
        return True

    def _read_arguments(self, parts: list[Part], scanner: _ObjectScanner) -> bool:
        stop = scanner.scan(self._held)
        piece, self._held = (self._held, "") if stop is None else (self._held[:stop], self._held[stop:])
        if piece:
            parts.append(Part("call", piece))
        if stop is None:
            return False
        self._scanner, self._is_behind, self._follows_call = None, not self._is_named, self._is_named
        return True

    def _read_tail(self) -> bool:
        """Drop what is behind a call's arguments."""
        end = self._end or "}"
        stop = self._held.find(end)
        if stop < 0:
            return False
        rest = self._held[stop + len(end) :]
        if not self._end:  # another call may follow
            rest = rest.lstrip()
            if not rest:
                return False
            if rest[0] == self._separator:
                self._mark = ""
            rest = rest[1:] if rest[0] in (self._separator, "]") else rest
        self._held, self._is_behind, self._follows_call = rest, False, True
        return True

    def _read_block(self, parts: list[Part], block: str, text: str, *, is_cut: bool = False) -> None:
        """Read a call, or several, that is complete, or ``is_cut``; it is ``text`` if it is none."""
        tagged = None if self._functions is None else tagged_calls_of(block, self._functions, is_cut=is_cut)
        found = tagged or _calls_of(block)
        if found is None:
            self._show(parts, text)
            return
        for name, arguments in found:
            self._begin_call(parts, name)
            parts.append(Part("call", arguments))
        self._follows_call = True

    def _begin_call(self, parts: list[Part], name: str) -> None:
        self._blank = ""
        self._num_calls += 1
        parts.append(Part("call", name=name))

    def _show(self, parts: list[Part], text: str) -> None:
        if not self._has_text:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
            self._has_text = True
        if text:
            parts.append(Part("text", text))

    def _start(self) -> int | None:
        if not self._is_bare:
            start = self._held.find(self._begin)
            return None if start < 0 else start
        # Only an answer that is nothing else is a call there.
        blank = len(self._held) - len(self._held.lstrip())
        opens = "".join(self._held.split()).startswith(self._begin)
        return blank if opens and not self._has_text else None

    def _overlap(self) -> int:
        """Return the number of characters at the held text's end that may yet begin a call."""
        if self._is_bare:
            opens = self._begin.startswith("".join(self._held.split())[: len(self._begin)])
            return len(self._held) if opens and not self._has_text else 0
        longest = min(len(self._begin) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._begin[:n])), 0)


def _text_of(quoted: str) -> str | None:
    try:
        text: str = json.loads(f'"{quoted}"')
    except ValueError:
        return None
    return text


def _calls_of(block: str) -> list[tuple[str, str]] | None:
    """Return the name and the arguments, as JSON, of each call in ``block``; None: it is no call."""
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        calls.append((item["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls or None
