"""torch's own generators of random numbers, one a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that torch draws from on ``device`` where none is given; None if it has none.

    Example:
        >>> import torch
        >>> default_generator(torch.device("cpu")) is torch.default_generator
        True
    """
    import torch

    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None
