"""Tool calls: read from answers in any pieces, and separated from text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.conversation import AnswerForm, AnswerReader
from mlsys_orca.api.text_stream import Part, joined, text_of
from mlsys_orca.api.tool_parser import ToolParser
from mlsys_orca.api.tools import MARKS, call_grammar, need_notation, notation_of
from mlsys_orca.text.chat_template import ReasoningMarks
from mlsys_orca.text.guides import Grammar

ARGUMENTS = {"city": "Rome </tool", "n": [1, {"x": None}]}
ONE = {"name": "f", "arguments": ARGUMENTS}
LLAMA = {"name": "f", "parameters": ARGUMENTS}
CALL = ("f", json.dumps(ARGUMENTS))
TAGGED = (
    "<tool_call>\n<function=f>\n<parameter=city>\nRome </tool\n</parameter>\n"
    '<parameter=n>\n[1, {"x": null}]\n</parameter>\n</function>\n</tool_call>'
)
ANSWERS = {
    "hermes": (f"Well.\n<tool_call>\n{json.dumps(ONE)}\n</tool_call>\n" * 2, "Well.\nWell.\n", [CALL, CALL]),
    "hermes-beside": (f" \n<tool_call>\n{json.dumps(ONE)}\n</tool_call>" * 2, "", [CALL, CALL]),
    "hermes-turned": (f'<tool_call>{{"arguments": {json.dumps(ARGUMENTS)}, "name": "f"}}</tool_call>', "", [CALL]),
    "hermes-cut": ('<tool_call>{"name": "f", "arguments": {"city": "Ro', "", [("f", '{"city": "Ro')]),
    "hermes-without": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "tagged": (f"Well.\n{TAGGED}\n" * 2, "Well.\nWell.\n", [CALL, CALL]),
    "tagged-cut": (TAGGED[:-40], "", [("f", '{"city": "Rome </tool"}')]),
    "tagged-without": ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    "mistral": (f"[TOOL_CALLS][{json.dumps(ONE)}, {json.dumps(ONE)}]", "", [CALL, CALL]),
    "mistral-args": (
        f"Well. [TOOL_CALLS]f[ARGS]{CALL[1]}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{CALL[1]}",
        "Well. ",
        [CALL, CALL],
    ),
    "mistral-args-cut": ('[TOOL_CALLS]f[ARGS]{"city": "Ro', "", [("f", '{"city": "Ro')]),
    "llama3": (json.dumps(LLAMA), "", [CALL]),
    "llama3-several": (f"{json.dumps(LLAMA)}; {json.dumps(LLAMA)}", "", [CALL, CALL]),
}


TYPED = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "n": {}}}}


def parse(notation: str, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    parser, parts = ToolParser(notation if notation in MARKS else notation.rpartition("-")[0], [TYPED]), list[Part]()
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for a, b in pairwise(borders):
        parts += parser.push(text[a:b])
    whole = joined(parts + parser.finish())
    return text_of(whole, "text"), [(part.name, part.text) for part in whole if part.kind == "call"]


@pytest.mark.parametrize("notation", list(ANSWERS))
@given(cuts=st.lists(st.integers(0, 150), max_size=8))
def test_calls_are_read_wherever_the_borders_fall(notation, cuts):
    text, shown, calls = ANSWERS[notation]
    assert parse(notation, text, cuts) == (shown, calls)


@pytest.mark.parametrize("notation", list(ANSWERS))
@given(at=st.integers(0, 250), cuts=st.lists(st.integers(0, 250), max_size=5), is_open=st.booleans())
def test_an_answer_that_the_budget_cuts_has_no_markup_and_no_finished_call(notation, at, cuts, is_open):
    answer, shown, calls = ANSWERS[notation]
    name = notation if notation in MARKS else notation.rpartition("-")[0]
    marks = ReasoningMarks("<think>", "</think>")
    text = (("" if is_open else "<think>") + "So.</think>" + answer)[:at]
    reader = AnswerReader(AnswerForm(notation=name, functions=(TYPED,), marks=marks, is_open=is_open))
    parts = []
    for a, b in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        parts += reader.push(text[a:b])
    whole = joined(parts + reader.finish("length"))
    assert not reader.has_called
    assert shown.lstrip().startswith(text_of(whole, "text").lstrip())
    assert "So.".startswith(text_of(whole, "reasoning"))
    found = [part for part in whole if part.kind == "call"]
    assert [part.name for part in found] == [name for name, _ in calls][: len(found)]


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser("hermes")
    begun = parser.push('<tool_call>\n{"name": "f", "arguments": {"x": "a}')
    assert begun == [Part("call", name="f"), Part("call", '{"x": "a}')]
    assert parser.is_open
    assert parser.push('\\"}", "y": [') == [Part("call", '\\"}", "y": [')]
    assert parser.push("{}]}}") == [Part("call", "{}]}")]
    assert not parser.is_open
    assert parser.push("\n</tool_call>\nSo.") == [Part("text", "So.")]


@pytest.mark.parametrize("notation", ["hermes", "tagged", "mistral", "mistral-args", "llama3"])
@pytest.mark.parametrize(
    "text",
    [
        "Just text.",
        "a < b <tool",
        "<tool_call>no json</tool_call> after",
        '{"name": 5}',
        '{"na',
        "[TOOL_CALLS] {",
        "",
        " ",
    ],
)
@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_text_that_is_no_call_stays_text(notation, text, cuts):
    assert parse(notation, text, cuts) == (text, [])


def test_notations_are_found_in_templates_that_take_tools():
    assert notation_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert notation_of("{% if tools %}<tool_call>\\n<function=a>\\n<parameter=b>{% endif %}") == "tagged"
    assert notation_of("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert notation_of("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}") == "mistral-args"
    assert notation_of('{{ tools | tojson }} {"name": x, "parameters": y}') == "llama3"
    assert notation_of("<tool_call> but nobody names them") is None
    with pytest.raises(InvalidInputError, match="--chat-template"):
        need_notation("{{ messages }}")


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{{ call.name }}\n<arg_key>{{ k }}</arg_key>",  # GLM-4.5
        "<tool_call>{{ call.name }}<tool_sep>",  # Hunyuan
        '<seed:tool_call><function={{ name }}> "parameters"',  # Seed-OSS
        '<\uff5ctool\u2581call\u2581begin\uff5c>{{ name }} "parameters"',  # DeepSeek
        'Action: ```json [{"tool_name": "a", "parameters": {}}]',  # Command R
        '<|tool_call|>[{"name": "a", "parameters": {}}]',  # Granite 3, Phi-4
    ],
)
def test_notations_of_others_are_refused_and_not_taken_for_one_of_ours(call):
    with pytest.raises(InvalidInputError, match="--chat-template"):
        need_notation("{% if tools %}" + call + "{% endif %}")


FUNCTION = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
}
FITS, FITS_NOT = '{"name": "f", "ARGS": {"x": 1}}', '{"name": "f", "ARGS": {"y": 1}}'
WRITTEN = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "arguments"),
    "mistral": ("[TOOL_CALLS][", "]", "arguments"),
    "llama3": ("", "", "parameters"),
}
ANSWER = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("notation", list(WRITTEN))
def test_grammars_of_calls_that_must_come_and_of_calls_or_a_format(notation):
    begin, end, arguments = WRITTEN[notation]
    fits, fits_not = (begin + call.replace("ARGS", arguments) + end for call in (FITS, FITS_NOT))
    must = call_grammar(notation, [FUNCTION], only_one=True)
    assert [accepts(must, text) for text in (fits, fits_not, '{"a": null}', "Well.")] == [True, False, False, False]
    may = call_grammar(notation, [FUNCTION], only_one=True, otherwise=ANSWER)
    assert [accepts(may, text) for text in (fits, fits_not, '{"a": null}', "Well.")] == [True, False, True, False]
    both = {
        "hermes": f"{fits}\n{fits}",
        "mistral": begin + ", ".join([fits[len(begin) : -1]] * 2) + end,
        "llama3": f"{fits}; {fits}",
    }
    several = call_grammar(notation, [FUNCTION], only_one=False)
    assert [accepts(grammar, both[notation]) for grammar in (several, must)] == [True, False]
    any_object = call_grammar(notation, [FUNCTION], only_one=True, otherwise=True)
    assert accepts(any_object, '{"b": 1}')


def test_a_call_that_may_come_fits_and_text_is_free():
    grammar = call_grammar("hermes", [FUNCTION], only_one=False, otherwise="text")
    call, wrong = (f"<tool_call>\n{c.replace('ARGS', 'arguments')}\n</tool_call>" for c in (FITS, FITS_NOT))
    assert all(accepts(grammar, text) for text in ("", "Well.", "a <tool_c", call, f"Well. {call}\n{call} So."))
    assert not any(accepts(grammar, text) for text in (wrong, f"{call}{wrong}", "x <tool_call> y"))
    assert not accepts(call_grammar("hermes", [FUNCTION], only_one=True, otherwise="text"), call + call)


@pytest.mark.parametrize("notation", list(WRITTEN))
def test_a_strict_call_that_may_come_fits_in_every_notation(notation):
    begin, end, arguments = WRITTEN[notation]
    fits, fits_not = (begin + call.replace("ARGS", arguments) + end for call in (FITS, FITS_NOT))
    grammar = call_grammar(notation, [FUNCTION], only_one=True, otherwise="text")
    assert [accepts(grammar, text) for text in (fits, fits_not, "Well.", "")] == [True, False, True, True]


@pytest.mark.parametrize(
    ("parameters", "fits", "fits_not"),
    [
        (None, "{}", '{"y": 1}'),
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, '{"x": 1}', '{"x": 1, "y": 1}'),
        ({"type": "object", "properties": {}, "additionalProperties": True}, '{"y": 1}', "1"),
        ({"type": "object"}, '{"y": 1}', "1"),
    ],
)
def test_arguments_are_those_that_the_function_names(parameters, fits, fits_not):
    grammar = call_grammar("llama3", [{"name": "f", "parameters": parameters}], only_one=True)
    found = [accepts(grammar, f'{{"name": "f", "parameters": {arguments}}}') for arguments in (fits, fits_not)]
    assert found == [True, False]


SHAPED = {
    "name": "g",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "count": {"type": ["integer", "null"]},
            "place": {"$ref": "#/$defs/Place"},
            "what": {},
        },
        "required": ["text", "unit"],
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
}


def tagged(*arguments: tuple[str, str], name: str = "g") -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


@pytest.mark.parametrize("otherwise", [None, "text", ANSWER], ids=["must", "text", "format"])
def test_tagged_calls_fit_their_functions(otherwise):
    grammar = call_grammar("tagged", [FUNCTION, SHAPED], only_one=otherwise is not None, otherwise=otherwise)
    text, unit = ("text", 'a "b"\n<c>\n'), ("unit", "F")
    fits = [
        tagged(("x", "1"), name="f"),
        tagged(name="f"),
        tagged(text, unit),
        tagged(text, unit, ("count", "null"), ("place", '{"x": 1.5}'), ("what", "anything: {")),
    ]
    fits_not = [
        tagged(("x", '"1"'), name="f"),
        tagged(("y", "1"), name="f"),
        tagged(text),
        tagged(text, ("unit", "K")),
        tagged(text, unit, ("count", "1.5")),
        tagged(text, unit, ("place", "{}")),
        tagged(("x", "1"), name="h"),
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    ]
    assert [accepts(grammar, call) for call in fits] == [True] * len(fits)
    assert [accepts(grammar, call) for call in fits_not] == [False] * len(fits_not)
    assert accepts(grammar, fits[0] + "\n" + fits[2]) is (otherwise is None)


def test_tagged_arguments_are_what_their_schemas_say():
    said = tagged(("text", "5"), ("unit", "F"), ("count", "5"), ("place", '{"x": 1}'), ("what", "True"), ("more", "[1"))
    parser = ToolParser("tagged", [SHAPED])
    (call,) = [part for part in joined(parser.push(said) + parser.finish()) if part.kind == "call"]
    assert call.name == "g"
    found = {"text": "5", "unit": "F", "count": 5, "place": {"x": 1}, "what": True, "more": "[1"}
    assert json.loads(call.text) == found


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "'pattern'"),
        ({"properties": {"a": {"type": "string", "minLength": 2}}}, "'minLength'"),
        ({"properties": {"a>b": {"type": "string"}}}, "cannot be named"),
        ({"anyOf": [{"properties": {}}]}, "'anyOf'"),
    ],
)
def test_what_tagged_calls_are_not_held_to_is_refused(parameters, message):
    with pytest.raises(InvalidInputError, match=message):
        call_grammar("tagged", [{"name": "f", "parameters": {"type": "object", **parameters}}], only_one=True)


@pytest.mark.parametrize("otherwise", [None, "text", ANSWER], ids=["must", "text", "format"])
def test_calls_with_a_name_before_their_arguments_fit(otherwise):
    grammar = call_grammar("mistral-args", [FUNCTION], only_one=otherwise is not None, otherwise=otherwise)
    fits = ['[TOOL_CALLS]f[ARGS]{"x": 1}', "[TOOL_CALLS]f[ARGS]{}"]
    fits_not = ['[TOOL_CALLS]f[ARGS]{"y": 1}', "[TOOL_CALLS]g[ARGS]{}", '[TOOL_CALLS][{"name": "f", "arguments": {}}]']
    assert [accepts(grammar, call) for call in fits + fits_not] == [True] * 2 + [False] * 3
    assert accepts(grammar, "".join(fits)) is (otherwise is None)
    assert accepts(grammar, "Well.") is (otherwise == "text")
