"""Models by name, for the commands."""

from __future__ import annotations

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model

from mlsys_batchmaker.models.model import Model

NAMES = ("g2p-en", "resemblyzer", "lstm", "seq2seq", "tree-lstm", "beam")


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the powers of two below ``max_batch``, and ``max_batch``."""
    return (*(1 << power for power in range((max_batch - 1).bit_length())), max_batch)


def make_model(name: str, *, hidden: int = 1024, max_batch: int = 64, seed: int = 0) -> Model:
    """Make the model called ``name``; ``hidden`` and ``seed`` apply to models with random weights.

    Raises:
        InvalidInputError: there is no such model.
        MissingDependencyError: its wheel is not installed; the message says how to get it.
    """
    sizes = batch_sizes(max_batch)
    if name == "g2p-en":
        from mlsys_batchmaker.models.g2p import g2p_model

        return g2p_model(resolve_model(name, settings().cache_dir), batch_sizes=sizes)
    if name == "resemblyzer":
        from mlsys_batchmaker.models.speaker import speaker_model

        return speaker_model(resolve_model(name, settings().cache_dir), batch_sizes=sizes)
    if name == "lstm":
        from mlsys_batchmaker.models.sequence import lstm_model

        return lstm_model(hidden_size=hidden, batch_sizes=sizes, seed=seed)
    if name == "seq2seq":
        from mlsys_batchmaker.models.sequence import seq2seq_model

        return seq2seq_model(hidden_size=hidden, encoder_batch_sizes=sizes, decoder_batch_sizes=sizes, seed=seed)
    if name == "tree-lstm":
        from mlsys_batchmaker.models.tree import tree_model

        return tree_model(hidden_size=hidden, batch_sizes=sizes, seed=seed)
    if name == "beam":
        from mlsys_batchmaker.models.beam import beam_model

        return beam_model(hidden_size=hidden, batch_sizes=sizes, seed=seed)
    raise InvalidInputError(f"there is no model {name!r}: {', '.join(NAMES)}")
