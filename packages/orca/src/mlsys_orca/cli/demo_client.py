"""The demo's client side: questions through the ``openai`` client, one answer at a time or several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer and when its pieces came."""

    answer_id: str  # the server's, which is the engine's request id too
    question: str
    text: str
    num_tokens: int  # as the server's usage says
    piece_times_s: tuple[float, ...]  # seconds after the request was sent

    @property
    def ttft_s(self) -> float:
        """Time to first text."""
        return self.piece_times_s[0]

    @property
    def tokens_per_s(self) -> float:
        """Decoding rate after the first token."""
        return (self.num_tokens - 1) / max(self.piece_times_s[-1] - self.piece_times_s[0], 1e-9)


@dataclass(frozen=True, slots=True)
class Client:
    """Client that asks one model greedily."""

    openai: OpenAI
    model: str
    max_tokens: int  # of an answer

    def ask(self, question: str, on_text: Callable[[str], None] = lambda _: None) -> Answer:
        """Stream one answer; ``on_text`` hears each piece as it comes."""
        sent = time.perf_counter()
        stream = self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_completion_tokens=self.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, times, num_tokens, answer_id = [], [], 0, ""
        for chunk in stream:
            answer_id = chunk.id
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                times.append(time.perf_counter() - sent)
                pieces.append(text)
                on_text(text)
        return Answer(answer_id, question, "".join(pieces), num_tokens, tuple(times))

    def ask_all(self, questions: Sequence[str], *, gap_s: float, on_answer: Callable[[Answer], None]) -> list[Answer]:
        """Ask ``questions`` at once, a thread each, the next one ``gap_s`` seconds after the last.

        ``on_answer`` hears each answer when it is complete, in a thread of that question's. Answers come back in the
        order of ``questions``.
        """

        def ask(question: str) -> Answer:
            answer = self.ask(question)
            on_answer(answer)
            return answer

        with ThreadPoolExecutor(len(questions)) as pool:
            asked = []
            for question in questions:
                asked.append(pool.submit(ask, question))
                time.sleep(gap_s)
            return [each.result() for each in asked]
