"""Parts of an answer in no protocol's words, and the reasoning among them.

Reasoning: the marks that a chat template shows, the answer read by them, and how much is asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: it goes on with the piece before it if that is of the same kind, and this has no name."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call: its arguments, as JSON
    name: str | None = None  # of the function whose call begins here

    def follows(self, other: Part) -> bool:
        """Return whether this piece goes on with ``other``."""
        return self.kind == other.kind and self.name is None


def call_id(prefix: str, answer_id: str, number: int, *, choice: int = 0) -> str:
    """Return the id of a call, which clients give back with its result; the same whenever the answer is made again.

    Args:
        prefix: The protocol's.
        answer_id: The answer's.
        number: Index of the call in its choice.
        choice: Index of the choice.
    """
    place = f"{answer_id}/{choice}/{number}".encode()
    return f"{prefix}_{hashlib.blake2b(place, digest_size=12).hexdigest()}"


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` with pieces that belong together as one.

    Example:
        >>> joined([Part("text", "a"), Part("text", "b"), Part("call", name="f"), Part("call", "{}")])
        [Part(kind='text', text='ab', name=None), Part(kind='call', text='{}', name='f')]
    """
    whole: list[Part] = []
    for part in parts:
        if whole and part.follows(whole[-1]):
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


def text_of(parts: Iterable[Part], kind: Literal["reasoning", "text"]) -> str:
    """Return the text of all parts of that kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Iterable[Part]) -> list[Part]:
    """Return the calls among parts that are joined."""
    return [part for part in parts if part.kind == "call"]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on or off


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Texts around a model's reasoning."""

    begin: str
    end: str
    direct: str = ""  # what an answer without reasoning begins with, of texts that clients do not see

    def is_open_in(self, text: str) -> bool:
        """Return whether reasoning begins in ``text`` and does not end there."""
        return text.rfind(self.begin) > text.rfind(self.end)


_STYLES = (
    ReasoningMarks("<think>", "</think>"),  # DeepSeek R1, Qwen3, GLM and others
    ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral
    ReasoningMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarks("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
    ReasoningMarks(  # gpt-oss (harmony): reasoning and answer are messages of two channels
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        direct="<|channel|>final<|message|>",
    ),
)


def marks_of(template: str) -> ReasoningMarks | None:
    """Return the marks of reasoning in a chat template's Jinja text; None: it has none that are known here.

    Example:
        >>> marks_of("{{ message.content.split('</think>')[-1] }}").begin
        '<think>'
    """
    for marks in _STYLES:
        if marks.begin in template or marks.end in template or (marks.direct and marks.direct in template):
            return marks
    return None


def effort_variables(
    effort: Effort | None, *, known: Collection[str], marks: ReasoningMarks | None
) -> dict[str, object]:
    """Return the template's variables that ask for ``effort``.

    Args:
        effort: The client's wish; None: the template's own way.
        known: Variables of the template.
        marks: The template's marks of reasoning.

    Raises:
        InvalidInputError: the model does not reason, or cannot be kept from it.

    Example:
        >>> effort_variables("none", known={"enable_thinking"}, marks=None)
        {'enable_thinking': False}
    """
    if effort is None:
        return {}
    found: dict[str, object] = {name: effort != "none" for name in _SWITCHES if name in known}
    if "reasoning_effort" in known:
        found["reasoning_effort"] = effort
    if not found and (marks is None) == (effort != "none"):
        what = "says nothing of it" if marks is None else "cannot turn it off"
        raise InvalidInputError(
            f"reasoning ('reasoning_effort', 'reasoning', 'thinking') was set to {effort!r}, and this model's chat "
            f"template {what}: leave it out"
        )
    return found


class ReasoningParser:
    """Parser that takes an answer as it grows, and tells the reasoning at its start from the rest.

    Args:
        marks: The template's.
        is_open: The prompt ends within the reasoning, as where the template begins it.

    Example:
        >>> parser = ReasoningParser(ReasoningMarks("<think>", "</think>"), is_open=False)
        >>> [(part.kind, part.text) for part in parser.push("<think>Well.</think>Yes.")]
        [('reasoning', 'Well.'), ('text', 'Yes.')]
    """

    def __init__(self, marks: ReasoningMarks, *, is_open: bool) -> None:
        self._marks = marks
        self._state: Literal["start", "reasoning", "gap", "text"] = "reasoning" if is_open else "start"
        self._held = ""  # what cannot be told yet
        self._has_reasoning = False  # some was passed on

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return what is certain of it and of what was held."""
        self._held += text
        parts: list[Part] = []
        if self._state == "start":
            said = self._held.lstrip()
            if said.startswith(self._marks.begin):
                self._state, self._held = "reasoning", said.removeprefix(self._marks.begin)
            elif self._marks.direct and said.startswith(self._marks.direct):
                self._state, self._held = "text", said.removeprefix(self._marks.direct)
            elif not (self._marks.begin.startswith(said) or self._marks.direct.startswith(said)):
                self._state = "text"
        if self._state == "reasoning":
            self._reason(parts)
        if self._state == "gap":  # line ends are not text there
            self._held = self._held.lstrip("\n")
            self._state = "text" if self._held else "gap"
        if self._state == "text" and self._held:
            parts.append(Part("text", self._held))
            self._held = ""
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """End the answer; return what was held, nothing if the answer ``is_cut`` within a mark."""
        held, self._held = self._held, ""
        if not held or self._state == "gap" or (is_cut and held.strip()):
            return []
        return [Part("reasoning" if self._state == "reasoning" else "text", held)]

    def _reason(self, parts: list[Part]) -> None:
        if not self._has_reasoning:
            self._held = self._held.lstrip("\n")
        stop = self._held.find(self._marks.end)
        shown = self._held[: self._certain() if stop < 0 else stop]
        self._held = self._held[len(shown) :]
        if stop >= 0:
            self._state, self._held = "gap", self._held.removeprefix(self._marks.end)
            shown = shown.rstrip("\n")
        if shown:
            self._has_reasoning = True
            parts.append(Part("reasoning", shown))

    def _certain(self) -> int:
        """Return the number of held characters that belong neither to the end's mark nor to line ends before it."""
        end = self._marks.end
        longest = min(len(end) - 1, len(self._held))
        overlap = next((n for n in range(longest, 0, -1) if self._held.endswith(end[:n])), 0)
        return len(self._held[: len(self._held) - overlap].rstrip("\n"))
