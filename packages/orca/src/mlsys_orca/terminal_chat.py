"""A conversation in the terminal, over the same service that the HTTP routes use."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import typer

from mlsys_orca.openai.requests import ChatCompletionRequest, Message
from mlsys_orca.openai.service import ModelService


async def converse(
    service: ModelService, prompt: str | None, *, system: str | None, temperature: float, max_tokens: int
) -> None:
    """Ask ``prompt``, or read questions until an empty line, and print the answers as they come."""
    messages = [Message(role="system", content=system)] if system else []
    while True:
        question = prompt or await asyncio.to_thread(_read_question)
        if not question:
            return
        messages.append(Message(role="user", content=question))
        body = ChatCompletionRequest(
            model=service.name, messages=messages, temperature=temperature, max_completion_tokens=max_tokens
        )
        messages.append(Message(role="assistant", content=await _print_answer(service, body)))
        if prompt:
            return


def _read_question() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


async def _print_answer(service: ModelService, body: ChatCompletionRequest) -> str:
    pieces = []
    async with aclosing(service.chat(body).deltas) as deltas:
        async for delta in deltas:
            typer.echo(delta.text, nl=False)
            pieces.append(delta.text)
    typer.echo()
    return "".join(pieces)
