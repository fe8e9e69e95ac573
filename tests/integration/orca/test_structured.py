"""Structured output and tool calls: what comes out always fits, whatever a model of 135 million parameters thinks."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
RAIN = [{"role": "user", "content": "Does it rain in Rome?"}]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_schema_is_kept_greedy_and_sampled(ask, temperature):
    answer = ask(
        messages=[{"role": "user", "content": "Invent a person."}],
        temperature=temperature,
        seed=4,
        max_completion_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)


def test_the_clients_own_parser_reads_it(client):
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        is_capital: bool

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Rome?"}],
        response_format=City,
        max_completion_tokens=60,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_json_object_a_regex_a_choice_and_a_grammar(ask, complete):
    text = ask(response_format={"type": "json_object"}, max_completion_tokens=200).choices[0]
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.message.content), dict)
    assert text.message.content.startswith("{")

    def structured(**what):
        return complete("Answer:", temperature=1.2, seed=8, max_tokens=40, extra_body={"structured_outputs": what})

    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", structured(regex=r"[0-9]{3}-[a-f]{2}").choices[0].text)
    assert structured(choice=["yes.", "no (never)"]).choices[0].text in ("yes.", "no (never)")
    assert re.fullmatch(r"(ab){2,5}!", structured(grammar='start: ("ab"){2,5} "!"').choices[0].text)
    assert structured(grammar='root ::= "x" | "yy"').choices[0].text in ("x", "yy")


def test_the_older_names_of_structured_output_mean_the_same(complete):
    def guided(**options):
        return complete("Answer:", seed=8, temperature=1.2, max_tokens=40, extra_body=options).choices[0].text

    assert guided(guided_choice=["yes.", "no (never)"]) in ("yes.", "no (never)")
    assert guided(guided_regex="[0-9]{3}") == guided(structured_outputs={"regex": "[0-9]{3}"})
    jsonschema.validate(json.loads(guided(guided_json=json.dumps(PERSON))), PERSON)
    with pytest.raises(openai.BadRequestError, match="older form"):
        guided(guided_regex="a", structured_outputs={"regex": "a"})


def test_a_stream_of_structured_output_is_the_whole_answer(ask):
    options = {
        "messages": [{"role": "user", "content": "Invent a person."}],
        "max_completion_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    }
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True, **options))
    assert streamed == ask(**options).choices[0].message.content


@pytest.mark.parametrize(
    "what",
    [{"regex": "("}, {"grammar": "start: ("}, {"json": {"type": "nonsense"}}, {"json": {}, "regex": "x"}, {}],
    ids=["regex", "grammar", "schema", "two", "none"],
)
def test_an_invalid_grammar_is_a_400(complete, what):
    with pytest.raises(openai.BadRequestError):
        complete(extra_body={"structured_outputs": what})


@pytest.fixture
def tool_client(tool_url):
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def call(client: openai.OpenAI, **options):
    options = {"messages": RAIN, "temperature": 0, "max_completion_tokens": 80} | options
    return client.chat.completions.create(model=MODEL, **options)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_comes_and_fits(tool_client, choice):
    answer = call(tool_client, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (tool_call,) = message.tool_calls
    if choice != "required":
        assert tool_call.function.name == "get_weather"
    if tool_call.function.name == "get_weather":
        jsonschema.validate(json.loads(tool_call.function.arguments), WEATHER["function"]["parameters"])


def test_a_streamed_call_is_the_whole_one_piece_by_piece(tool_client):
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = call(tool_client, **options).choices[0].message.tool_calls[0]
    pieces, name, finish = [], None, None
    for chunk in call(tool_client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name = delta.function.name or name
            pieces.append(delta.function.arguments)
        finish = chunk.choices[0].finish_reason or finish
    assert (name, "".join(pieces), finish) == (whole.function.name, whole.function.arguments, "tool_calls")
    assert len(pieces) > 3


def test_two_cities_get_two_calls(tool_client):
    asked = [{"role": "user", "content": "Get the weather of Rome, and then the weather of Oslo."}]
    shown = [
        {"id": f"c{i}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
        for i, city in enumerate(("Paris", "Madrid"))
    ]
    before = [
        {"role": "user", "content": "Get the weather of Paris, and then the weather of Madrid."},
        {"role": "assistant", "content": "", "tool_calls": shown},
    ]
    options = {"messages": before + asked, "tools": [WEATHER], "tool_choice": "required"}
    calls = call(tool_client, **options, max_completion_tokens=160).choices[0].message.tool_calls
    assert [made.index for made in calls[:2]] == [0, 1]
    assert json.loads(calls[0].function.arguments)["city"] == "Rome"
    with tool_client.chat.completions.stream(
        model=MODEL, temperature=0, **options, max_completion_tokens=160
    ) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert [made.function.arguments for made in final] == [made.function.arguments for made in calls]


def test_with_a_format_an_answer_is_a_call_or_fits(tool_client):
    city = {"type": "json_schema", "json_schema": {"name": "city", "schema": PERSON}}
    choice = call(tool_client, tools=[WEATHER], response_format=city, max_completion_tokens=120).choices[0]
    if choice.message.tool_calls:
        jsonschema.validate(
            json.loads(choice.message.tool_calls[0].function.arguments), WEATHER["function"]["parameters"]
        )
    else:
        jsonschema.validate(json.loads(choice.message.content), PERSON)


def test_a_strict_function_leaves_text_free(tool_client):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    choice = call(tool_client, tools=[strict]).choices[0]
    for made in choice.message.tool_calls or []:
        jsonschema.validate(json.loads(made.function.arguments), WEATHER["function"]["parameters"])
    assert choice.message.tool_calls or choice.message.content
    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
        call(tool_client, tools=[WEATHER], extra_body={"structured_outputs": {"regex": "a"}})


def test_a_call_and_its_result_are_part_of_the_conversation(tool_client):
    asked = call(tool_client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "It rains."}
    said = [*RAIN, asked.model_dump(exclude_none=True), result]
    answer = call(tool_client, messages=said, tools=[WEATHER], tool_choice="none", max_completion_tokens=20)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_tools_change_the_prompt_and_none_hides_them(tool_url):
    def num_prompt(**options):
        body = {"model": MODEL, "messages": RAIN, "max_tokens": 1} | options
        return httpx.post(f"{tool_url}/v1/chat/completions", json=body, timeout=None).json()["usage"]["prompt_tokens"]

    assert num_prompt(tools=[WEATHER]) > num_prompt() == num_prompt(tools=[WEATHER], tool_choice="none")
