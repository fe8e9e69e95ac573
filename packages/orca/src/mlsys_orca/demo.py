"""Orca's step of ``mlsys demo``: three questions to SmolLM2 through our own server and the ``openai`` client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_core.report import Dialogue, Figure, Section, Table

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


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer and when its pieces came."""

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
    with context.progress(f"loading {MODEL}") as update:
        from mlsys_core.serving.http import BackgroundServer, HttpConfig
        from mlsys_core.serving.http.logs import make_logger

        from mlsys_orca.engine import EngineConfig
        from mlsys_orca.loading.load import load_model
        from mlsys_orca.server import make_app, make_service

        loaded = load_model(path, progress=update)
        service = make_service(loaded, MODEL, EngineConfig(num_threads=context.num_threads))
    with (
        (context.work_dir / "orca-server.log").open("w") as log,
        BackgroundServer(make_app(service, HttpConfig(), logger=make_logger("json", stream=log))) as server,
    ):
        load_s = time.perf_counter() - started
        context.console.print(f"{MODEL} at {server.url}/v1, ready after {load_s:.1f} s\n", highlight=False)
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = [_ask(client, question, context) for question in QUESTIONS]
    return _section(answers, load_s, str(loaded.model.dtype).removeprefix("torch."))


def _ask(client: OpenAI, question: str, context: DemoContext) -> Answer:
    context.console.print(f"[bold]> {question}[/bold]", highlight=False)
    sent = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, times, num_tokens = [], [], 0
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            times.append(time.perf_counter() - sent)
            pieces.append(text)
            context.console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    answer = Answer(question, "".join(pieces), num_tokens, tuple(times))
    note = f"{num_tokens} tokens, first after {answer.ttft_s * 1e3:.0f} ms, then {answer.tokens_per_s:.1f} tokens/s"
    context.console.print(f"\n[dim]{note}[/dim]\n", highlight=False)
    return answer


def _section(answers: list[Answer], load_s: float, dtype: str) -> Section:
    dialogues = [Dialogue(answer.question, answer.text, f"{answer.num_tokens} tokens") for answer in answers]
    rows = [
        [str(n), str(answer.num_tokens), f"{answer.ttft_s * 1e3:.0f}", f"{answer.tokens_per_s:.1f}"]
        for n, answer in enumerate(answers, 1)
    ]
    return Section(
        "Orca: chat with a real model",
        [
            f"SmolLM2-135M-Instruct (GGUF Q4_1, computed in {dtype}) on our own OpenAI-compatible server, ready after "
            f"{load_s:.1f} s, asked through the openai client with streaming.",
            *dialogues,
            Table(["answer", "tokens", "first text (ms)", "then tokens/s"], rows),
            Figure(_figure(answers), "Text as it arrived at the client: the slope is the decoding rate."),
        ],
        data={
            "load_s": round(load_s, 3),
            "dtype": dtype,
            "ttft_s": [round(answer.ttft_s, 4) for answer in answers],
            "tokens_per_s": [round(answer.tokens_per_s, 2) for answer in answers],
        },
    )


def _figure(answers: list[Answer]) -> str:
    """Pieces received over time, a line per answer, as SVG."""
    from matplotlib.figure import Figure as MplFigure
    from mlsys_core.plot import to_svg

    figure = MplFigure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for n, answer in enumerate(answers, 1):
        axes.step(answer.piece_times_s, range(1, len(answer.piece_times_s) + 1), where="post", label=f"answer {n}")
    axes.set_xlabel("seconds since the question was sent")
    axes.set_ylabel("pieces received")
    axes.legend()
    return to_svg(figure)
