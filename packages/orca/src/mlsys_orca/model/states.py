"""Sizes of recurrent layers and of their states.

A recurrent layer (Mamba-2, 2024; gated delta nets, 2024) keeps no keys and values. It keeps a matrix for each head,
which every token changes, and the last few inputs of a convolution. A request's states of all such layers are one row
here, its slot, which the scheduler gives and takes back with the request's K/V blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.limits import MAX_HEADS, MAX_WIDTH

_STATE_ITEMSIZE = 4  # fp32, whatever the model's dtype: errors of a state stay in it


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPart:
    """Sizes of a model's recurrent layers, all alike."""

    rule: Literal["decay", "delta"]  # a token adds to its head's state; or first takes what the state has for its key
    layers: tuple[bool, ...]  # [num_layers] whether a layer is recurrent; the others attend
    num_heads: int
    num_groups: int  # of heads that share a key and a query
    head_dim: int  # features of a head's values
    state_size: int  # features of a key
    num_taps: int  # inputs that a convolution sees, the newest included
    norm_eps: float  # of the norm beside the gates, which reads no states
    is_tiled: bool = False  # heads share a key with every num_groups-th head, not with their neighbours

    def __post_init__(self) -> None:
        for name, most in (("num_heads", MAX_HEADS), ("num_groups", MAX_HEADS), ("num_taps", MAX_HEADS)):
            _check(name, getattr(self, name), most)
        for name in ("head_dim", "state_size", "num_channels", "num_values"):
            _check(name, getattr(self, name), MAX_WIDTH)
        if self.num_heads % self.num_groups:
            raise InvalidInputError(f"{self.num_heads} recurrent heads cannot share {self.num_groups} keys")
        if not 0 < self.norm_eps < inf:
            raise InvalidInputError(f"the recurrent layers' norm_eps is {self.norm_eps}; it must be above 0 and finite")

    def index(self, layer: int) -> int:
        """Return the number of ``layer`` among the recurrent ones."""
        return sum(self.layers[:layer])

    def kv_index(self, layer: int) -> int:
        """Return the number of ``layer`` among those that keep keys and values."""
        return layer - self.index(layer)

    @property
    def num_values(self) -> int:
        """Features of all heads' values."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Features that pass the convolution: values, keys, queries."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def num_kept_inputs(self) -> int:
        """Floats of a layer's convolution that a state has: [num_taps - 1, num_channels]."""
        return (self.num_taps - 1) * self.num_channels

    @property
    def num_floats(self) -> int:
        """Floats of one layer's state: what its convolution keeps, then [num_heads, head_dim, state_size]."""
        return self.num_kept_inputs + self.num_values * self.state_size

    @property
    def num_layers(self) -> int:
        """Recurrent layers."""
        return sum(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of a request's states."""
        return self.num_layers * self.num_floats * _STATE_ITEMSIZE


def _check(name: str, size: object, most: int) -> None:
    if type(size) is not int or not 1 <= size <= most:
        raise InvalidInputError(f"the recurrent layers' {name} is {str(size)[:50]}; it must be from 1 to {most}")
