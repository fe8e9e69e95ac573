"""Parameters of a generation in no protocol's words, and the running answers of an accepted request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from mlsys_orca.api.identity import Identity
from mlsys_orca.api.text_stream import TextDelta, TextOptions
from mlsys_orca.engine.streams import TokenStream
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.images import PlacedImage
from mlsys_orca.scheduling.request import GenerationRequest
from mlsys_orca.text.guides import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParameters:
    """Parameters of a generation, in no protocol's words."""

    prefix: str  # of the answer's id
    model: str  # the name that the client gave: the model's or an adapter's
    prompts: Sequence[Sequence[int]] = ()  # token ids; in a finished request at least one prompt of one token
    images: tuple[PlacedImage, ...] = ()  # of the prompt, if there is one
    max_new_tokens: int | None  # None: what the context has room for
    sampling: SamplingParams  # of the first choice; seed and guide are set here
    seed: int | None = None  # None: drawn
    num_choices: int = 1  # of each prompt
    grammar: Grammar | None = None
    ignores_eos: bool = False
    text: TextOptions = field(default_factory=TextOptions)


@dataclass(frozen=True, slots=True)
class Choice:
    """One running answer."""

    index: int  # among all choices of the request
    tokens: TokenStream
    deltas: AsyncGenerator[TextDelta, None]

    @property
    def request(self) -> GenerationRequest:
        """The engine's request behind this answer."""
        return self.tokens.request


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted request with its running answers. Close it."""

    answer_id: str
    identity: Identity
    model: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_choices: int = 1  # of each prompt

    @property
    def created(self) -> int:
        """Time of its begin, in seconds since the epoch."""
        return self.identity.created

    def close(self) -> None:
        """Cancel what has not finished. Idempotent."""
        for choice in self.choices:
            choice.tokens.close()
