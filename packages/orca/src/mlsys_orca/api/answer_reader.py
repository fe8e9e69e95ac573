"""An answer's text to its parts: reasoning, then text and calls, whole or as it grows."""

from __future__ import annotations

from dataclasses import dataclass

from mlsys_orca.api.parts import Part, joined
from mlsys_orca.api.reasoning import ReasoningMarks, ReasoningParser
from mlsys_orca.api.tagged_calls import Function
from mlsys_orca.api.tool_parser import ToolParser
from mlsys_orca.api.tools import Notation


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Parts that an answer may have beside text."""

    notation: Notation | None = None  # of its calls; None: there are none
    functions: tuple[Function, ...] = ()  # that may be called
    only_one: bool = False  # calls after the first are left out
    marks: ReasoningMarks | None = None  # of its reasoning; None: there is none
    is_open: bool = False  # the prompt ends within the reasoning


class AnswerReader:
    """Reader of one answer as it grows.

    Example:
        >>> reader = AnswerReader(AnswerForm(marks=ReasoningMarks("<think>", "</think>")))
        >>> [part.kind for part in reader.push("<think>Well.</think>Yes.")]
        ['reasoning', 'text']
    """

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning = None if form.marks is None else ReasoningParser(form.marks, is_open=form.is_open)
        self._tools = None if form.notation is None else ToolParser(form.notation, form.functions)
        self._only_one = form.only_one
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        """True if there is a call, and the last one is complete."""
        return self._num_calls > 0 and self._tools is not None and not self._tools.is_open

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return what is certain of it and of what was held."""
        return self._kept(self._read([Part("text", text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[Part]:
        """End the answer; return what was held."""
        parts = [] if self._reasoning is None else self._read(self._reasoning.finish())
        return self._kept(parts + ([] if self._tools is None else self._tools.finish()))

    def _read(self, parts: list[Part]) -> list[Part]:
        tools = self._tools
        if tools is None:
            return parts
        return [read for part in parts for read in (tools.push(part.text) if part.kind == "text" else [part])]

    def _kept(self, parts: list[Part]) -> list[Part]:
        kept = []
        for part in parts:
            self._num_calls += part.name is not None
            is_left_out = self._only_one and part.kind == "call" and self._num_calls > 1
            if (part.text or part.name is not None) and not is_left_out:
                kept.append(part)
        return kept


def read_whole(text: str, form: AnswerForm) -> tuple[list[Part], bool]:
    """Return the parts of a complete answer, and :attr:`AnswerReader.has_called`."""
    reader = AnswerReader(form)
    parts = reader.push(text)
    parts += reader.finish()
    return joined(parts), reader.has_called
