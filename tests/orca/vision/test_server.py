"""``mlsys orca serve`` of a model that sees, asked by OpenAI's own client; and the death of its worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.items import parameters_of
from mlsys_orca.api.server import make_service
from mlsys_orca.engine.client import EngineConfig
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_serving.processes import can_supervise

from tests.orca.survival.commands import Served, served
from tests.orca.vision.models import data_url, part, picture
from tests.processes import await_ends, until

QUESTION = [{"type": "text", "text": "What is it?"}]


@pytest.fixture(scope="module")
def server(vision_folder: Callable[[str], Path]) -> Iterator[Served]:
    if (reason := can_supervise()) is not None:
        pytest.skip(reason)
    options = ["--name", "tiny", "--dtype", "fp32", "--max-model-len", "1024"]
    with served(str(vision_folder("smolvlm")), *options) as server:
        yield server


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, *QUESTION]}]
    return {"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": messages, **fields}


def test_every_protocol_takes_images_and_counts_them(server: Served) -> None:
    openai = pytest.importorskip("openai")
    image, second = picture(90, 50, 1), picture(90, 50, 2)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: Any = chat(part(image))
    completion = client.chat.completions.create(**asked)
    other = client.chat.completions.create(**chat(part(second)))
    text = completion.choices[0].message.content
    assert text != other.choices[0].message.content
    assert completion.usage.prompt_tokens == other.usage.prompt_tokens == 141
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == text

    response = client.responses.create(
        model="tiny",
        temperature=0,
        max_output_tokens=12,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(image), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            }
        ],
    )
    assert (response.output_text, response.usage.input_tokens) == (text, 141)

    source = {"type": "base64", "media_type": "image/png", "data": data_url(image).partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, *QUESTION]}]
    message = server.post("/v1/messages", model="tiny", max_tokens=12, temperature=0, messages=messages).json()
    assert (message["content"][0]["text"], message["usage"]["input_tokens"]) == (text, 141)


@pytest.mark.parametrize(
    ("parts", "code", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], None, "nothing is fetched"),
        (
            [part(picture(9, 9, 1)), {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}],
            None,
            "image 2 of 2",
        ),
        ([part(picture(9, 9, seed)) for seed in range(60)], "context_length_exceeded", "60 images"),
        ([part(picture(96, 96, seed)) for seed in range(9)], "context_length_exceeded", "give them the detail 'low'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_the_protocols_words(
    server: Served, parts: list[Any], code: str | None, message: str
) -> None:
    answer = server.post("/v1/chat/completions", **chat(*parts))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert code is None or error["code"] == code


def test_an_image_belongs_to_a_users_message(server: Served) -> None:
    messages = [{"role": "system", "content": [part(picture(9, 9, 1))]}, {"role": "user", "content": "Hi"}]
    answer = server.post("/v1/chat/completions", model="tiny", messages=messages)
    assert answer.status_code == 400
    assert "belongs to a user's message" in answer.json()["error"]["message"]


def test_tokenize_shows_the_tokens_of_images(server: Served) -> None:
    found = server.post("/tokenize", model="tiny", messages=chat(part(picture(90, 50, 1)))["messages"]).json()
    assert found["count"] == 141


def test_an_answer_about_an_image_outlives_its_worker(server: Served) -> None:
    asked = chat(part(picture(96, 64, 3)), max_tokens=300, ignore_eos=True)
    undisturbed = server.post("/v1/chat/completions", **asked).json()
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/chat/completions", **asked)))
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**asked, "stream": True}, timeout=None
    ) as lines:
        for number, _ in enumerate(lines.iter_lines()):
            if number == 5:
                thread.start()
                server.processes("mlsys-worker")[0].kill()
    thread.join()
    assert found[0].json()["choices"] == undisturbed["choices"]
    assert found[0].json()["usage"]["prompt_tokens"] == undisturbed["usage"]["prompt_tokens"]

    def is_counted() -> bool:
        lines = httpx.get(f"{server.url}/metrics", timeout=None).text.splitlines()
        return any(line.startswith("mlsys_orca_worker_deaths") and line.endswith(" 1.0") for line in lines)

    until(is_counted)


def test_a_stream_about_an_image_goes_on_after_the_whole_server_has_died(
    server: Served, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    body = chat(part(picture(96, 64, 3)), max_tokens=200, ignore_eos=True)
    expected = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    options = ["--name", "tiny", "--dtype", "fp32", "--max-model-len", "1024", "--journal", str(tmp_path)]
    with served(str(vision_folder("smolvlm")), *options) as first:
        begun, last_id = stream(first, body, num_ids=5)
        children = psutil.Process(first.process.pid).children(recursive=True)
        first.process.kill()
        first.process.wait()
        await_ends(children)
    assert len(begun) < len(expected)
    with served(str(vision_folder("smolvlm")), *options) as second:
        rest, _ = stream(second, body, last_id=last_id)
    assert begun + rest == expected


def stream(server: Served, body: dict[str, Any], *, num_ids: int = 10**9, last_id: str = "") -> tuple[str, str]:
    """Return the text of a stream's events, those of the first ``num_ids``, and the last event's id."""
    text, ids = "", list[str]()
    headers = {"Last-Event-ID": last_id} if last_id else {}
    asked = {**body, "stream": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=asked, headers=headers, timeout=None) as lines:
        assert lines.status_code == 200
        for line in lines.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "id" and len(ids) == num_ids:
                break
            if kind == "id":
                ids.append(value)
            elif kind == "data" and value != "[DONE]":
                text += "".join(choice["delta"].get("content") or "" for choice in json.loads(value)["choices"])
    return text, ids[-1]


def test_a_model_of_text_alone_says_so(loaded: LoadedModel) -> None:
    service = make_service(loaded, "tiny", EngineConfig())
    with pytest.raises(InvalidInputError, match=r"'tiny' reads text alone: leave the images out, or serve .*smolvlm"):
        parameters_of(chat(part(picture(9, 9, 1))), service)
    service.front.close()
