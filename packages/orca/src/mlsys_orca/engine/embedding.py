"""Texts to vectors: BERT-like encoders over packed batches.

Unlike a generation, an embedding is one pass, so there is nothing to schedule between iterations: texts are packed one
after the other into batches of a bounded number of tokens, without padding, and each batch runs once. What a text gets
does not depend on the texts beside it, but for rounding.

    >>> encoder = load_encoder("all-MiniLM-L6-v2")  # doctest: +SKIP
    >>> encoder.embed(["Plants need light.", "So do we."]).shape  # doctest: +SKIP
    torch.Size([2, 384])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.encoder_files import encoder_directory, read_encoder_files
from mlsys_orca.loading.load import DTYPES, default_dtype, usable_device
from mlsys_orca.loading.pooling import Pooling, PoolingMode
from mlsys_orca.model.decoder import AttentionSpan
from mlsys_orca.model.encoder import PairHead, spans_of
from mlsys_orca.model.encoder_family import EncoderConfig
from mlsys_orca.model.weights.checkpoint import Progress
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from mlsys_orca.text.tokenizer import LEAST_MAX_CHARS, Tokenizer
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from mlsys_orca.parallel.group import Holders

DEFAULT_BATCH_TOKENS = 4096  # more gives products nothing, and takes memory


def pack(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[range]:
    """Cut texts into batches, in order: as many as fit each, and at least one.

    Args:
        lengths: Tokens of each text.
        max_batch_tokens: Tokens of a batch; a longer text is a batch by itself.

    Example:
        >>> list(pack([3, 4, 9, 1, 2], 8))
        [range(0, 2), range(2, 3), range(3, 5)]
    """
    start = num_tokens = 0
    for index, length in enumerate(lengths):
        if index > start and num_tokens + length > max_batch_tokens:
            yield range(start, index)
            start, num_tokens = index, 0
        num_tokens += length
    if lengths:
        yield range(start, len(lengths))


class States(Protocol):
    """Forward of an encoder, here or in other processes."""

    @property
    def head(self) -> PairHead | None:
        """For whoever scores pairs."""
        ...

    @property
    def device(self) -> torch.device:
        """Where ids and positions are to lie."""
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Return the states of all tokens; see :class:`~mlsys_orca.model.encoder.Encoder`."""
        ...


