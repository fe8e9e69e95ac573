"""The target for servers: one POST per request, answered by an OpenAI-style event stream or by one JSON document.

Imports an HTTP client, so take it by its module name. The load generator bounds connections and time; this module only
speaks the protocol and names what went wrong: ``connect``, ``timeout``, ``http_STATUS``, ``disconnect`` (cut off
in the middle), ``server`` (an error event within the stream), ``protocol`` (an answer of another kind than asked for).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

import httpx
from httpx_sse import EventSource, SSEError
from mlsys_core.errors import InvalidInputError

from mlsys_bench.workload.targets import OnToken, Outcome, synthetic_prompt
from mlsys_bench.workload.trace import TraceItem

RequestBuilder: TypeAlias = Callable[[TraceItem], Mapping[str, Any]]  # -> the JSON body
AnswerReader: TypeAlias = Callable[[Any], Outcome]  # the JSON document of the answer ->

# Below the usual servers' 5 s: a connection kept longer may be closed from the other side just as it is used again.
_KEEPALIVE_EXPIRY_S = 2.0
_MAX_DETAIL_CHARS = 300


class HttpTarget:
    """Posts JSON to one URL.

    Args:
        url: address of the server, ``http://`` or ``https://``.
        build_body: makes a request's JSON body.
        stream: whether answers are event streams as OpenAI's API defines them; else they are single JSON documents.
        read_answer: with ``stream=False``, draws token counts from the answer's document; None: there are none.
        headers: sent with every request.
        keep_output: keep the generated text of streams in the outcomes.

    Raises:
        InvalidInputError: ``url`` is none.

    Example:
        >>> target = HttpTarget("http://127.0.0.1:8000/predict", lambda item: {"length": item.num_input_tokens})
    """

    def __init__(
        self,
        url: str,
        build_body: RequestBuilder,
        *,
        stream: bool = False,
        read_answer: AnswerReader | None = None,
        headers: Mapping[str, str] | None = None,
        keep_output: bool = False,
    ) -> None:
        self._url = _checked(url)
        self._build_body = build_body
        self._stream = stream
        self._read_answer = read_answer or (lambda document: Outcome())  # noqa: ARG005
        self._headers = dict(headers or {})
        self._keep_output = keep_output
        self._client = httpx.AsyncClient(
            timeout=None,
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_EXPIRY_S),
            verify=self._url.scheme == "https",  # loading certificates takes long; plain HTTP has no use for them
            trust_env=False,  # no proxy between the generator and what it measures
        )

    @classmethod
    def openai(
        cls,
        base_url: str,
        *,
        model: str,
        api: Literal["completions", "chat"] = "completions",
        stream: bool = True,
        api_key: str | None = None,
        ignore_eos: bool = False,
        keep_output: bool = False,
    ) -> HttpTarget:
        """Return a target for ``POST base_url/completions`` or ``base_url/chat/completions``.

        Args:
            base_url: up to and with the version, e.g. ``http://127.0.0.1:8000/v1``.
            model: the model's name at the server.
            api: plain completion, or chat with one user message.
            stream: ask for tokens as they are made; without it there is no time to first token.
            api_key: sent as bearer token.
            ignore_eos: ask for exactly the trace's number of output tokens, as the papers' experiments do; an extension
                that many servers know and some refuse.
            keep_output: keep the generated text.
        """
        if api not in ("completions", "chat"):
            raise InvalidInputError(f"api is {api!r}: allowed are 'completions' and 'chat'")

        def build_body(item: TraceItem) -> Mapping[str, Any]:
            text = item.prompt
            if text is None:
                text = synthetic_prompt(item.num_input_tokens, seed=item.index)
            content = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
            body: dict[str, Any] = {"model": model, **content, "max_tokens": item.num_output_tokens, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            if ignore_eos:
                body["ignore_eos"] = True
            return {**body, **item.extra}

        def read_answer(document: Any) -> Outcome:
            answer = _OpenAIAnswer()
            answer.add(document)
            return answer.outcome(keep_output=keep_output)

        return cls(
            f"{base_url.rstrip('/')}/{'chat/completions' if api == 'chat' else 'completions'}",
            build_body,
            stream=stream,
            read_answer=read_answer,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            keep_output=keep_output,
        )

    async def send(self, item: TraceItem, on_token: OnToken) -> Outcome:
        """See :meth:`mlsys_bench.workload.targets.Target.send`."""
        status: int | None = None
        try:
            body = self._build_body(item)
            async with self._client.stream("POST", self._url, json=body, headers=self._headers) as response:
                status = response.status_code
                outcome = await self._read(response, on_token)
        except httpx.TimeoutException as error:
            outcome = _failure("timeout", error)
        except httpx.ConnectError as error:
            outcome = _failure("connect", error)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            outcome = _failure("disconnect", error)
        except (httpx.HTTPError, SSEError, _UnexpectedAnswerError, ValueError) as error:
            outcome = _failure("protocol", error)
        return dataclasses.replace(outcome, http_status=status)

    async def _read(self, response: httpx.Response, on_token: OnToken) -> Outcome:
        if not response.is_success:
            await response.aread()
            return Outcome(error=f"http_{response.status_code}", detail=response.text[:_MAX_DETAIL_CHARS])
        if not self._stream:
            return self._read_answer(json.loads(await response.aread()))
        answer = _OpenAIAnswer()
        async with aclosing(EventSource(response).aiter_sse()) as events:
            async for event in events:  # to the very end, not only to [DONE]: the connection can then be used again
                if event.data == "[DONE]":
                    answer.is_complete = True
                elif event.data and answer.add(json.loads(event.data)):
                    on_token()
        if not answer.is_complete and answer.error is None:
            return Outcome(error="disconnect", detail="the stream ended without finish_reason or [DONE]")
        return answer.outcome(keep_output=self._keep_output)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class _UnexpectedAnswerError(Exception):
    """The answer is JSON, but not of the shape asked for."""


class _OpenAIAnswer:
    """Sum of a stream's chunks, or of the one document of an answer without stream."""

    def __init__(self) -> None:
        self.is_complete = False
        self.error: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._texts: list[str] = []

    def add(self, chunk: Any) -> bool:
        """Add one chunk; return True if it carries output (a chat's first has only a role, the last only the usage)."""
        _require_object(chunk)
        if chunk.get("error"):
            error = chunk["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return False
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        has_output = False
        for choice in chunk.get("choices") or ():
            _require_object(choice)
            part = choice.get("delta") or choice.get("message") or choice
            _require_object(part)
            text = part.get("content") or part.get("reasoning_content") or part.get("text") or ""
            self._texts.append(str(text))
            has_output = has_output or bool(text or part.get("tool_calls"))
            self.is_complete = self.is_complete or choice.get("finish_reason") is not None
        return has_output

    def outcome(self, *, keep_output: bool) -> Outcome:
        """Return the outcome of a request that got this answer."""
        return Outcome(
            num_output_tokens=self._usage.get("completion_tokens"),
            num_input_tokens=self._usage.get("prompt_tokens"),
            error=None if self.error is None else "server",
            detail=(self.error or "")[:_MAX_DETAIL_CHARS],
            output="".join(self._texts) if keep_output else None,
        )


def _require_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise _UnexpectedAnswerError(f"expected a JSON object, got {value!r}")


def _failure(kind: str, error: Exception) -> Outcome:
    return Outcome(error=kind, detail=(str(error) or type(error).__name__)[:_MAX_DETAIL_CHARS])


def _checked(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInputError(f"{url!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInputError(f"{url!r} is no URL of a server: write it like http://127.0.0.1:8000/v1")
    return parsed
