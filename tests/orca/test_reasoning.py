"""Reasoning: separated from answers in any pieces, before calls too; grammars behind it; how much is asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.conversation import AnswerForm, AnswerReader, read_whole
from mlsys_orca.api.text_stream import Part, joined
from mlsys_orca.text.chat_template import effort_variables, marks_of
from mlsys_orca.text.guides import grammar_of, reasoned

THINK = marks_of("{{ content.split('</think>') }}")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CASES = {
    "closed": ("<think>\nHm, < 3?\n</think>\n\nYes.", False, [("reasoning", "Hm, < 3?"), ("text", "Yes.")]),
    "opened by the prompt": ("Hm.\n</think>\n\nYes.", True, [("reasoning", "Hm."), ("text", "Yes.")]),
    "cut": ("<think>Hm.\n</thi", False, [("reasoning", "Hm.\n</thi")]),
    "none": ("Yes <think> no </think>", False, [("text", "Yes <think> no </think>")]),
    "almost": (" <thin", False, [("text", " <thin")]),
    "empty": ("<think>\n\n</think>\n\nYes.", False, [("text", "Yes.")]),
    "call": (f"<think>a</think>\n{CALL}", False, [("reasoning", "a"), ("call", '{"x": 1}')]),
    "call thought of": (f"<think>{CALL}</think>b", False, [("reasoning", CALL), ("text", "b")]),
}


HARMONY = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{HARMONY}Hm.<|end|><|start|>assistant{FINAL}Yes.", [("reasoning", "Hm."), ("text", "Yes.")]),
        (f"{FINAL}Yes.", [("text", "Yes.")]),
        ("<|channel|>commentary", [("text", "<|channel|>commentary")]),
    ],
)
def test_harmonys_channels_are_reasoning_and_answer(answer: str, expected: list[tuple[str, str]], size: int) -> None:
    marks = marks_of("{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}")
    reader = AnswerReader(AnswerForm(marks=marks))
    parts = [part for i in range(0, len(answer), size) for part in reader.push(answer[i : i + size])]
    assert [(part.kind, part.text) for part in joined([*parts, *reader.finish("stop")])] == expected


@pytest.mark.parametrize("case", CASES)
@given(cuts=st.lists(st.integers(0, 80), max_size=8))
def test_reasoning_is_told_from_the_answer_wherever_the_borders_fall(case: str, cuts: list[int]) -> None:
    text, is_open, expected = CASES[case]
    form = AnswerForm(notation="hermes", marks=THINK, is_open=is_open)
    reader, parts = AnswerReader(form), list[Part]()
    for a, b in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        parts += reader.push(text[a:b])
    parts = joined(parts + reader.finish("stop"))
    assert [(part.kind, part.text) for part in parts] == expected
    assert read_whole(text, form, "stop") == (parts, "call" in dict(expected))


def test_calls_after_the_first_are_left_out_where_one_is_wanted() -> None:
    parts, _ = read_whole(f"{CALL}\n{CALL}", AnswerForm(notation="hermes", only_one=True), "stop")
    assert parts == [Part("call", '{"x": 1}', "f")]


def test_marks_are_those_of_the_template() -> None:
    assert THINK is not None
    assert marks_of("[THINK]").end == "[/THINK]"
    assert marks_of("{{ messages }}") is None


@pytest.mark.parametrize(
    ("kind", "spec", "fits"),
    [
        ("json_schema", True, "{}"),
        ("regex", "a+", "aa"),
        ("lark", 'start: "x" y\ny: "y"', "xy"),
        ("gbnf", 'root ::= "x" | "yy"', "yy"),
    ],
)
def test_a_grammar_holds_behind_the_reasoning(kind, spec, fits) -> None:
    def accepts(text: str, begin: str | None) -> bool:
        grammar = reasoned(grammar_of(kind, spec), begin=begin, end="</think>")
        matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0)
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    opened = [accepts(text, None) for text in (f"hm\n</think>\n\n{fits}", fits, "hm</think>?")]
    assert opened == [True, False, False]
    optional = [accepts(text, "<think>") for text in (f"<think>hm</think>{fits}", fits, f"hm</think>{fits}")]
    assert optional == [True, True, False]


def test_effort_becomes_what_the_template_knows() -> None:
    assert effort_variables(None, known=(), marks=None) == {}
    assert effort_variables("low", known={"enable_thinking", "x"}, marks=THINK) == {"enable_thinking": True}
    both = effort_variables("none", known={"thinking", "reasoning_effort"}, marks=None)
    assert both == {"thinking": False, "reasoning_effort": "none"}
    assert effort_variables("none", known=(), marks=None) == effort_variables("low", known=(), marks=THINK) == {}
    for effort, marks in (("low", None), ("none", THINK)):
        with pytest.raises(InvalidInputError, match="reasoning_effort"):
            effort_variables(effort, known=(), marks=marks)
