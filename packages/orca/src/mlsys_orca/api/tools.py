"""Tool calls, in the notation of the model's own chat template: what to tell a grammar, and what an answer means.

A template that knows tools shows how the model was taught to call them. Three notations cover most of them; where a
template has none, ``tools`` is refused by name. With ``tool_choice`` "required", or a function's name, a grammar sees
to it that the answer is a call with arguments that fit. With "auto" the answer is read for what it is; a grammar sees
to it that calls fit where a function is strict, and that the answer is a call or fits where it has a format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.text.guides import JSON_STYLE, Grammar, grammar_of

Notation = Literal["hermes", "mistral", "llama3"]
# Notation -> the text that a call begins with, what ends it, and what the arguments are called.
_MARKS: dict[Notation, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>", "arguments"),
    "mistral": ("[TOOL_CALLS]", "", "arguments"),
    "llama3": ('{"name":', "", "parameters"),
}


def notation_of(template: str) -> Notation | None:
    """Return the notation in which a chat template, as Jinja text, writes tool calls; None: none that is known here.

    Example:
        >>> notation_of("{% if tools %}... within <tool_call></tool_call> tags ...{% endif %}")
        'hermes'
    """
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the answer has it."""

    name: str
    arguments: str  # JSON


def call_grammar(
    notation: Notation,
    functions: list[dict[str, Any]],
    *,
    only_one: bool,
    otherwise: dict[str, Any] | bool | Literal["text"] | None = None,
) -> Grammar:
    """Return a grammar of answers that call some of ``functions``.

    Args:
        notation: The template's.
        functions: Each with a ``name`` and its ``parameters``, a JSON schema.
        only_one: Allow one call only.
        otherwise: Other forms of an answer: JSON of this schema (True: any object), or with ``"text"`` any text, also
            before calls and after. None: a call is a must.

    Raises:
        InvalidInputError: a schema cannot be read, or in this notation text and calls look alike.
    """
    begin, end, arguments = _MARKS[notation]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    called: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if otherwise == "text":
        if notation != "hermes":
            raise InvalidInputError(
                "'strict' of a function the model may call or not is implemented for templates with <tool_call> alone: "
                "leave it out, or ask for a call with 'tool_choice'"
            )
        rules = [
            f"start: (said call){'?' if only_one else '*'} REST",
            f"said[lazy]: /(?s:.*){begin}/",  # ends where a call begins
            f"REST: /(?s:.*)/ & ~/(?s:.*){begin}(?s:.*)/",
            f'call: "\\n" object "\\n{end}"',
            _json_rule("object", called),
        ]
        return grammar_of("lark", "\n".join(rules))
    match notation:
        case "hermes":
            rules = [f'call: "{begin}\\n" object "\\n{end}"', _json_rule("object", called)]
        case "mistral":
            bound = {"minItems": 1} | ({"maxItems": 1} if only_one else {})
            rules = [f'call: "{begin}" list', _json_rule("list", {"type": "array", "items": called} | bound)]
        case "llama3":
            rules = [_json_rule("call", called if otherwise is None else {"anyOf": [called, otherwise]})]
    several = "+" if notation == "hermes" and not only_one else ""
    start = f"start: call{several}"
    if otherwise is not None and notation != "llama3":
        start += " | answer"
        rules.append(_json_rule("answer", otherwise))
    return grammar_of("lark", "\n".join([start, *rules]))


def _json_rule(name: str, schema: Any) -> str:
    whole = {"type": "object"} if schema is True else schema or {"not": {}}  # what True and False stand for
    return f"{name}: %json {json.dumps(whole | {'x-guidance': JSON_STYLE})}"


class ToolParser:
    """Parser that takes an answer as it grows, and tells text from calls.

    Args:
        notation: The template's.

    Example:
        >>> parser = ToolParser("hermes")
        >>> parser.push('Well. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_')
        ('Well. ', [])
        >>> parser.push("call>")
        ('', [ToolCall(name='f', arguments='{"x": 1}')])
    """

    def __init__(self, notation: Notation) -> None:
        self._begin, self._end, self._arguments = _MARKS[notation]
        self._notation = notation
        self._held = ""  # text that is, or may become, a call
        self._has_text = False  # some was passed on
        self._follows_call = False  # line ends are not text there

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take the next piece; return the text that is certainly none of a call, and the calls that are complete."""
        self._held += text
        shown, calls = "", []
        while True:
            if self._follows_call and self._held:
                self._held = self._held.lstrip("\n")
                self._follows_call = not self._held
            start = self._start()
            if start is None:
                keep = self._overlap()
                shown += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            shown, self._held = shown + self._held[:start], self._held[start:]
            stop = self._held.find(self._end) if self._end else -1
            if stop < 0:
                break
            block, self._held = self._held[len(self._begin) : stop], self._held[stop + len(self._end) :]
            found = self._read(block)
            if found is None:  # no call after all
                shown += self._begin + block + self._end
            else:
                calls += found
                self._follows_call = True
        self._has_text = self._has_text or bool(shown.strip())
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the answer; return the held text as a call if it is one, else as text."""
        held, self._held = self._held, ""
        if not held.lstrip().startswith(self._begin.strip()):
            return held, []
        block = held.strip()
        found = self._read(block if self._notation == "llama3" else block.removeprefix(self._begin))
        return ("", found) if found is not None else (held, [])

    def _start(self) -> int | None:
        if self._notation != "llama3":
            start = self._held.find(self._begin)
            return None if start < 0 else start
        # Only an answer that is nothing else is a call there.
        blank = len(self._held) - len(self._held.lstrip())
        opens = "".join(self._held.split()).startswith(self._begin)
        return blank if opens and not self._has_text else None

    def _overlap(self) -> int:
        """Return the number of characters at the held text's end that may yet begin a call."""
        if self._notation == "llama3":
            opens = self._begin.startswith("".join(self._held.split())[: len(self._begin)])
            return len(self._held) if opens and not self._has_text else 0
        longest = min(len(self._begin) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._begin[:n])), 0)

    def _read(self, block: str) -> list[ToolCall] | None:
        try:
            value = json.loads(block)
        except (ValueError, RecursionError):
            return None
        calls = []
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                return None
            arguments = item.get("arguments", item.get("parameters", {}))
            calls.append(ToolCall(item["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls or None


def need_notation(template: str | None) -> Notation:
    """Return the template's notation of tool calls.

    Raises:
        InvalidInputError: it has none.
    """
    notation = None if template is None else notation_of(template)
    if notation is None:
        raise InvalidInputError(
            "'tools' needs a model whose chat template says how tools are called; this one's does not: leave it out, "
            "or serve the model with a --chat-template that does"
        )
    return notation
