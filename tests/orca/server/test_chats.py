"""Chats that continue a message, reason and call, on a model that says anything."""

from __future__ import annotations

import json
from typing import Any

import httpx

THINKS = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a\n<think>\n{% if enable_thinking == false %}\n</think>\n\n{% endif %}{% endif %}"
)
CALLS = (
    "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": "^[ab]{4,8}$"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The deltas of a streamed chat."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def test_a_message_is_continued_to_the_letter(serve) -> None:
    with serve() as (url, _):

        def num_prompt(messages, **options):
            body = {"model": "tiny", "messages": messages, "max_tokens": 1} | options
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            return answer.json()["usage"]["prompt_tokens"] if answer.status_code == 200 else answer.json()["error"]

        begun = [*HI, {"role": "assistant", "content": "ab </s>cd  "}]
        without_end = num_prompt(begun, continue_final_message=True)
        assert without_end == num_prompt(begun, add_generation_prompt=False) - 1, "all but the mark of its end"
        refused = num_prompt(begun, continue_final_message=True, add_generation_prompt=True)
        assert "not both" in refused["message"]
        assert (
            "cannot be continued"
            in num_prompt([{"role": "user", "content": ""}], continue_final_message=True)["message"]
        )


def test_reasoning_that_the_prompt_begins_is_no_content(serve) -> None:
    with serve(template=THINKS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        body = {"model": "tiny", "messages": HI, "max_tokens": 12, "temperature": 0}
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        message = choice["message"]
        assert message["content"] is None
        assert message["reasoning_content"]
        streamed = chunks(client.post("/v1/chat/completions", json=body | {"stream": True}))
        assert "".join(c["delta"].get("reasoning_content", "") for c in streamed) == message["reasoning_content"]
        off = client.post("/v1/chat/completions", json=body | {"reasoning_effort": "none"}).json()["choices"][0]
        assert off["message"]["content"]
        assert off["message"]["reasoning_content"] is None
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["aaaa"]}}}
        shaped = client.post(
            "/v1/chat/completions", json=body | {"reasoning_effort": "none", "response_format": shape}
        ).json()["choices"][0]
        assert (shaped["message"]["content"], shaped["message"]["reasoning_content"]) == ('"aaaa"', None)
        thought = client.post("/v1/chat/completions", json=body | {"response_format": shape}).json()["choices"][0]
        assert thought["message"]["content"] is None, "the shape holds behind the reasoning"
        begun = [*HI, {"role": "assistant", "content": "<think>Hm.</think>So"}]
        on = client.post("/v1/chat/completions", json=body | {"messages": begun, "continue_final_message": True}).json()
        assert on["choices"][0]["message"]["content"], "the reasoning has ended in the message"


def test_arguments_are_streamed_as_they_come(serve) -> None:
    with serve(template=CALLS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        body = {
            "model": "tiny",
            "messages": HI,
            "max_tokens": 80,
            "temperature": 0,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["index"], call["function"]["name"], choice["finish_reason"]) == (0, "f", "tool_calls")
        assert set(json.loads(call["function"]["arguments"])["x"]) <= set("ab")
        streamed = chunks(client.post("/v1/chat/completions", json=body | {"stream": True}))
        deltas = [delta for c in streamed for delta in c["delta"].get("tool_calls", [])]
        assert deltas[0].keys() == {"index", "id", "type", "function"}
        assert deltas[0]["function"] == {"name": "f", "arguments": ""}
        assert all(delta.keys() == {"index", "function"} for delta in deltas[1:])
        assert len(deltas) > 5
        assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
        assert streamed[-1]["finish_reason"] == "tool_calls"
        cut = client.post("/v1/chat/completions", json=body | {"max_tokens": 50}).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        assert call["function"]["arguments"].startswith(cut["message"]["tool_calls"][0]["function"]["arguments"])


MESSAGES = {"model": "tiny", "messages": HI, "max_tokens": 80, "temperature": 0}


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_messages_have_calls_whole_and_streamed(serve) -> None:
    tool = {"name": "f", "input_schema": FUNCTION["parameters"]}
    body = MESSAGES | {"tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    with serve(template=CALLS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        whole = client.post("/v1/messages", json=body).json()
        (block,) = whole["content"]
        assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "f", "tool_use")
        assert set(block["input"]["x"]) <= set("ab")
        events = named_events(client.post("/v1/messages", json=body | {"stream": True}))
        assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
        assert events[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "f", "input": {}}
        pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert len(pieces) > 3
        assert json.loads("".join(pieces)) == block["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        cut = client.post("/v1/messages", json=body | {"max_tokens": 50}).json()
        assert (cut["stop_reason"], cut["content"][0]["type"]) == ("max_tokens", "tool_use")
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "1"}]}
        said = [*HI, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        answer = client.post("/v1/messages", json=body | {"messages": said, "tool_choice": {"type": "none"}})
        assert answer.json()["content"][0]["type"] == "text"
        for wrong, says in (
            ({"tool_choice": {"type": "tool", "name": "g"}}, "none of 'tools'"),
            ({"tool_choice": {"type": "any"}, "tools": []}, "there are no 'tools'"),
            ({"tools": [tool, tool]}, "two functions"),
            ({"messages": [{"role": "user", "content": [block]}]}, "belongs to an assistant"),
        ):
            refused = client.post("/v1/messages", json=body | wrong)
            assert (refused.status_code, says in refused.text) == (400, True), refused.text


def test_messages_think_in_blocks_of_their_own(serve) -> None:
    body = MESSAGES | {"max_tokens": 12}
    with serve(template=THINKS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        whole = client.post("/v1/messages", json=body | {"thinking": {"type": "enabled", "budget_tokens": 5}}).json()
        (block,) = whole["content"]
        assert block["type"] == "thinking"
        events = named_events(client.post("/v1/messages", json=body | {"stream": True}))
        thought = [event["delta"]["thinking"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(thought) == block["thinking"]
        off = client.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}}).json()
        assert [each["type"] for each in off["content"]] == ["text"]


def test_calls_with_tags_are_made_and_read(serve) -> None:
    """Of a model that says anything: an integer and one of two texts, in tags, and as JSON in the answer."""
    template = "{# <tool_call> <function=name> <parameter=name> #}" + CALLS.replace("<tool_call>", "")
    properties = {
        "x": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"type": "string", "enum": ["aa", "bb"]},
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["x", "unit"]}}
    with serve(template=template) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        body = {"model": "tiny", "messages": HI, "max_tokens": 90, "seed": 2, "parallel_tool_calls": False} | {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        assert "error" not in answer, answer
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert (call["function"]["name"], choice["finish_reason"]) == ("f", "length"), "cut within the call's last mark"
        assert (found["x"] in range(10), found["unit"] in ("aa", "bb"), len(found)) == (True, True, 2)
        assert choice["message"]["content"] is None
        streamed = chunks(client.post("/v1/chat/completions", json=body | {"stream": True}))
        deltas = [delta for c in streamed for delta in c["delta"].get("tool_calls", [])]
        assert "".join(delta["function"].get("arguments") or "" for delta in deltas) == call["function"]["arguments"]
        refused = client.post(
            "/v1/chat/completions", json=body | {"tools": [{"type": "function", "function": FUNCTION}]}
        )
        assert refused.status_code == 400
        assert "'pattern'" in refused.json()["error"]["message"]
