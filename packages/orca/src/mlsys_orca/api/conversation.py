"""A conversation, in no protocol's words, to a prompt: messages, tools, format and reasoning as its endpoint read them.

Each endpoint of chats turns its own body into a :class:`Conversation` and the rest of a request; :func:`prepare`
finishes it: the prompt, the grammar that the answer has to fit, and how the answer is read. An :class:`AnswerReader`
then turns the answer's text to its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.api.answers import GenerationParameters
from mlsys_orca.api.service import ModelService, num_chars
from mlsys_orca.api.text_stream import FinishReason, Part, joined
from mlsys_orca.text.chat_template import Effort, ReasoningMarks, effort_variables, last_text, marks_of
from mlsys_orca.text.guides import Grammar, grammar_of, reasoned

if TYPE_CHECKING:  # a conversation without tools does without them
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


class AnswerReader:
    """Reader of one answer as it grows.

    Example:
        >>> reader = AnswerReader(AnswerForm(marks=ReasoningMarks("<think>", "</think>")))
        >>> [part.kind for part in reader.push("<think>Well.</think>Yes.")]
        ['reasoning', 'text']
    """

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning = None if form.marks is None else ReasoningParser(form.marks, is_open=form.is_open)
        self._tools: ToolParser | None = None
        if form.notation is not None:
            from mlsys_orca.api.tool_parser import ToolParser

            self._tools = ToolParser(form.notation, form.functions)
        self._only_one = form.only_one
        self._num_calls = 0
        self._is_cut = False

    @property
    def has_called(self) -> bool:
        """True if the answer was not cut, there is a call, and the last one is complete."""
        return self._num_calls > 0 and not self._is_cut and self._tools is not None and not self._tools.is_open

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return what is certain of it and of what was held."""
        return self._kept(self._read([Part("text", text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self, reason: FinishReason) -> list[Part]:
        """End the answer for the engine's ``reason``; return what was held, without marks that the budget cut."""
        self._is_cut = is_cut = reason == "length"
        parts = [] if self._reasoning is None else self._read(self._reasoning.finish(is_cut=is_cut))
        return self._kept(parts + ([] if self._tools is None else self._tools.finish(is_cut=is_cut)))

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


def read_whole(text: str, form: AnswerForm, reason: FinishReason) -> tuple[list[Part], bool]:
    """Return the parts of a complete answer, and :attr:`AnswerReader.has_called`."""
    reader = AnswerReader(form)
    parts = reader.push(text)
    parts += reader.finish(reason)
    return joined(parts), reader.has_called


_TAIL = 24  # of a prompt's tokens: more than the beginning of any answer has


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Functions that the model may call, and whether it must."""

    functions: Sequence[dict[str, Any]] = ()  # each with name, perhaps description, parameters (a schema), strict
    must_call: bool = False
    wanted: str | None = None  # the one function that must be called; None: any
    only_one: bool = False  # one call at most

    @property
    def is_strict(self) -> bool:
        """True if a call that may come has to fit its schema."""
        return not self.must_call and any(function.get("strict") for function in self.functions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and what is asked of the answer."""

    messages: Sequence[dict[str, Any]]  # as chat templates expect them
    tools: ToolUse = field(default_factory=ToolUse)
    schema: dict[str, Any] | bool | None = None  # of an answer that is no call; True: any object, None: any text
    grammar: Grammar | None = None  # of the answer; instead of a schema
    effort: Effort | None = None
    variables: dict[str, Any] | None = None  # of the template, by the client
    begins_turn: bool = True  # the prompt ends with the opening of the assistant's turn
    continues: bool = False  # instead the answer goes on with the last message


def prepare(
    conversation: Conversation, asked: GenerationParameters, service: ModelService
) -> tuple[GenerationParameters, AnswerForm]:
    """Return the finished request of a conversation, and the form of its answer.

    Args:
        conversation: Messages, and what is asked of the answer.
        asked: The rest of the request; its prompt and grammar are found here.
        service: The model.

    Raises:
        HttpError: the prompt is longer than the context (400).
        InvalidInputError: the model has no chat template, or none that knows tools or reasoning where these are asked
            for, or it refuses the messages; or a grammar cannot be read.
    """
    template, tokenizer = service.loaded.chat_template, service.loaded.tokenizer
    source, known = ("", frozenset[str]()) if template is None else (template.source, template.variables)
    tools, marks = conversation.tools, marks_of(source)
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in conversation.messages)
    notation: Notation | None = None
    if tools.functions or has_calls:
        from mlsys_orca.api.tools import need_notation

        notation = need_notation(source)
    variables = effort_variables(conversation.effort, known=known, marks=marks) | (conversation.variables or {})
    prompt = encode_chat(
        service,
        conversation.messages,
        tools=[_shown(function) for function in tools.functions] or None,
        variables=variables,
        begins_turn=conversation.begins_turn,
        continues=conversation.continues,
    )
    grammar, is_open, is_over = _grammar(conversation, notation), False, False
    if marks is not None:
        said = _begun(conversation, tokenizer.decode(prompt[-_TAIL:], skip_special=False))
        is_open = said.endswith(marks.begin) or (conversation.continues and marks.is_open_in(said))
        is_over = said.endswith(marks.end) or (conversation.continues and not is_open)
    if grammar is not None and marks is not None and marks.direct:
        raise InvalidInputError(
            "this model answers in channels (harmony), which no grammar is held behind: leave out response_format, "
            "forced tools and other grammars"
        )
    if grammar is not None and marks is not None and not is_over:
        ends = tokenizer.control_tokens.get(marks.end)
        grammar = reasoned(grammar, begin=None if is_open else marks.begin, end=marks.end, end_token=ends)
    form = AnswerForm(
        notation=notation if tools.functions else None,
        functions=tuple(tools.functions),
        only_one=tools.only_one,
        marks=marks,
        is_open=is_open,
    )
    # Where the marks of calls or of reasoning are control tokens, their text must not be left out.
    has_control_marks = notation in ("mistral", "mistral-args") or (
        marks is not None and (bool(marks.direct) or marks.end in tokenizer.control_tokens)
    )
    text = replace(asked.text, skips_special=asked.text.skips_special and not has_control_marks)
    return replace(asked, prompts=[prompt], grammar=grammar, text=text), form


def _shown(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _begun(conversation: Conversation, tail: str) -> str:
    """Return the text in the prompt at whose end the answer begins."""
    return last_text(conversation.messages[-1]) if conversation.continues else tail.rstrip()


def _grammar(conversation: Conversation, notation: Notation | None) -> Grammar | None:
    """Return the grammar that an answer behind its reasoning must fit; None: any text will do.

    The answer must be a call, or may be one beside the requested format or, if calls are strict, beside any text.
    """
    tools, schema = conversation.tools, conversation.schema
    if conversation.grammar is not None and schema is not None:
        raise InvalidInputError("give 'structured_outputs' or 'response_format', not both")
    if notation is not None and tools.functions:
        from mlsys_orca.api.tools import call_grammar

        wanted = [each for each in tools.functions if tools.wanted in (None, each["name"])]
        if tools.must_call:
            return call_grammar(notation, wanted, only_one=tools.only_one)
        if schema is not None:
            return call_grammar(notation, wanted, only_one=tools.only_one, otherwise=schema)
        if tools.is_strict:
            return call_grammar(notation, wanted, only_one=tools.only_one, otherwise="text")
    return conversation.grammar if schema is None else grammar_of("json_schema", schema)


def encode_chat(
    service: ModelService,
    messages: Sequence[dict[str, object]],
    *,
    tools: Sequence[dict[str, object]] | None = None,
    variables: dict[str, object] | None = None,
    begins_turn: bool = True,
    continues: bool = False,
) -> list[int]:
    """Return the token ids of a conversation's prompt.

    Args:
        service: The model.
        messages: The conversation, as templates expect it.
        tools: Functions that the model may call.
        variables: Variables of the template.
        begins_turn: End with the opening of the assistant's turn.
        continues: End with the last message's text instead.

    Raises:
        HttpError: it is longer than the context (400).
        InvalidInputError: the model has no chat template, or it refuses the messages.
    """
    template = service.loaded.chat_template
    if template is None:
        raise InvalidInputError(f"model {service.name!r} has no chat template: use /v1/completions")
    service.check_length(num_chars((messages, tools)))
    return template.encode(
        messages,
        service.loaded.tokenizer,
        add_generation_prompt=begins_turn,
        tools=tools,
        variables=variables,
        continues=continues,
    )