class TextEncoder:
    """An encoder with its tokenizer and pooling. One caller at a time.

    Args:
        name: Name of its directory.
        config: The encoder's shape.
        encoder: Its forward.
        tokenizer: Puts the encoder's marks around a text.
        pooling: Rules for a vector of a text's states.
    """

    def __init__(
        self, name: str, *, config: EncoderConfig, encoder: States, tokenizer: Tokenizer, pooling: Pooling
    ) -> None:
        self.name = name
        self.config = config
        self.pooling = pooling
        self.max_tokens = min(pooling.max_tokens or config.max_positions, config.max_positions)
        self.holders: Holders | None = None  # processes that have its parts; whoever starts others starts them, too
        self._encoder = encoder
        self._tokenizer = tokenizer

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self.config.hidden_size

    def tokenize(self, text: str, *, truncate: bool = False) -> list[int]:
        """Return the token ids of ``text``, the encoder's marks among them.

        Args:
            text: Any; the model's prompt, if it has one, goes before it.
            truncate: Cut the end of a text of more than ``max_tokens``, as sentence-transformers does.

        Raises:
            InvalidInputError: it is too long, and not to be cut; or it is no valid Unicode.
        """
        text = self._bounded(text, truncate=truncate)
        limit = self.max_tokens if truncate else None
        token_ids = self._tokenizer.encode(self.pooling.prompt + text, add_bos=True, max_tokens=limit)
        self._check(token_ids)
        return token_ids

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Return the vectors of texts.

        Args:
            inputs: Texts, or their token ids as :meth:`tokenize` gives them.
            truncate: See :meth:`tokenize`; token ids are never cut.
            max_batch_tokens: Tokens that run at a time; a longer text runs by itself.
            progress: Called with the texts done so far and those in all.

        Returns:
            fp32 [len(inputs), dimension], on the CPU.

        Raises:
            InvalidInputError: a text is empty of tokens or too long, or a token id is not in the vocabulary.
        """
        texts: list[Sequence[int]] = []
        for item in inputs:
            if not isinstance(item, str):
                self._check(item)
            texts.append(self.tokenize(item, truncate=truncate) if isinstance(item, str) else item)
        vectors = torch.empty(len(texts), self.dimension)
        for batch in pack([len(text) for text in texts], max_batch_tokens):
            vectors[batch.start : batch.stop] = self._run(texts[batch.start : batch.stop])
            if progress:
                progress(batch.stop, len(texts))
        return vectors

    def _bounded(self, text: str, *, truncate: bool) -> str:
        """Return ``text``, or as much of it as can matter; what is certainly too long is not tokenised."""
        most = max(LEAST_MAX_CHARS, 16 * self.max_tokens * self._tokenizer.max_token_chars)
        if len(text) > most and not truncate:
            raise InvalidInputError(
                f"a text has {len(text)} characters, and none of more than {most} fits {self.name}'s "
                f"{self.max_tokens} tokens: split it, or have it truncated"
            )
        return text[:most]

    def _check(self, token_ids: Sequence[int]) -> None:
        if not 1 <= len(token_ids) <= self.max_tokens:
            raise InvalidInputError(
                f"a text has {len(token_ids)} tokens; {self.name} takes from 1 to {self.max_tokens}: "
                "split it, or have it truncated"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            raise InvalidInputError(
                f"token ids from {min(token_ids)} to {max(token_ids)} are not all in the vocabulary of "
                f"{self.config.vocab_size} tokens"
            )

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder: it scores pairs of texts, and its vectors mean nothing."""
        return self.config.scores_pairs

    def score(
        self,
        first: str,
        others: Sequence[str],
        *,
        truncate: bool = False,
        max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ) -> tuple[Tensor, int]:
        """Score the fit of ``first`` with each of ``others``, by a cross-encoder's head (Nogueira and Cho, 2019).

        Args:
            first: A query.
            others: Documents.
            truncate: Cut the end of a document where the pair is too long.
            max_batch_tokens: See :meth:`embed`.

        Returns:
            fp32 [len(others)] from 0 to 1, the sigmoid of the head's logit; and the tokens of all pairs.

        Raises:
            InvalidInputError: a pair is too long, or the encoder has no such head.
        """
        if not self.scores_pairs:
            raise InvalidInputError(f"{self.name} is no cross-encoder: compare its vectors")
        limit = self.max_tokens if truncate else None
        first = self._bounded(first, truncate=False)
        rest = (self._bounded(other, truncate=truncate) for other in others)
        pairs = [self._tokenizer.encode_pair(first, other, max_tokens=limit) for other in rest]
        for token_ids, _ in pairs:
            self._check(token_ids)
        scores = torch.empty(len(pairs))
        for batch in pack([len(token_ids) for token_ids, _ in pairs], max_batch_tokens):
            scores[batch.start : batch.stop] = self._run_pairs(pairs[batch.start : batch.stop])
        return scores, sum(len(token_ids) for token_ids, _ in pairs)

    @torch.inference_mode()
    def _run_pairs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        head = self._encoder.head
        assert head is not None
        # The position table has the rows of tokens of the second type below those of the first.
        second = self.config.num_position_rows if self.config.has_second_type else 0
        states, starts, _ = self._states(
            [token_ids for token_ids, _ in pairs],
            torch.cat([torch.arange(len(types)) + second * torch.tensor(types) for _, types in pairs]),
        )
        scores: Tensor = head(states[starts.to(states.device)]).sigmoid().cpu()
        return scores

    def _states(self, texts: Sequence[Sequence[int]], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of all tokens, and the starts and lengths of the texts."""
        lengths = torch.tensor([len(text) for text in texts])
        token_ids = torch.tensor([token_id for text in texts for token_id in text])
        device = self._encoder.device
        states = self._encoder(token_ids.to(device), positions.to(device), spans_of(lengths.tolist())).float()
        return states, lengths.cumsum(0) - lengths, lengths

    @torch.inference_mode()
    def _run(self, texts: Sequence[Sequence[int]]) -> Tensor:
        states, starts, lengths = self._states(texts, torch.cat([torch.arange(len(text)) for text in texts]))
        states = states.cpu()
        if self.pooling.mode == "cls":
            vectors = states[starts]
        else:
            owners = torch.repeat_interleave(torch.arange(len(texts)), lengths)
            vectors = states.new_zeros(len(texts), self.dimension).index_add_(0, owners, states) / lengths[:, None]
        return functional.normalize(vectors, dim=1) if self.pooling.normalize else vectors


def load_encoder(
    path: Path | str,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    pooling: PoolingMode | None = None,
    normalize: bool | None = None,
    progress: Progress | None = None,
) -> TextEncoder:
    """Load an encoder from a Hugging Face directory, of sentence-transformers or not.

    Args:
        path: Holds ``config.json``, safetensors and ``tokenizer.json``; what it holds of ``modules.json`` and the files
            that names is obeyed.
        dtype: ``"fp32"`` or ``"bf16"``, to compute in; None: what suits the device.
        device: The registered name of a device.
        pooling: ``"cls"`` or ``"mean"``; None: what the directory says, else the mean.
        normalize: Scale vectors to length 1; None: as the directory says, else no.
        progress: Called with the bytes of weights read so far and those in all.

    Raises:
        InvalidInputError: a file is missing or damaged, or the model needs something that is not implemented.
        DeviceError: the device is not usable.

    Example:
        >>> load_encoder("all-MiniLM-L6-v2").embed([[101, 7592, 102]]).shape  # doctest: +SKIP
        torch.Size([1, 384])
    """
    where = encoder_directory(path, dtype=dtype)
    with readable(where):
        found = read_encoder_files(where, pooling=pooling, normalize=normalize)
        target = usable_device(device)
        encoder = found.family.load(
            found.config,
            SafetensorsDirectory(found.path),
            dtype=DTYPES[dtype or default_dtype(target)],
            device=target,
            progress=progress,
        )
        return TextEncoder(
            found.name, config=found.config, encoder=encoder, tokenizer=found.tokenizer(), pooling=found.pooling
        )
