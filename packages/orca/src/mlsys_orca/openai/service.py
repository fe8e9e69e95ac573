"""From a request body to a running generation: model name, prompt, limits and sampling, all checked here."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import structlog
from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.http import HttpError

from mlsys_orca.batch import SamplingParams
from mlsys_orca.engine import Engine
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.openai.requests import ChatCompletionRequest, CompletionRequest
from mlsys_orca.scheduler import GenerationRequest
from mlsys_orca.text_stream import TextDelta, stream_text


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted request, ready to stream."""

    answer_id: str
    created: int  # seconds since the epoch
    request: GenerationRequest
    deltas: AsyncGenerator[TextDelta, None]


@dataclass(frozen=True, slots=True)
class ModelService:
    """One served model: its engine, its tokenizer, and the name clients use."""

    name: str
    loaded: LoadedModel
    engine: Engine
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    def chat(self, body: ChatCompletionRequest) -> Generation:
        """Accept a chat request.

        Raises:
            HttpError: another model was asked for (404).
            InvalidInputError: the model has no chat template or refuses the messages, or the prompt is too long.
        """
        self._accept(body)
        template = self.loaded.chat_template
        if template is None:
            raise InvalidInputError(f"model {self.name!r} has no chat template: use /v1/completions")
        messages = [message.for_template() for message in body.messages]
        prompt = template.encode(messages, self.loaded.tokenizer)
        max_tokens = body.max_completion_tokens or body.max_tokens
        return self._start("chatcmpl", body, prompt, max_tokens, num_logprobs=body.num_logprobs)

    def complete(self, body: CompletionRequest) -> Generation:
        """Accept a completion request; errors as :meth:`chat`."""
        self._accept(body)
        tokenizer = self.loaded.tokenizer
        if isinstance(body.prompt, str):
            prompt = tokenizer.encode(body.prompt, add_bos=True)
        else:
            prompt = body.prompt
            if max(prompt) >= self.loaded.config.vocab_size:
                raise InvalidInputError(
                    f"token id {max(prompt)} is not in the vocabulary of {self.loaded.config.vocab_size} tokens"
                )
        # The protocol's default of 16 new tokens for this older endpoint.
        return self._start("cmpl", body, prompt, body.max_tokens or 16, num_logprobs=body.logprobs)

    def _accept(self, body: ChatCompletionRequest | CompletionRequest) -> None:
        if body.user:
            structlog.contextvars.bind_contextvars(user=body.user)  # into the request's log line
        if body.model != self.name:
            raise HttpError(
                f"the model {body.model!r} does not exist here; this server has {self.name!r}",
                http_status=404,
                error_code="model_not_found",
                param="model",
            )

    def _start(
        self,
        prefix: str,
        body: ChatCompletionRequest | CompletionRequest,
        prompt: list[int],
        max_new_tokens: int | None,
        *,
        num_logprobs: int | None,
    ) -> Generation:
        encoder, num_encoder_tokens = self.loaded.config.encoder, 0
        if encoder is not None:
            prompt, num_encoder_tokens = [*prompt, *encoder.start_token_ids], len(prompt)
        room = self.engine.max_model_len - len(prompt)
        if room < 1 or (max_new_tokens or 1) > room:
            raise HttpError(
                f"this model's context is {self.engine.max_model_len} tokens; the prompt has {len(prompt)} and "
                f"{max_new_tokens or 1} more were asked for: shorten the prompt or lower max_tokens",
                http_status=400,
                error_code="context_length_exceeded",
            )
        sampling = SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            num_logprobs=num_logprobs,
        )
        request = GenerationRequest(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(prompt),
            max_new_tokens=max_new_tokens or room,
            sampling=sampling,
            stop_token_ids=self.loaded.tokenizer.eos_ids,
            num_encoder_tokens=num_encoder_tokens,
        )
        deltas = stream_text(self.engine, self.loaded.tokenizer, request, stop_strings=body.stop_strings)
        return Generation(request.request_id, int(time.time()), request, deltas)
