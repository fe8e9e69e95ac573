"""A conversation in the terminal, over the same service that the HTTP routes use: history and commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.chat import ChatCompletionRequest, Message, parameters_of
from mlsys_orca.api.service import ModelService

HELP = """\
/system TEXT   begin anew, with TEXT as the system message (without TEXT: show it)
/clear   begin anew
/exit   leave (so do an empty line and Ctrl-D)"""


@dataclass
class Conversation:
    """History of a conversation, and the settings of its answers."""

    service: ModelService
    messages: list[Message] = field(default_factory=list)
    settings: dict[str, int | float] = field(default_factory=dict)  # of ChatCompletionRequest
    write: Callable[[str], None] = lambda text: typer.echo(text, nl=False)

    async def answer(self, question: str) -> str:
        """Print the answer as it comes, and keep both; an answer that is broken off is not kept."""
        said = [*self.messages, Message(role="user", content=question)]
        parameters, _ = parameters_of(
            ChatCompletionRequest(model=self.service.name, messages=said, **self.settings),  # type: ignore[arg-type]
            self.service,
        )
        generation, pieces = await self.service.start(parameters), list[str]()
        try:
            async for delta in generation.choices[0].deltas:
                self.write(delta.text)
                pieces.append(delta.text)
        finally:
            generation.close()
            self.write("\n")
        self.messages = [*said, Message(role="assistant", content="".join(pieces))]
        return "".join(pieces)

    def obey(self, line: str) -> bool:
        """Do what a line with a slash says; False: leave.

        Raises:
            InvalidInputError: there is no such command, or it cannot be done.
        """
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                self.write(HELP + "\n")
            case "/clear":
                self.messages = self._system()
            case "/system":
                self._set_system(rest)
            case _:
                raise InvalidInputError(f"there is no {command}; /help lists what there is")
        return True

    def _system(self) -> list[Message]:
        return [message for message in self.messages[:1] if message.role == "system"]

    def _set_system(self, text: str) -> None:
        if text:
            self.messages = [Message(role="system", content=text)]
            return
        system = self._system()
        self.write(f"{system[0].content if system else '(none)'}\n")


async def converse(conversation: Conversation, prompt: str | None) -> None:
    """Ask ``prompt`` alone, or read lines until an empty one."""
    if prompt is not None:
        await conversation.answer(prompt)
        return
    while line := await asyncio.to_thread(_read_line):
        try:
            if not line.startswith("/"):
                await conversation.answer(line)
            elif not conversation.obey(line):
                return
        except InvalidInputError as error:
            conversation.write(f"{error}\n")


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
