"""Agent frameworks that ``make test-agents`` installs, as their users have them: calls answered, streams, shapes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"
QUESTION = "Why do plants need sunlight?"


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_of_openais_sdk_calls_its_tool_and_answers(agent_url: str, kind: str) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    agents.set_tracing_disabled(True)
    cities: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return f"It rains in {city}."

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{agent_url}/v1", api_key="none")
        settings = agents.ModelSettings(
            temperature=0, max_tokens=200, tool_choice="get_weather", parallel_tool_calls=False
        )
        agent = agents.Agent(
            name="weather",
            instructions="Be brief.",
            model=getattr(agents, kind)(model=MODEL, openai_client=client),
            tools=[get_weather],
            model_settings=settings,
        )
        done = await agents.Runner.run(agent, "What is the weather in Rome?")
        assert [item.type for item in done.new_items] == [
            "tool_call_item", "tool_call_output_item", "message_output_item",
        ]  # fmt: skip
        streamed = agents.Runner.run_streamed(agent, "What is the weather in Oslo?")
        events = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
        arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(arguments) > 2
        assert json.loads("".join(arguments)) == {"city": "Oslo"}
        assert streamed.final_output
        if kind == "OpenAIResponsesModel":
            more = await agents.Runner.run(agent, "In Bonn?", previous_response_id=streamed.last_response_id)
            assert more.final_output

    asyncio.run(run())
    assert cities[:2] == ["Rome", "Oslo"]


@pytest.mark.parametrize("kind", ["chat", "responses", "messages"])
def test_an_agent_of_pydantics_asks_streams_and_gets_a_shape(agent_url: str, kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pip install 'pydantic-ai-slim[anthropic,openai]'")

    async def run() -> None:
        model = _pydantic_model(kind, agent_url)
        settings = {"temperature": 0.0, "max_tokens": 60, "parallel_tool_calls": False}
        agent = ai.Agent(model, model_settings=settings)
        answer = (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as stream:
            assert "".join([piece async for piece in stream.stream_text(delta=True)]) == answer
        shaped = await ai.Agent(model, output_type=City, model_settings=settings).run("Rome is the capital of Italy.")
        assert isinstance(shaped.output, City)

    asyncio.run(run())


def _pydantic_model(kind: str, url: str) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if kind == "messages":
        import anthropic

        client = anthropic.AsyncAnthropic(base_url=url, api_key="none")
        return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)(MODEL, provider=provider)


def test_anthropics_client_calls_a_tool_and_streams_its_input(agent_url: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    tool = {"name": "city", "description": "Note a city.", "input_schema": City.model_json_schema()}
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Note that Rome is the capital of Italy."}],
        "max_tokens": 120,
        "extra_body": {"temperature": 0},
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "city"},
    }
    with anthropic.Anthropic(base_url=agent_url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**options)
        (call,) = whole.content
        assert (call.type, call.name, whole.stop_reason) == ("tool_use", "city", "tool_use")
        assert City.model_validate(call.input)
        with client.messages.stream(**options) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            assert stream.get_final_message().content[0].input == call.input
        assert json.loads("".join(pieces)) == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Noted."}
        said = [
            *options["messages"],
            {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [result]},
        ]
        more = client.messages.create(**options | {"messages": said, "tool_choice": {"type": "none"}})
        assert more.content[0].type == "text"
