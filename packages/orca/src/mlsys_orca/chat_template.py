"""A conversation to the text, or the tokens, that a model was trained to continue.

The template is the model file's own, written in Jinja; it is rendered as the ``transformers`` library does, in a
sandbox, since model files come from anywhere. Used by the front for chat requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlsys_core.errors import InvalidInputError

from mlsys_orca.tokenizer import Tokenizer

# Noncharacters (never in exchanged text) that fence a control token's text in a message; dropped from messages first.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # variables that no client gives
# What a template run on odd messages may raise: whatever its expressions do.
_RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    r"""A model's chat template.

    Args:
        source: The Jinja text.
        special_tokens: Texts by role, visible to the template (``bos_token``, ``eos_token``, ...).
        clock: Today's date for templates that ask for it.

    Raises:
        InvalidInputError: ``source`` is no valid template.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hi"}])
        '[user] Hi\n'
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
        try:
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source)) - {*_OURS, *environment.globals}
        except TemplateError as error:
            raise InvalidInputError(f"the model's chat template cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
            messages: ``{"role": ..., "content": ...}`` and what else the template knows; plain JSON values.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: JSON schemas of functions the model may call, for templates that take them.
            variables: Further values the template knows by name.

        Raises:
            InvalidInputError: there is no message, one has no role or is no JSON value, the template has no such
                variable, or refuses the messages.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise InvalidInputError("a chat needs at least one message, in a list")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidInputError(
                    f"message {index} is {message!r}: it must be an object with a 'role' that is text"
                )
        if unknown := sorted(set(variables or ()) - self._variables):
            raise InvalidInputError(
                f"the model's chat template has no variable {unknown[0]!r} that could be set (there are: "
                f"{', '.join(sorted(self._variables)) or 'none'})"
            )
        known = {
            **self._special_tokens,
            **_json_only(variables or {}),
            "messages": _json_only(list(messages)),
            "tools": _json_only(list(tools)) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(known)
        except _RENDER_ERRORS as error:
            raise InvalidInputError(f"the model's chat template refuses these messages: {error}") from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as token ids, where control tokens come from the template alone.

        The text of a control token inside a message or a tool stays text, so that no message can end its turn and speak
        for another role. Without such text the ids are those of the rendered text.

        Raises:
            InvalidInputError: as :meth:`render`.
        """
        control = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.control_tokens, key=len, reverse=True))) or "(?!)"
        )
        text = self.render(
            _map_text(messages, lambda value: _fence(control, value)),
            add_generation_prompt=add_generation_prompt,
            tools=_map_text(tools, lambda value: _fence(control, value)),
            variables=variables,
        )
        # A template may cut a fence apart (content.split()); each half still parts the text: nothing joins across it.
        pieces = re.split(f"{_OPEN}({control.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]", text)
        ids = []
        for index, piece in enumerate(pieces):
            if piece:
                ids.extend(tokenizer.encode(piece, allow_special=index % 2 == 0))
        return ids


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML; the parameters are those templates use."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _json_only(value: Any) -> Any:
    """``value`` rebuilt from plain JSON types, so that a template meets no method of any other."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_only(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_only(item) for item in value]
    raise InvalidInputError(f"{value!r} is no JSON value; messages, tools and variables are made of these")


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def _fence(control: re.Pattern[str], text: str) -> str:
    clean = text.replace(_OPEN, "").replace(_CLOSE, "")
    return control.sub(f"{_OPEN}\\g<0>{_CLOSE}", clean)
