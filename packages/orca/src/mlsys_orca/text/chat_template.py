"""Render a conversation as the text, or the tokens, that a model was trained to continue.

The template is the model file's own, written in Jinja; it is rendered as the ``transformers`` library does, but in a
sandbox inside a process with bounds (:mod:`.template_worker`), since model files come from anywhere: one for this
process, started when first asked, and again if it was ended. Lines go through pipes, so that nothing here waits with
the interpreter's lock. Used by the front for chat requests. The marks of reasoning that a template shows are found in
its text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import at_fork
from mlsys_orca.text.template_worker import MAX_CPU_S
from mlsys_orca.text.tokenizer import Tokenizer

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """A renderer of chat templates. Thread-safe; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: pipes are not shared with forks
        at_fork(in_child=self._renew_lock)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the worker's answer to one request.

        Raises:
            InvalidInputError: the template refuses it, or takes more time or memory than one may; in its own words.
            ServingError: no process can be started.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                source, sink = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
                source.write(line)
                source.flush()
                reply = sink.readline()
            except OSError:  # it has ended
                reply = b""
            except BaseException:  # broken off in the middle of a line
                self._end(process)
                raise
            if not reply.endswith(b"\n"):
                raise InvalidInputError(self._end(process))
        found: dict[str, Any] = json.loads(reply)
        if "refused" in found:
            raise InvalidInputError(found["refused"])
        return found

    def close(self) -> None:
        """End the process. The next request starts another."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end(self._process)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # whoever held it does not exist in a fork

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                # A preloaded allocator or sanitiser may want more addresses than the worker is given.
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            )
        except OSError as error:
            raise ServingError(f"the process for chat templates cannot be started: {error}") from error
        self._owner = os.getpid()
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Take the process away; returns why it had ended, as far as it is known."""
        self._process = None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                cast(BinaryIO, pipe).close()
            except OSError:  # what was not written yet has no reader
                continue
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {MAX_CPU_S:g} s of processor time"
        return f"the process that renders it ended with status {code}"


renderer = TemplateProcess()  # its owner is this process; it starts with the first template


_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, in transformers' order
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # variables that no client gives


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
        self._clock = clock
        try:
            self._variables = set(renderer.ask(what="variables", source=source)["variables"]) - _OURS
        except InvalidInputError as error:
            raise InvalidInputError(f"the model's chat template cannot be parsed: {error}") from error

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that a client may set."""
        return frozenset(self._variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: ``{"role": ..., "content": ...}`` and what else the template knows; plain JSON values.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: JSON schemas of functions the model may call, for templates that take them.
            variables: Further values the template knows by name.

        Raises:
            InvalidInputError: there is no message, one has no role or is no JSON value, the template has no such
                variable, or refuses the messages.
        """
        text: str = self._ask(messages, add_generation_prompt, tools, variables)["text"]
        return text

    def _ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        continues: bool = False,
        **request: Any,
    ) -> dict[str, Any]:
        if isinstance(messages, (str, Mapping)) or not messages:
            raise InvalidInputError("a chat needs at least one message, in a list")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidInputError(
                    f"message {index} is {repr(message)[:200]}: it must be an object with a 'role' that is text"
                )
        if unknown := sorted(set(variables or ()) - self._variables):
            raise InvalidInputError(
                f"the model's chat template has no variable {unknown[0]!r} that could be set (there are: "
                f"{', '.join(sorted(self._variables)) or 'none'})"
            )
        if continues and not last_text(messages[-1]):
            raise InvalidInputError("the last message cannot be continued: its 'content' is no text")
        known = {
            **self._special_tokens,
            **_json_only(variables or {}),
            "messages": [_with_reasoning(message) for message in _json_only(list(messages))],
            "tools": _json_only(list(tools)) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continues,
        }
        if continues:
            request["continues"] = True
        try:
            return renderer.ask(
                what="render", source=self.source, known=known, now=self._clock().isoformat(), **request
            )
        except InvalidInputError as error:
            raise InvalidInputError(f"the model's chat template refuses these messages: {error}") from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Return the conversation as token ids, where control tokens come from the template alone.

        The text of a control token inside a message or a tool stays text, so that no message can end its turn and speak
        for another role. Without such text the ids are those of the rendered text. With ``continues`` they end with the
        last message's text, which the answer is to go on with.

        Raises:
            InvalidInputError: as :meth:`render`.
        """
        control = list(tokenizer.control_tokens)
        # The template's own text and the texts of control tokens that messages have, in turns; None between halves.
        pieces = self._ask(messages, add_generation_prompt, tools, variables, continues, control=control)["pieces"]
        found = [
            tokenizer.encode_all([piece or "" for piece in pieces[start::2]], allow_special=start == 0)
            for start in (0, 1)
        ]
        return [token_id for index in range(len(pieces)) for token_id in found[index % 2][index // 2]]


def last_text(message: Mapping[str, Any]) -> str:
    """Return the text at the end of a message, whose content is a text or a list of parts; empty if there is none.

    Example:
        >>> last_text({"content": [{"type": "text", "text": "Hi"}]})
        'Hi'
    """
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = content[-1].get("text") if content and isinstance(content[-1], Mapping) else None
    return content if isinstance(content, str) else ""


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return ``message`` with its reasoning under each name that templates read: gpt-oss' reads ``thinking``."""
    thoughts = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _json_only(value: Any) -> Any:
    """Rebuild ``value`` from plain JSON types, so that a template meets no method of any other."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_only(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_only(item) for item in value]
    raise InvalidInputError(f"{repr(value)[:200]} is no JSON value; messages, tools and variables are made of these")


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
