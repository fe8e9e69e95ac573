"""The Python front: the server's answers without a server."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_orca import LLM
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_serving.http import BackgroundServer, HttpConfig

from tests.processes import until

SAMPLED = {"max_tokens": 12, "temperature": 0.8, "seed": 7}


@pytest.fixture
def path(make_gguf: Callable[..., Path]) -> Path:
    return make_gguf()


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, dtype="fp32", threads=1, max_model_len=96) as made:
        yield made


def over_http(path: Path, route: str, **body: Any) -> dict[str, Any]:
    service = make_service(load_model(path, dtype="fp32"), "tiny", EngineConfig(max_model_len=96, policy="chunked"))
    with BackgroundServer(make_app(service, HttpConfig())) as server:
        answer = httpx.post(f"{server.url}{route}", json={"model": "tiny", **body}, timeout=None)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_answers_are_those_of_the_server(llm: LLM, path: Path) -> None:
    prompts = ["hello", "say a", "b c d"]
    theirs = over_http(path, "/v1/completions", prompt=prompts, logprobs=2, n=2, **SAMPLED)["choices"]
    ours = llm.generate(prompts, logprobs=2, n=2, **SAMPLED)
    assert [choice.text for answer in ours for choice in answer.choices] == [choice["text"] for choice in theirs]
    assert [choice.logprobs for answer in ours for choice in answer.choices] == [
        tuple(choice["logprobs"]["token_logprobs"]) for choice in theirs
    ]
    assert all(len(best) >= 2 for best in ours[0].choices[0].top_logprobs or ())

    theirs = over_http(path, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **SAMPLED)
    chat = llm.chat("hi", **SAMPLED)
    assert chat.text == theirs["choices"][0]["message"]["content"]
    assert chat.finish_reason == theirs["choices"][0]["finish_reason"]
    assert chat.num_prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert len(chat.token_ids) == theirs["usage"]["completion_tokens"]


def test_one_gives_one_and_several_give_a_list(llm: LLM) -> None:
    alone = llm.generate("hello", max_tokens=6)
    ids = tuple(llm.generate([5, 6, 7], max_tokens=6).token_ids)
    both = llm.generate([[5, 6, 7], [8]], max_tokens=6)
    assert both[0].token_ids == ids
    assert llm.generate(["hello", "other"], max_tokens=6)[0].token_ids == alone.token_ids
    assert llm.generate([]) == llm.chat([]) == []
    conversation = [{"role": "user", "content": "hello"}]
    assert llm.chat(conversation, max_tokens=6).text == llm.chat("hello", max_tokens=6).text
    assert [answer.text for answer in llm.chat([conversation, "hello"], max_tokens=6)] == 2 * [
        llm.chat("hello", max_tokens=6).text
    ]
    first = alone.choices[0]
    assert first.first_token_s is not None
    assert 0 < first.first_token_s <= first.total_s


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("hello", **SAMPLED))
    whole = llm.generate("hello", **SAMPLED)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]
    chat = llm.stream([{"role": "user", "content": "hello"}], **SAMPLED)
    assert "".join(piece.text for piece in chat) == llm.chat("hello", **SAMPLED).text


def test_who_leaves_a_stream_frees_its_place(llm: LLM) -> None:
    for _ in llm.stream("hello", max_tokens=60, ignore_eos=True):
        break
    engine = llm._service.engine
    while engine.num_unfinished:
        llm.generate("x", max_tokens=1)
    assert engine.counts().num_free_blocks > 0


def test_event_loops_of_others_may_ask(llm: LLM) -> None:
    async def ask() -> tuple[Any, str]:
        answers = await asyncio.gather(
            *(llm.agenerate("hello", **SAMPLED) for _ in range(3)), llm.achat("hello", max_tokens=4)
        )
        pieces = [piece.text async for piece in llm.astream("hello", **SAMPLED)]
        return answers, "".join(pieces)

    answers, streamed = asyncio.run(ask())
    assert {answer.text for answer in answers[:3]} == {streamed} == {llm.generate("hello", **SAMPLED).text}


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: llm.generate(3), "a prompt is a text"),
        (lambda llm: llm.generate([["a"]]), "a prompt is a text"),
        (lambda llm: llm.generate(b"bytes"), "a prompt is a text"),
        (lambda llm: llm.generate(["fine", ""], max_tokens=4), "at least 1 character"),
        (lambda llm: llm.generate(["fine", [99_999]]), "not in the vocabulary"),
        (lambda llm: llm.generate("a", temperature=9), "temperature"),
        (lambda llm: llm.generate("a", nonsense=1), "nonsense"),
        (lambda llm: llm.generate(["fine", "a" * 500], max_tokens=4), "shorten"),
        (lambda llm: llm.generate("a", max_tokens=96), "more were asked for"),
        (lambda llm: llm.generate("a", adapter="none", max_tokens=4), "does not exist here"),
        (lambda llm: llm.generate("a", stream=True), "HTTP endpoints alone"),
        (lambda llm: llm.chat([{"content": "no role"}]), "role"),
        (lambda llm: llm.chat(["fine", [[]]]), "a chat is a question"),
        (lambda llm: llm.stream("a", n=2), "a stream has one answer"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(llm: LLM, ask: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ask(llm)
    assert llm._service.engine.stats.num_new_tokens == 0


def ask_forever(llm: LLM, before: Callable[[], None]) -> None:
    before()
    while True:
        llm.generate(["hello"] * 40, max_tokens=80, ignore_eos=True)


def test_what_is_interrupted_leaves_the_engine(llm: LLM, request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    engine = llm._service.engine
    until(lambda: not engine.num_unfinished)
    interrupter = threading.Thread(target=lambda: (until(lambda: engine.num_unfinished), _thread.interrupt_main()))
    with pytest.raises(KeyboardInterrupt):
        ask_forever(llm, interrupter.start)
    interrupter.join()
    assert llm.generate("hello", max_tokens=4).text == llm.generate("hello", max_tokens=4).text
    while engine.num_unfinished:
        llm.generate("x", max_tokens=1)


def test_what_is_closed_says_so(path: Path) -> None:
    llm = LLM(path, dtype="fp32", threads=1, max_model_len=96)
    stream = llm.stream("hello", max_tokens=60, ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(ServingError, match="closed"):
        llm.generate("hello")


def test_it_shows_itself(llm: LLM) -> None:
    assert "max_model_len=96" in repr(llm)
    assert '<th scope="row">K/V blocks</th>' in llm._repr_html_()


def test_a_missing_model_names_those_there_are() -> None:
    with pytest.raises(InvalidInputError, match="smollm2-135m-instruct"):
        LLM("no-such-model")
