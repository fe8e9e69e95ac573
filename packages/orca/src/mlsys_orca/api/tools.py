"""Tool calls, in the notation of the model's own chat template: what to tell a grammar, and what an answer means.

A template that knows tools shows how the model was taught to call them. Five notations cover most of them; where a
template has none, ``tools`` is refused by name. With ``tool_choice`` "required", or a function's name, a grammar sees
to it that the answer is a call with arguments that fit. With "auto" the answer is read for what it is; a grammar sees
to it that calls fit where a function is strict, and that the answer is a call or fits where it has a format.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.api.tagged_calls import tagged_rules
from mlsys_orca.text.guides import JSON_STYLE, Grammar, check_names, grammar_of

Notation = Literal["hermes", "tagged", "mistral", "mistral-args", "llama3"]
# Notation -> the text that a call begins with, what ends it, and what the arguments are called.
MARKS: dict[Notation, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>", "arguments"),
    "tagged": ("<tool_call>", "</tool_call>", "parameter"),
    "mistral": ("[TOOL_CALLS]", "", "arguments"),
    "mistral-args": ("[TOOL_CALLS]", "", "arguments"),
    "llama3": ('{"name":', "", "parameters"),
}
SEPARATORS: dict[Notation, str] = {
    "hermes": "\n",
    "tagged": "\n",
    "mistral": ",",
    "mistral-args": "",
    "llama3": ";",
}  # between two calls


# Marks of notations that are not read here, some in templates that have a mark of ours, too: GLM's, Hunyuan's, Seed's,
# DeepSeek's, Phi-4's and Granite 3's, Command R's, Kimi's, Nemotron's, FunctionGemma's.
_OTHERS = (
    "<arg_key>",
    "<tool_sep>",
    "<seed:tool_call>",
    "<\uff5ctool",
    "<|tool_call|>",
    '"tool_name"',
    "<|tool_call_begin|>",
    "<TOOLCALL>",
    "<start_function_call>",
)


def notation_of(template: str) -> Notation | None:
    """Return the notation in which a chat template, as Jinja text, writes tool calls; None: none that is known here.

    Example:
        >>> notation_of("{% if tools %}... within <tool_call></tool_call> tags ...{% endif %}")
        'hermes'
    """
    if "tools" not in template or any(mark in template for mark in _OTHERS):
        return None
    if "<tool_call>" in template:
        return "tagged" if "<function=" in template and "<parameter=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral-args" if "[ARGS]" in template else "mistral"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else None


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
        InvalidInputError: a schema cannot be read.
    """
    begin, end, arguments = MARKS[notation]
    check_names([function.get("parameters") for function in functions])
    if notation == "tagged":
        functions = [{**function, "parameters": _closed(function.get("parameters"))} for function in functions]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: _closed(function.get("parameters")),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    called = _any_of(calls)
    one = tagged_rules(functions) if notation == "tagged" else [_json_rule("object", called)]
    if otherwise == "text":
        return _calls_in_text(notation, calls, one, only_one=only_one)
    match notation:
        case "hermes" | "tagged":
            rules = [f'call: "{begin}\\n" object "\\n{end}"', *one]
        case "mistral-args":
            rules = _named_rules(calls, begin)
        case "mistral":
            bound = {"minItems": 1} | ({"maxItems": 1} if only_one else {})
            rules = [f'call: "{begin}" list', _json_rule("list", {"type": "array", "items": called} | bound)]
        case "llama3":
            rules = [_json_rule("call", called if otherwise is None else {"anyOf": [called, otherwise]})]
    start = "start: call"
    if notation != "mistral" and not only_one:  # whose calls are one list
        start += {"llama3": ' ("; " call)*', "mistral-args": " call*"}.get(notation, ' ("\\n"? call)*')
    if otherwise is not None and notation != "llama3":
        start += " | answer"
        rules.append(_json_rule("answer", otherwise))
    return grammar_of("lark", "\n".join([start, *rules]))


def _closed(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments without others than it names, unless it speaks of others."""
    schema = schema or {"type": "object", "properties": {}}
    open_words = {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    }
    return (
        schema if open_words & schema.keys() or "properties" not in schema else schema | {"additionalProperties": False}
    )


def _calls_in_text(notation: Notation, calls: list[dict[str, Any]], one: list[str], *, only_one: bool) -> Grammar:
    """Return a grammar of any text, in which what begins as a call is one of ``calls``, which are schemas.

    ``one``: rules of one call, ``object``.
    """
    begin, end, arguments = MARKS[notation]
    if notation == "llama3":  # an answer is a call or is none
        rules = ["start: called | TEXT", r'TEXT: /(?s:.*)/ & ~/\s*\{\s*"name"\s*:(?s:.*)/']
        rules.append("called: call" if only_one else 'called: call ("; " call)*')
        rules.append("call: " + " | ".join(f"HEAD_{i} arguments_{i} /\\}}/" for i in range(len(calls))))
        for i, call in enumerate(calls):  # one word up to the arguments, or it would be read as text
            name = json.dumps(call["properties"]["name"]["const"])
            head = f'{begin} {name}, "{arguments}": '
            rules.append(f"HEAD_{i}: {json.dumps(head)}")
            rules.append(_json_rule(f"arguments_{i}", call["properties"][arguments]))
        return grammar_of("lark", "\n".join(rules))
    called = _any_of(calls)
    mark = begin.replace("[", r"\[").replace("]", r"\]")
    several = "?" if only_one or notation == "mistral" else "*"
    rules = [
        f"start: (said call){several} REST",
        f"said[lazy]: /(?s:.*){mark}/",  # ends where a call begins
        f"REST: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/",
    ]
    if notation == "mistral":
        bound = {"minItems": 1} | ({"maxItems": 1} if only_one else {})
        rules.append(_json_rule("call", {"type": "array", "items": called} | bound))
    elif notation == "mistral-args":
        rules += _named_rules(calls, "")
    else:
        rules += [f'call: "\\n" object "\\n{end}"', *one]
    return grammar_of("lark", "\n".join(rules))


def _named_rules(calls: list[dict[str, Any]], begin: str) -> list[str]:
    """Return the rules of ``call``: ``begin``, one of the functions' names, its mark and its arguments."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(calls)))]
    for number, call in enumerate(calls):
        head = json.dumps(f"{begin}{call['properties']['name']['const']}[ARGS]")
        rules.append(f"call_{number}: {head} arguments_{number}")
        rules.append(_json_rule(f"arguments_{number}", call["properties"]["arguments"]))
    return rules


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _json_rule(name: str, schema: Any) -> str:
    whole = {"type": "object"} if schema is True else schema or {"not": {}}  # what True and False stand for
    return f"{name}: %json {json.dumps(whole | {'x-guidance': JSON_STYLE})}"


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
