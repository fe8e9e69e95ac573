"""Orca's step of ``mlsys demo``: SmolLM2 behind our own server, asked through the ``openai`` client.

First three questions one after another, streamed; then eight at once, and the picture of the iterations they shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_core.plugins.loading import LoadContext
from mlsys_core.profiling import Recorder
from mlsys_core.report import Dialogue, Figure, Section, Story, Table
from mlsys_orca.engine.iteration_trace import Iteration, iterations_of

if TYPE_CHECKING:
    from mlsys_core.demo import DemoContext
    from openai import OpenAI

MODEL = "smollm2-135m-instruct"
QUESTIONS = (
    "Why do plants need sunlight?",
    "Give me three tips for writing clear code.",
    "What is machine learning?",
)
MAX_TOKENS = 128
AT_ONCE = (
    "Why is the sky blue?",
    "Name two colours.",
    "What is a cat?",
    "What is the capital of France?",
    "Say hello in Spanish.",
    "How do bees make honey?",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
)
MAX_TOKENS_AT_ONCE = 48
GAP_S = 0.05  # between two of the eight: all are there before the first has ended


def run(context: DemoContext) -> Section:
    """Load the model, serve it on a free port, ask, print, stop.

    Raises:
        MissingDependencyError: the model's wheel or the ``openai`` client is not installed.
    """
    try:
        from openai import OpenAI
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "the demo asks through the openai client: pip install 'mlsys-orca[demo]'"
        ) from error
    path = resolve_model(MODEL, settings().cache_dir)
    started = time.perf_counter()
    recorder = Recorder()
    with context.progress(f"loading {MODEL}") as update:
        from mlsys_orca.api.server import make_app, make_service
        from mlsys_orca.engine.engine import EngineConfig
        from mlsys_orca.loading.load import load_by_name
        from mlsys_serving.http import BackgroundServer, HttpConfig
        from mlsys_serving.http.record import make_logger

        loaded = load_by_name(path, LoadContext(device=context.device, progress=update))
        config = EngineConfig(max_batch_size=len(AT_ONCE), num_threads=context.num_threads)
        service = make_service(loaded, MODEL, config, recorder=recorder)
    with (
        (context.work_dir / "orca-server.log").open("w") as log,
        BackgroundServer(make_app(service, HttpConfig(), logger=make_logger("json", stream=log))) as server,
    ):
        load_s = time.perf_counter() - started
        context.console.print(f"{MODEL} at {server.url}/v1, ready after {load_s:.1f} s\n", highlight=False)
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai:
            answers = [_ask(Client(openai, MODEL, MAX_TOKENS), question, context) for question in QUESTIONS]
            recorder.recording(clear=True)  # the picture is of the eight alone
            asked = time.perf_counter()
            at_once = _ask_at_once(Client(openai, MODEL, MAX_TOKENS_AT_ONCE), context)
            at_once_s = time.perf_counter() - asked
    iterations = iterations_of(recorder.recording())
    return _section(context, answers, at_once, at_once_s, iterations, load_s, str(loaded.model.dtype)[6:])


def _ask(client: Client, question: str, context: DemoContext) -> Answer:
    context.console.print(f"[bold]> {question}[/bold]", highlight=False)
    answer = client.ask(
        question, lambda text: context.console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    )
    note = f"{answer.num_tokens} tokens, first after {answer.ttft_s * 1e3:.0f} ms"
    context.console.print(f"\n[dim]{note}, then {answer.tokens_per_s:.1f} tokens/s[/dim]\n", highlight=False)
    return answer


def _ask_at_once(client: Client, context: DemoContext) -> list[Answer]:
    context.console.print(f"[bold]> {len(AT_ONCE)} questions at once[/bold]", highlight=False)

    def show(answer: Answer) -> None:
        text = f"{answer.question}  {' '.join(answer.text.split())}"
        context.console.print(f"  {text}", highlight=False, markup=False, no_wrap=True, overflow="ellipsis")

    return client.ask_all(AT_ONCE, gap_s=GAP_S, on_answer=show)


def _section(
    context: DemoContext,
    answers: list[Answer],
    at_once: list[Answer],
    at_once_s: float,
    iterations: list[Iteration],
    load_s: float,
    dtype: str,
) -> Section:
    from mlsys_core.plot import save, to_svg
    from mlsys_orca.engine.iteration_plot import iteration_figure

    picture = iteration_figure(iterations, names={answer.answer_id: answer.question for answer in at_once})
    picture_path = context.output_dir / "orca-iterations.png"
    save(picture, picture_path)
    num_tokens = sum(answer.num_tokens for answer in at_once)
    at_once_line = (
        f"{len(at_once)} questions at once: {num_tokens} tokens in {len(iterations)} iterations and {at_once_s:.1f} s, "
        f"{num_tokens / at_once_s:.1f} tokens/s"
    )
    context.console.print(f"[dim]{at_once_line}; picture: {picture_path}[/dim]\n", highlight=False, soft_wrap=True)
    rows = [
        [str(n), str(answer.num_tokens), f"{answer.ttft_s * 1e3:.0f}", f"{answer.tokens_per_s:.1f}"]
        for n, answer in enumerate(answers, 1)
    ]
    return Section(
        "Orca: chat with a real model",
        [
            Story(
                f"SmolLM2-135M-Instruct (GGUF Q4_1, computed in {dtype}) was loaded into our own OpenAI-compatible "
                f"server, ready after {load_s:.1f} s. OpenAI's client asked three questions one by one, then "
                f"{len(AT_ONCE)} at once.",
                "Answers differ in length, and nobody knows by how much. A server that batches whole requests keeps "
                "places for those who have finished and lets the others wait. Orca decides anew after each token.",
                "In the picture a row is a question and a column an iteration of the model. A row ends where its "
                "answer ends, and the iterations behind it get shorter.",
                "vLLM and llama.cpp's server batch by the iteration too; Triton's dynamic batcher forms batches of "
                "whole requests. Compare on your machine: mlsys bench orca-paper, docs/orca-benchmarks.md.",
            ),
            *(Dialogue(answer.question, answer.text, f"{answer.num_tokens} tokens") for answer in answers),
            Table(["answer", "tokens", "first text (ms)", "then tokens/s"], rows),
            f"{at_once_line}. A request joins with the next iteration and leaves with the one that finishes it.",
            Figure(to_svg(picture), "Which request ran in which iteration, as the engine recorded it."),
            *(Dialogue(answer.question, answer.text, f"{answer.num_tokens} tokens") for answer in at_once),
        ],
        data={
            "load_s": round(load_s, 3),
            "dtype": dtype,
            "ttft_s": [round(answer.ttft_s, 4) for answer in answers],
            "tokens_per_s": [round(answer.tokens_per_s, 2) for answer in answers],
            "at_once": {
                "num_tokens": num_tokens,
                "num_iterations": len(iterations),
                "duration_s": round(at_once_s, 3),
                "ttft_s": [round(answer.ttft_s, 4) for answer in at_once],
            },
        },
    )


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
