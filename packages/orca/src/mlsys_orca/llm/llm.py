"""A model as an object that answers: ``LLM(model).generate([...])``.

Over the same engine, policies and request fields as the server; one loop, in a thread of its own, takes the requests of
all callers, plain and asynchronous, and batches them by the iteration.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeGuard, overload

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix.machine import num_cores
from mlsys_core.report import facts_html

from mlsys_orca.llm.answers import Answer, Piece
from mlsys_orca.llm.loop_thread import LoopThread
from mlsys_orca.loading.named import DEFAULT_MODEL

if TYPE_CHECKING:
    from mlsys_orca.api.answers import GenerationParameters
    from mlsys_orca.api.conversation import AnswerForm

Prompt: TypeAlias = str | Sequence[int]  # a text, or token ids
Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}, as OpenAI's clients write it
Chat: TypeAlias = str | Sequence[Message]  # a question, or a conversation

_HTTP_ONLY = ("stream", "stream_options", "echo", "best_of", "prompt_logprobs", "prompt", "messages", "background")


class LLM:
    """A loaded model and its engine. A context manager; threads and coroutines may share it.

    Args:
        model: A name from ``mlsys models list``, a GGUF file, or a Hugging Face directory.
        dtype: ``"fp32"`` or ``"bf16"``; None: what suits the device.
        weights: ``"float"``, ``"packed"``, ``"int8"`` or ``"int4"``; None: packed where that is fast.
        device: The registered name of a device.
        threads: Threads of the model's operators; 0: all cores this process may use.
        adapters: Directories of LoRA adapters (PEFT's) by the name that ``adapter=`` then takes.
        chat_template: A Jinja file in place of the model's own chat template.
        policy: The scheduling policy's registered name.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens of prompt and answer; None: what the model was made for.
        kv_tokens: K/V slots; None: what fits.
        kv_dtype: Keys and values are kept in ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"int8"``; None or
            ``"auto"``: the model's dtype.
        speculate: Tokens guessed behind each decode at most, by prompt lookup; 0: none.

    Raises:
        InvalidInputError: there is no such model, or the limits do not fit it or the memory.
        MissingDependencyError: the model is known and not installed; the message says how to install it.

    Example:
        >>> from mlsys_orca import LLM
        >>> with LLM("smollm2-135m-instruct") as llm:  # doctest: +SKIP
        ...     print(llm.chat("What is the capital of France?").text)
        ...     for piece in llm.stream("Once upon a time", max_tokens=32):
        ...         print(piece.text, end="")
        The capital of France is Paris.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str | None = None,
        weights: str | None = None,
        activations: str | None = None,
        device: str = "cpu",
        threads: int = 0,
        adapters: Mapping[str, str] | None = None,
        chat_template: Path | str | None = None,
        policy: str = "chunked",
        max_batch_size: int = 16,
        max_model_len: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: str | None = None,
        speculate: int = 0,
    ) -> None:
        from mlsys_orca.api.server import make_service, model_name
        from mlsys_orca.engine.engine import EngineConfig
        from mlsys_orca.loading.named import load

        config = EngineConfig(
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            num_kv_tokens=kv_tokens,
            kv_dtype=kv_dtype,
            num_threads=threads or num_cores(),
            policy=policy,
            num_draft_tokens=speculate,
        )
        loaded = load(
            str(model),
            dtype,
            device=device,
            weights=weights,
            activations=activations,
            adapters=adapters,
            chat_template=None if chat_template is None else Path(chat_template),
        )
        self._service = make_service(loaded, model_name(str(model)), config)
        self._service.engine.start()
        self._thread = LoopThread("orca-llm")

    # --- whole answers

    @overload
    def generate(self, prompts: str, **fields: Any) -> Answer: ...
    @overload
    def generate(self, prompts: Sequence[int], **fields: Any) -> Answer: ...
    @overload
    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]], **fields: Any) -> list[Answer]: ...
    def generate(self, prompts: Any, *, progress: bool | None = None, **fields: Any) -> Answer | list[Answer]:
        """Continue texts; all run at once, as many an iteration as the engine takes.

        Args:
            prompts: A text or its token ids, or a sequence of such.
            progress: Show a bar on stderr; None: in a terminal, for several prompts.
            fields: Fields of ``POST /v1/completions``: ``max_tokens`` (256 here, or what fits), ``temperature`` (0
                here, greedy),
                ``top_p``, ``seed``, ``n``, ``stop``, ``logprobs`` (a number), ``structured_outputs`` and so on; and
                ``adapter``.

        Returns:
            The answer, or in the prompts' order the answers.

        Raises:
            InvalidInputError: a field or a prompt is refused; nothing has run then.
        """
        return self._thread.run(self._all(*_prompts(prompts), self._completion, fields, progress))

    @overload
    def chat(self, conversations: str, **fields: Any) -> Answer: ...
    @overload
    def chat(self, conversations: Sequence[Message], **fields: Any) -> Answer: ...
    @overload
    def chat(self, conversations: Sequence[str] | Sequence[Sequence[Message]], **fields: Any) -> list[Answer]: ...
    def chat(self, conversations: Any, *, progress: bool | None = None, **fields: Any) -> Answer | list[Answer]:
        """Answer questions or conversations through the model's chat template.

        Args:
            conversations: A question or a list of messages, or a sequence of such.
            progress: As :meth:`generate`.
            fields: Fields of ``POST /v1/chat/completions``: those of :meth:`generate`, ``tools``, ``response_format``
                and so on.

        Returns:
            The answer, or in the conversations' order the answers.

        Raises:
            InvalidInputError: the model has no chat template, or as :meth:`generate`.
        """
        return self._thread.run(self._all(*_chats(conversations), self._conversation, fields, progress))

    async def agenerate(self, prompts: Any, **fields: Any) -> Answer | list[Answer]:
        """Continue texts as :meth:`generate`, from any event loop; without a bar."""
        return await self._thread.arun(self._all(*_prompts(prompts), self._completion, fields, progress=False))

    async def achat(self, conversations: Any, **fields: Any) -> Answer | list[Answer]:
        """Answer conversations as :meth:`chat`, from any event loop; without a bar."""
        return await self._thread.arun(self._all(*_chats(conversations), self._conversation, fields, progress=False))

    # --- answers as they grow

    def stream(self, prompt: Prompt | Sequence[Message], **fields: Any) -> Iterator[Piece]:
        """Yield an answer's pieces as they come; leaving the iteration early cancels the request.

        Args:
            prompt: A text or token ids, which the answer continues; or a list of messages, which it answers.
            fields: As :meth:`generate` or :meth:`chat` have them, without ``n``.

        Raises:
            InvalidInputError: as :meth:`generate`.
        """
        from mlsys_orca.llm.collecting import pieces

        return self._thread.iterate(pieces(self._service, *self._one(prompt, fields)))

    def astream(self, prompt: Prompt | Sequence[Message], **fields: Any) -> AsyncIterator[Piece]:
        """Yield an answer's pieces as :meth:`stream`, to any event loop."""
        from mlsys_orca.llm.collecting import pieces

        return self._thread.aiterate(pieces(self._service, *self._one(prompt, fields)))

    # --- life

    def close(self) -> None:
        """Cancel what runs, and free the engine. Idempotent."""
        self._thread.close()
        self._service.engine.close()
        self._service.front.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shape = self._service.engine.shape
        return f"LLM({self._service.name!r}, max_model_len={shape.max_model_len}, kv_tokens={shape.num_kv_tokens})"

    def _repr_html_(self) -> str:
        engine, loaded = self._service.engine, self._service.loaded
        counts = engine.counts()
        rows = {
            "architecture": f"{loaded.config.architecture}, {str(loaded.model.dtype).removeprefix('torch.')}",
            "runs in": "native kernels, the same bits in any batch"
            if engine.shape.is_batch_invariant
            else "torch's operators",
            "weights": f"{loaded.weights_nbytes / 2**20:.0f} MiB",
            "context": f"{engine.shape.max_model_len} tokens",
            "K/V blocks": f"{counts.num_free_blocks} of {counts.num_blocks} free, of {engine.shape.block_size} tokens",
            "policy": f"{engine.config.policy}, at most {engine.config.max_batch_size} requests an iteration",
        }
        return facts_html(self._service.name, rows)

    def _completion(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}

    def _conversation(self, chat: Chat) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat)}

    def _one(self, prompt: Any, fields: Mapping[str, Any]) -> tuple[GenerationParameters, AnswerForm]:
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        body = self._conversation(prompt) if is_chat else self._completion(prompt)
        parameters, form = self._parameters(body, fields)
        if parameters.num_choices != 1:
            raise InvalidInputError(f"n is {parameters.num_choices}; a stream has one answer: leave it out")
        return parameters, form

    def _parameters(
        self, body: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> tuple[GenerationParameters, AnswerForm]:
        from mlsys_serving.http import HttpError

        from mlsys_orca.api.items import parameters_of

        if wrong := next((name for name in _HTTP_ONLY if name in fields), None):
            raise InvalidInputError(f"{wrong!r} is a field of the HTTP endpoints alone: leave it out")
        whole = {"max_tokens": 256, "temperature": 0.0, **fields, **body}
        if "messages" in body:
            if "max_completion_tokens" in fields:
                del whole["max_tokens"]
            if (num := whole.pop("logprobs", None)) is not None and num is not False:
                whole |= {"logprobs": True, "top_logprobs": 0 if num is True else num}
        if (adapter := whole.pop("adapter", None)) is not None:
            whole["model"] = adapter
        try:
            parameters, form = parameters_of(whole, self._service)
            room = self._service.engine.max_model_len - max(map(len, parameters.prompts))
            if "max_tokens" not in fields and 0 < room < (parameters.max_new_tokens or 0):
                parameters = replace(parameters, max_new_tokens=room)
            self._service.check(parameters)
        except HttpError as error:
            raise InvalidInputError(str(error)) from error
        return parameters, form

    async def _all(
        self,
        items: Sequence[Any],
        is_one: bool,
        body_of: Callable[[Any], dict[str, Any]],
        fields: Mapping[str, Any],
        progress: bool | None,
    ) -> Answer | list[Answer]:
        from mlsys_orca.llm.collecting import answer

        asked = await asyncio.to_thread(lambda: [self._parameters(body_of(item), fields) for item in items])
        room = asyncio.Semaphore(2 * self._service.engine.config.max_batch_size)
        with counting(len(items), progress) as advance:

            async def one(parameters: GenerationParameters, form: AnswerForm) -> Answer:
                async with room:
                    found = await answer(self._service, parameters, form)
                advance()
                return found

            tasks = [asyncio.ensure_future(one(*each)) for each in asked]
            try:
                answers = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return answers[0] if is_one else answers


def _prompts(given: object) -> tuple[list[Any], bool]:
    """Return prompts as a list, and True if a single one was given."""
    if _is_prompt(given):
        return [given], True
    if not _is_sequence(given) or not all(map(_is_prompt, given)):
        raise InvalidInputError(f"a prompt is a text, token ids, or a sequence of such; this is {_named(given)}")
    return list(given), False


def _chats(given: object) -> tuple[list[Any], bool]:
    """Return conversations as a list, and True if a single one was given."""
    if _is_chat(given):
        return [given], True
    if not _is_sequence(given) or not all(map(_is_chat, given)):
        raise InvalidInputError(
            f"a chat is a question, a list of messages, or a sequence of such; this is {_named(given)}"
        )
    return list(given), False


def _is_prompt(given: object) -> bool:
    return isinstance(given, str) or _is_filled(given, int)


def _is_chat(given: object) -> bool:
    return isinstance(given, str) or _is_filled(given, Mapping)


def _is_filled(given: object, kind: type) -> bool:
    return _is_sequence(given) and len(given) > 0 and all(isinstance(value, kind) for value in given)


def _is_sequence(given: object) -> TypeGuard[Sequence[object]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _named(given: object) -> str:
    return repr(given)[:80] if _is_sequence(given) else type(given).__name__


@contextmanager
def counting(total: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Give a function to call after each answer.

    Args:
        total: Answers in all.
        shown: Show a bar; None: in a terminal, for several.
    """
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answering", total=total)
        yield lambda: bar.advance(task)
