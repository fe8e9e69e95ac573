"""The process that renders chat templates: Jinja from model files, with memory and processor time bounded.

A template is a program that came with a model. Jinja's sandbox keeps it from the interpreter's inside, but not from
``'a' * 10**10`` or from loops in loops; only a process can be stopped in the middle of those. So this file runs by
itself, below :mod:`mlsys_orca.text.chat_template`: a line of JSON in, one out, until its input ends. It imports Jinja
and nothing of this project. A request has ``source`` and ``what``: ``"variables"``,
or ``"render"`` with ``known``, ``now`` and perhaps ``control`` and ``continues``. An answer has ``variables``,
``text``, ``pieces`` or, for what was refused, ``refused``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 1.0  # of one request
MAX_MEMORY_NBYTES = 1 << 30  # of addresses
MAX_SOURCE_CHARS = 1 << 20
MAX_TEXT_CHARS = 1 << 25  # of what a template writes
# Noncharacters (never in exchanged text) that fence a control token's text in a message; dropped from messages first.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_HERE = "\ufdd2"  # likewise; stands behind the text of a last message that is to be continued


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _no_clock
    return environment


def _no_clock(pattern: str) -> str:
    raise TemplateError(f"there is no time for {pattern!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write ``value`` as JSON, in place of Jinja's filter, which escapes HTML; templates use these parameters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """Return the template, and the variables that it reads and nobody sets."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"it has {len(source)} characters, and at most {MAX_SOURCE_CHARS} can be")
    environment = _environment()
    template = environment.from_string(source)
    undeclared = meta.find_undeclared_variables(environment.parse(source))
    return template, frozenset(undeclared - environment.globals.keys())


def _render(request: Mapping[str, Any]) -> dict[str, Any]:
    template, _ = _compiled(request["source"])
    known, control = request["known"], None
    now = datetime.fromisoformat(request["now"])
    if request.get("control") is not None:
        control = _control_pattern(tuple(request["control"]))
        for name in ("messages", "tools"):
            known[name] = _map_text(known[name], lambda text: _fence(control, text))
    if request.get("continues"):
        message = known["messages"][-1]
        if isinstance(message["content"], str):
            message["content"] += _HERE
        else:
            message["content"][-1]["text"] += _HERE
    pieces, num_chars = [], 0
    for piece in template.generate(known, strftime_now=now.strftime):
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise TemplateError(f"it writes more than {MAX_TEXT_CHARS} characters")
        pieces.append(piece)
    text = "".join(pieces)
    if request.get("continues"):
        text, found, _ = text.rpartition(_HERE)
        if not found:
            raise TemplateError("it does not show the text of the last message, which is to be continued")
        text = text.replace(_HERE, "")
    if control is None:
        return {"text": text}
    # A template may cut a fence apart (content.split()); each half still parts the text: nothing joins across it.
    return {"pieces": re.split(f"{_OPEN}({control.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]", text)}


@lru_cache(maxsize=4)
def _control_pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_text(item, change) for key, item in value.items()}
    return [_map_text(item, change) for item in value] if isinstance(value, list) else value


def _fence(control: re.Pattern[str], text: str) -> str:
    clean = text.replace(_OPEN, "").replace(_CLOSE, "").replace(_HERE, "")
    return control.sub(f"{_OPEN}\\g<0>{_CLOSE}", clean)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one request; whatever a template does wrong is in it."""
    try:
        if request["what"] == "variables":
            return {"variables": sorted(_compiled(request["source"])[1])}
        return _render(request)
    except MemoryError:
        return {"refused": f"it needs more than {MAX_MEMORY_NBYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"refused": "it is nested too deep"}
    except Exception as error:  # noqa: BLE001 - a template's expressions raise whatever they like
        return {"refused": " ".join(str(error).split())[:500] or type(error).__name__}


@contextmanager
def _bounded_time() -> Iterator[None]:
    """End this process once the block has had its share of the processor."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF, which nothing handles
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    for limit, most in (
        (resource.RLIMIT_AS, MAX_MEMORY_NBYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer until the input ends."""
    _bound_memory()
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else writes to standard output does not get between the lines
    for line in source:
        with _bounded_time():
            try:
                reply = json.dumps(answer(json.loads(line))).encode()
            except MemoryError:
                reply = b'{"refused": "these messages need more memory than a template may take"}'
        sink.write(reply + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()
