"""Rotary factors by position, computed once: for one token, torch's seven operators take a twentieth of the model."""

from __future__ import annotations

import torch
from mlsys_orca.model.layers import Rotary
from torch import Tensor

_FIRST = 1024  # positions to begin with
_MOST = 1 << 15  # beyond them factors are computed anew: a table would take as much memory as a layer


class Factors:
    """Rotary factors by position, as :class:`~mlsys_orca.model.layers.Rotary` gives, from a table that grows.

    Args:
        rotary: which.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table: tuple[Tensor, Tensor] = rotary(torch.arange(_FIRST))

    def __call__(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of ``positions`` [num_tokens] int64, each fp32 [num_tokens, 1, rotary_dim].

        Args:
            positions: of the tokens.
            highest: none of them is above it.
        """
        if highest >= len(self._table[0]):
            if highest >= _MOST:
                return self._rotary(positions)  # type: ignore[no-any-return]
            self._table = self._rotary(torch.arange(1 << (highest + 1).bit_length()))
        cos, sin = self._table
        return cos[positions], sin[positions]
