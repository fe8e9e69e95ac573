"""Tool calls with a tag for each argument, whose texts stand without quotes: Qwen3-Coder's and Qwen3.5's notation.

``<function=NAME>``, then for each argument ``<parameter=NAME>``, its value on lines of its own and ``</parameter>``,
then ``</function>``. What a value is, the function's schema says: text, or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.text.guides import JSON_STYLE

Function = Mapping[str, Any]  # a ``name`` and its ``parameters``, a JSON schema

_NAME = re.compile(r"\s*<function=([^>\n]+)>")
_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None}  # Python's, as some models write them
_TEXT = r"/(?s:.*)\n<\/parameter>\n/"  # lazy: ends at the first end
_OPEN = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties", "propertyNames")
_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")


def tagged_calls_of(block: str, functions: Sequence[Function], *, is_cut: bool = False) -> list[tuple[str, str]] | None:
    r"""Return the name and the arguments, as JSON, of the call in ``block``; None: it is no call.

    Args:
        block: What stands between the call's marks.
        functions: Those that may be called; arguments of others are JSON where they can be.
        is_cut: True if the answer ended within the call: it has the arguments that are complete.

    Example:
        >>> tagged_calls_of("<function=f>\n<parameter=x>\n5\n</parameter>\n</function>", [])
        [('f', '{"x": 5}')]
    """
    head = _NAME.match(block)
    if head is None or not (is_cut or block.rstrip().endswith("</function>")):
        return None
    schema = next((each.get("parameters") or {} for each in functions if each["name"] == head[1]), {})
    properties = schema.get("properties") or {}
    arguments = {name: _value(text, _kind(properties.get(name, {}), schema)) for name, text in _ARGUMENT.findall(block)}
    return [(head[1], json.dumps(arguments, ensure_ascii=False))]


def tagged_rules(functions: Sequence[Function]) -> list[str]:
    """Return rules of a Lark grammar, the first of which, ``object``, is a call of one of ``functions``.

    Raises:
        InvalidInputError: a schema asks for what texts without quotes are not held to.
    """
    rules = ["object: " + " | ".join(f"function_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        rules += _rules_of(function, number)
    return rules


def _rules_of(function: Function, number: int) -> list[str]:
    schema, name = function.get("parameters") or {}, function["name"]
    if words := [word for word in _OPEN if word in schema]:
        raise InvalidInputError(
            f"the parameters of {name!r} have {words[0]!r}; calls of this template have named arguments, so that a "
            "schema has 'properties' alone"
        )
    begin, rules, parts = json.dumps(f"<function={name}>\n"), list[str](), list[str]()
    required = schema.get("required") or []
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        if not re.fullmatch(r"[^>\n]+", key):
            raise InvalidInputError(f"the parameter {key!r} of {name!r} cannot be named in calls of this template")
        rule = f"argument_{number}_{index}"
        rules += _argument_rules(rule, key, value, schema, name)
        parts.append(rule if key in required else f"{rule}?")
    if schema.get("additionalProperties", "properties" not in schema and bool(schema)):
        parts.append(f"other_{number}*")
        rules += [f'other_{number}: "<parameter=" /[^>\\n]+/ ">\\n" text_{number}', f"text_{number}[lazy]: {_TEXT}"]
    return [" ".join([f"function_{number}: {begin}", *parts, '"</function>"']), *rules]


def _argument_rules(rule: str, key: str, value: Any, schema: Mapping[str, Any], name: str) -> list[str]:
    """Return the rules of one argument, the first of which is called ``rule``."""
    begin, end = json.dumps(f"<parameter={key}>\n"), r'"\n</parameter>\n"'
    kind, seen = _kind(value, schema), _resolved(value, schema)
    texts = seen.get("enum", [seen["const"]] if "const" in seen else None)
    if kind == "text" and texts is not None:
        return [f"{rule}: {begin} ({' | '.join(json.dumps(text) for text in texts)}) {end}"]
    if kind == "json":
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        return [
            f"{rule}: {begin} value_{rule} {end}",
            f"value_{rule}: %json {json.dumps({**value, **shared, 'x-guidance': JSON_STYLE})}",
        ]
    if words := [word for word in _OF_TEXTS if word in seen]:
        raise InvalidInputError(
            f"the parameter {key!r} of {name!r} has {words[0]!r}; calls of this template have texts without quotes, "
            "which cannot be held to it: leave it out, or list the texts as an 'enum'"
        )
    return [f"{rule}: {begin} text_{rule}", f"text_{rule}[lazy]: {_TEXT}"]


def _kind(value: Any, schema: Mapping[str, Any]) -> Literal["text", "json", "either"]:
    """Return what an argument of schema ``value`` is, of the parameters' ``schema``."""
    seen = _resolved(value, schema)
    types = seen.get("type")
    if types is None and (texts := seen.get("enum")):
        types = ["string" if isinstance(text, str) else "null" for text in texts]
    types = {types} if isinstance(types, str) else set(types or ())
    if types == {"string"}:
        return "text"
    return "json" if types and "string" not in types else "either"


def _resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``value``, or what it refers to among the definitions of ``schema``; no more than one step."""
    if not isinstance(value, Mapping):
        return {}
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(value.get("$ref", "")))
    target = (schema.get(found[1]) or {}).get(found[2]) if found else None
    return target if isinstance(target, Mapping) else value


def _value(text: str, kind: Literal["text", "json", "either"]) -> Any:
    if kind == "text":
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
