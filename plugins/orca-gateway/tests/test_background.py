"""Responses in the background: clients come back to them, by themselves or after another server has taken over."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_orca_gateway.extension import open_log
from mlsys_orca_gateway.options import GatewayOptions
from mlsys_orca_gateway.streams.journal import MAX_TRIES, AnswerJournal, Opened
from openai import OpenAI

from tests.orca.server.test_chats import THINKS, named_events

BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "hi",
    "max_output_tokens": 24,
    "temperature": 0,
    "background": True,
}


def until_ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    """Return a response when it has ended."""
    while True:
        response = client.get(f"/v1/responses/{response_id}").json()
        if response["status"] != "in_progress":
            return dict(response)
        time.sleep(0.01)


def plain(response: dict[str, Any]) -> Any:
    """Return what does not differ between two answers to the same request."""
    content = [item["content"] for item in response["output"]]
    return content, response["status"], response["usage"]["output_tokens"]


@pytest.fixture
def expected(serve) -> Any:
    with serve(template=THINKS) as (url, _):
        whole = httpx.post(f"{url}/v1/responses", json=BODY | {"background": False}, timeout=None).json()
        assert whole["background"] is False
        return plain(whole)


def test_it_is_answered_at_once_and_asked_for_later(serve, expected) -> None:
    with serve(template=THINKS) as (url, _), OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        begun = client.responses.create(**BODY)
        assert begun.status in {"in_progress", "queued"}
        assert begun.output == []
        while (whole := client.responses.retrieve(begun.id)).status in {"in_progress", "queued"}:
            time.sleep(0.01)
        assert plain(whole.model_dump()) == expected
        assert whole.background


def test_its_events_go_on_behind_any_of_them(serve) -> None:
    with serve(template=THINKS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        events = named_events(client.post("/v1/responses", json=BODY | {"stream": True}))
        response_id = events[0]["response"]["id"]
        for number in (-1, 0, 7, len(events) - 2, len(events) - 1):
            path = f"/v1/responses/{response_id}?stream=true&starting_after={number}"
            assert named_events(client.get(path)) == events[number + 1 :]


def test_a_client_that_leaves_does_not_end_it(serve, expected) -> None:
    with serve(template=THINKS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        with client.stream("POST", "/v1/responses", json=BODY | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    response_id = json.loads(line[6:])["response"]["id"]
                    break
        assert plain(until_ended(client, response_id)) == expected


def test_it_can_be_cancelled(serve) -> None:
    with serve(template=THINKS) as (url, engine), OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        goes_on = threading.Event()
        engine.core.loop.call(lambda: bool(goes_on.wait()))  # it answers nobody before
        begun = client.responses.create(**BODY)
        ended = client.responses.cancel(begun.id)
        goes_on.set()
        assert ended.status == "cancelled"
        while engine.num_unfinished:
            time.sleep(0.01)
        assert client.responses.retrieve(begun.id).status == "cancelled"
        assert client.responses.cancel(begun.id).status == "cancelled"
        with httpx.Client(base_url=url) as plain_client:
            after = plain_client.post("/v1/responses", json=BODY | {"previous_response_id": begun.id})
            assert (after.status_code, after.json()["error"]["code"]) == (409, "response_not_ended")


@pytest.mark.parametrize(
    ("more", "message"),
    [({"store": False}, "'background' needs an answer that is kept"), ({"background": 1}, "background")],
)
def test_what_cannot_be_is_refused(serve, more, message) -> None:
    with serve(template=THINKS) as (url, _):
        refused = httpx.post(f"{url}/v1/responses", json=BODY | more)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_only_who_asked_sees_it(serve) -> None:
    with serve(template=THINKS, http={"api_keys": ["one", "two"]}) as (url, _), httpx.Client(base_url=url) as client:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        response_id = client.post("/v1/responses", json=BODY, headers=one).json()["id"]
        path = f"/v1/responses/{response_id}"
        assert client.get(path, headers=one).status_code == 200
        for answer in (
            client.get(path, headers=two),
            client.delete(path, headers=two),
            client.post(f"{path}/cancel", headers=two),
            client.post("/v1/responses", json=BODY | {"previous_response_id": response_id}, headers=two),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert client.delete(path, headers=one).json()["deleted"]


def test_the_next_server_has_it(serve, expected, tmp_path: Path) -> None:
    journal = GatewayOptions(journal=tmp_path)
    with serve(template=THINKS, journal=journal) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        ended_id = client.post("/v1/responses", json=BODY).json()["id"]
        until_ended(client, ended_id)
        whole_id = client.post("/v1/responses", json=BODY | {"background": False}).json()["id"]
        dropped_id = client.post("/v1/responses", json=BODY | {"background": False}).json()["id"]
        client.delete(f"/v1/responses/{dropped_id}")
        events = named_events(client.post("/v1/responses", json=BODY | {"stream": True}))
        running_id = client.post("/v1/responses", json=BODY).json()["id"]
    with serve(template=THINKS, journal=journal) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        for response_id in (ended_id, whole_id, running_id):
            assert plain(until_ended(client, response_id)) == expected
        assert client.get(f"/v1/responses/{dropped_id}").status_code == 404
        path = f"/v1/responses/{events[0]['response']['id']}?stream=true&starting_after=3"
        assert named_events(client.get(path)) == events[4:]


@pytest.mark.parametrize("num_tries", [2, 3])
def test_an_answer_that_ends_every_server_is_given_up(serve, tmp_path: Path, num_tries: int) -> None:
    key = "0123456789abcdef" * 2
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 5, "stream": True}

    async def write() -> None:
        with open_log(options) as log:
            journal = AnswerJournal(log)
            await journal.accept(Opened(key, "/v1/completions", json.dumps(body).encode(), "", 1, 2))
            for _ in range(num_tries):
                journal.take_up(journal.answers()[0])

    options = GatewayOptions(journal=tmp_path)
    asyncio.run(write())
    with serve(journal=options) as (url, _):
        answer = httpx.get(f"{url}/v1/streams/{key}")
        if num_tries < MAX_TRIES:
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")
            assert f'"id":"cmpl-{key}"' in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")
    with open_log(options) as log:
        assert len(AnswerJournal(log).answers()) == (num_tries < MAX_TRIES)
