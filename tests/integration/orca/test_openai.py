"""The real SmolLM2 behind our server, asked through the real ``openai`` client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.processes import reserved_port

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Why do plants need sunlight?"}]


def test_the_answer_makes_sense(ask):
    answer = ask(max_completion_tokens=40)
    assert answer.choices[0].message.content.startswith("Plants need sunlight to survive. They rely on photosynthesis")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40


def test_streamed_and_whole_answers_are_the_same(ask):
    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 10, "it must stream"


def test_without_include_usage_no_chunk_carries_usage(url):
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 2, "stream": True}
    events = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_an_answer_ends_at_the_stop_token(ask):
    answer = ask(messages=[{"role": "user", "content": "Say just: Hello."}], max_completion_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    assert answer.usage.completion_tokens < 200


def test_a_stop_string_cuts_the_answer_and_frees_the_request(ask, wait_until_idle):
    answer = ask(stop=["photosyn"], max_completion_tokens=200)
    assert answer.choices[0].message.content == "Plants need sunlight to survive. They rely on "
    assert answer.choices[0].finish_reason == "stop"
    wait_until_idle()


def test_concurrent_answers_are_those_given_alone(url):
    questions = ["Why is the sky blue?", "Name two colours.", "What is a cat?", "Tell me about Rome.", "Count to five."]

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(question: str) -> str:
                answer = await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_completion_tokens=16,
                )
                return answer.choices[0].message.content

            return [await one(question) for question in questions], await asyncio.gather(*map(one, questions))

    alone, together = asyncio.run(run())
    assert together == alone


def test_a_seed_makes_sampling_reproducible(ask):
    def sample(seed: int) -> str:
        return ask(temperature=1.0, top_p=0.9, seed=seed).choices[0].message.content

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_logprobs_are_those_of_the_chosen_tokens(ask):
    answer = ask(logprobs=True, top_logprobs=2, max_completion_tokens=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[1].logprob <= entry.logprob <= 0


def test_completions_continue_text_and_token_ids_alike(client):
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    text = client.completions.create(prompt="Once upon a time", **options)
    assert text.usage.prompt_tokens == 4
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(prompt="Once upon a time", stream=True, **options)
    )
    assert streamed == text.choices[0].text
    with_logprobs = client.completions.create(prompt="Once upon a time", logprobs=1, **options)
    assert "".join(with_logprobs.choices[0].logprobs.tokens) == text.choices[0].text


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "max_completion_tokens"),
        ({"max_completion_tokens": 511}, openai.BadRequestError, "context is 512 tokens; the prompt has 3"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"presence_penalty": 2.5}, openai.BadRequestError, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "'x' is no id"),
        ({"logit_bias": {"49152": 1}}, openai.BadRequestError, "token id 49152 is not in the vocabulary of 49152"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "'json_schema' goes with"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format"),
        ({"reasoning_effort": "high"}, openai.BadRequestError, "template says nothing of it"),
        ({"store": "yes"}, openai.BadRequestError, "store"),
        ({"extra_body": {"allowed_token_ids": [49152]}}, openai.BadRequestError, "token id 49152 is not in the voc"),
        (
            {"extra_body": {"allowed_token_ids": [5], "guided_regex": "a"}},
            openai.BadRequestError,
            "leave out 'allowed_token_ids'",
        ),
        ({"extra_body": {"guided_json": "{"}}, openai.BadRequestError, "guided_json"),
        ({"prediction": {"type": "content", "content": "x"}}, openai.BadRequestError, "'prediction' is not implem"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "--chat-template"),
        ({"tool_choice": "required"}, openai.BadRequestError, "there are no 'tools'"),
        ({"temperature": "0.5"}, openai.BadRequestError, "temperature"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "only allowed when 'stream' is true"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
        ({"stop": ""}, openai.BadRequestError, "stop"),
        ({"top_logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError,
            "messages.0.content.0: 'type' 'image_url' is not read by this server, which takes text (text)",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(ask, options, error, says):
    with pytest.raises(error, match=re.escape(says)):
        ask(**options)


def test_fields_that_ask_for_nothing_are_fine(ask):
    answer = ask(
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        user="me",
        max_completion_tokens=1,
        store=True,
        metadata={"a": "b"},
        service_tier="flex",
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert answer.usage.completion_tokens == 1


def test_another_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[]", b"null", b'{"model": NaN}', b""])
def test_malformed_bodies_get_the_documented_shape(url, body):
    response = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) >= {"message", "type", "code", "param"}


def test_a_client_that_leaves_frees_its_request(url, metric, wait_until_idle):
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=None) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert metric("num_requests_unfinished") == 1
    wait_until_idle()


def test_a_client_that_leaves_a_whole_answer_frees_its_request(url, wait_until_idle):
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 400}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(None, read=0.1))
    wait_until_idle()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_serve_command_needs_its_key_and_drains_on_sigterm(port: int):
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", MODEL, "--port", str(port)]
    env = {**os.environ, "MLSYS_ORCA_API_KEY": "secret-key"}
    process = subprocess.Popen(
        [*command, "--name", "tiny", "--threads", "1", "--max-model-len", "256"],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        base = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, process.stderr.read()
            try:
                if httpx.get(f"{base}/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="secret-key", max_retries=0)
        stream = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_completion_tokens=40, temperature=0, stream=True
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        finish = [chunk.choices[0].finish_reason for chunk in stream]
        assert finish[-1] == "length", "a running answer is finished before the server ends"
        assert process.wait() == 0
        banner = process.stderr.read()
        assert f"tiny at {base}/v1" in banner
        assert "curl" in banner
        assert "secret-key" not in banner
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_while_the_model_loads_ends_serve_with_one_line():
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", MODEL, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "settings:" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1].strip()
    assert process.returncode == 128 + signal.SIGTERM
    assert said == "mlsys: stopped by SIGTERM before it was ready"


def test_chat_command_answers_one_prompt():
    command = [sys.executable, "-m", "mlsys_core", "orca", "chat", MODEL, "--prompt", "Why do plants need sunlight?"]
    result = subprocess.run(
        [*command, "--max-tokens", "12", "--dtype", "fp32", "--threads", "1"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Plants need sunlight to survive.")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no-such-model"], 2, "neither a known model"),
        ([__file__], 2, "no loader takes it"),
        ([MODEL, "--dtype", "fp8"], 2, "'fp8' is not known"),
        ([MODEL, "--log-format", "xml"], 2, "text or json"),
        ([MODEL, "--port", "99999"], 2, "--port"),
    ],
)
def test_serve_refuses_bad_arguments_in_one_line(arguments, code, says):
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", "--port", "0", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert says in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


def test_a_port_in_use_says_so(url, capfd):
    from mlsys_core.cli.main import run

    port = url.rpartition(":")[2]
    assert run(["orca", "serve", MODEL, "--port", port, "--max-model-len", "64"]) == 1
    assert port in capfd.readouterr().err
