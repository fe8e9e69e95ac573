"""mistral.rs through its Python package: a thread reads the stream of one request, then the next one's.

Several streams of one ``Runner`` do not work in 0.9.5: Python's side is "already borrowed", and on a CPU prompts that
are computed together fail ("input tensor is not contiguous").
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mistralrs import ChatCompletionRequest, Runner, Which

from mlsys_bench.orca.peers.engines.http_front import read_words


class PeerEngine:
    """The engine on the GGUF file ``model``; ``RAYON_NUM_THREADS`` gives its threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        path = Path(options["model"])
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
            template.write("{{ messages[0]['content'] }}")  # a prompt as it is
            template.flush()
            self._runner = Runner(which=which, max_seqs=1, prefix_cache_n=0, jinja_explicit=template.name)
        self._words = read_words(Path(options["tokenizer"]))
        self._token_of = {word: token for token, word in self._words.items()}
        self._requests: queue.SimpleQueue[tuple[int, list[int], int]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[int, list[int]] | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        self._requests.put((key, prompt, num_tokens))

    def _run(self) -> None:
        try:
            while True:
                self._answer(*self._requests.get())
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self._events.put(error)

    def _answer(self, key: int, prompt: list[int], missing: int) -> None:
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "".join(self._words[token] for token in prompt)}],
            model="default",
            max_tokens=missing,
            temperature=0.0,
            stream=True,
            ignore_eos=True,
        )
        for chunk in self._runner.send_chat_completion_request(request):
            content = chunk.choices[0].delta.content or ""
            if tokens := [self._token_of[" " + word] for word in content.split()][:missing]:
                missing -= len(tokens)
                self._events.put((key, tokens))
        if missing:
            raise RuntimeError(f"mistral.rs sent {missing} tokens too few")

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        found = []
        try:
            found.append(self._events.get(timeout=timeout_s))
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        for event in found:
            if isinstance(event, Exception):
                raise event
        return [event for event in found if not isinstance(event, Exception)]
