"""One live server on the real SmolLM2 for all tests here, in the process of its worker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_orca.api.server import make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_serving.http import HttpConfig

from tests.orca.extended import serving

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Why do plants need sunlight?"}]
# Hermes' manner of tools, over ChatML: as Qwen's templates have it.
TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call functions. They are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call return a JSON object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}{% if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def find(name: str) -> Path:
    """The path of a model that a package holds; skips without it."""
    try:
        return resolve_model(name, Path("/nonexistent"))
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_model(find(MODEL), dtype="fp32")


@pytest.fixture(scope="session")
def url(loaded: LoadedModel) -> Iterator[str]:
    config = EngineConfig(max_batch_size=4, max_model_len=512, policy="chunked", num_draft_tokens=4)
    service = make_service(loaded, MODEL, config)
    with serving(service, HttpConfig(validation_status=400)) as url:
        yield url


@pytest.fixture(scope="session")
def tool_url(loaded: LoadedModel) -> Iterator[str]:
    """The same model under a template that knows tools."""
    with_tools = replace(loaded, chat_template=ChatTemplate(TOOL_TEMPLATE))
    service = make_service(with_tools, MODEL, EngineConfig(max_batch_size=4, max_model_len=512))
    with serving(service, HttpConfig(validation_status=400)) as url:
        yield url


@pytest.fixture(scope="session")
def agent_url(loaded: LoadedModel) -> Iterator[str]:
    """The same with a context for conversations of agents."""
    with_tools = replace(loaded, chat_template=ChatTemplate(TOOL_TEMPLATE))
    service = make_service(with_tools, MODEL, EngineConfig(max_batch_size=4, max_model_len=2048, policy="chunked"))
    with serving(service, HttpConfig(validation_status=400)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(client: openai.OpenAI) -> Callable[..., Any]:
    """A chat of one question; greedy and short by default."""

    def ask(**options: Any) -> Any:
        options = {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 24} | options
        return client.chat.completions.create(model=MODEL, **options)

    return ask


@pytest.fixture
def complete(client: openai.OpenAI) -> Callable[..., Any]:
    """A completion; greedy and short by default."""

    def complete(prompt: Any = "The capital of France is", **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 8} | options
        return client.completions.create(model=MODEL, prompt=prompt, **options)

    return complete


@pytest.fixture
def metric(url: str) -> Callable[[str], float]:
    """Read a metric of the engine, by its name without the prefix."""

    def metric(name: str) -> float:
        pattern = rf'^mlsys_orca_{name}\{{policy="[a-z-]+"\}} (\S+)$'
        return float(re.search(pattern, httpx.get(f"{url}/metrics").text, flags=re.M)[1])

    return metric


@pytest.fixture
def wait_until_idle(metric: Callable[[str], float]) -> Callable[[], None]:
    """Wait until no request and no block is left."""

    def wait_until_idle() -> None:
        while metric("num_requests_unfinished") or metric("kv_blocks_used"):
            time.sleep(0.05)

    return wait_until_idle
