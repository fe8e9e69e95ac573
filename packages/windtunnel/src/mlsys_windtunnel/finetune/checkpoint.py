"""The state of a run after an epoch, on disk: a run that is resumed goes on bit for bit as if never interrupted."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

FILE = "checkpoint.pt"
State = dict[str, Tensor]


@dataclass(slots=True)
class Progress:
    """All that a run carries from one epoch to the next."""

    epoch: int  # epochs done
    network: State
    optimizer: dict[str, Any]
    ema: list[Tensor] | None  # the moving average of the parameters
    best: State  # of the epoch with the best score
    best_epoch: int
    best_score: float
    history: list[dict[str, float]] = field(default_factory=list)


def save(progress: Progress, directory: Path, fingerprint: str) -> None:
    """Write a checkpoint, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"fingerprint": fingerprint, **{each.name: getattr(progress, each.name) for each in fields(progress)}}
    partial = directory / f"{FILE}.{os.getpid()}"
    torch.save(content, partial)
    partial.replace(directory / FILE)


def read(directory: Path) -> bytes | None:
    """Return the checkpoint in a folder as it lies there; None if there is none."""
    path = directory / FILE
    return path.read_bytes() if path.exists() else None


def load(data: bytes, directory: Path, fingerprint: str) -> Progress:
    """Load a checkpoint. No untrusted code is run.

    Args:
        data: Content of the file.
        directory: Folder that it was read from.
        fingerprint: Digest of the run that goes on.

    Raises:
        InvalidInputError: it is damaged, or of a run with other options, data or network.
    """
    path = directory / FILE
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        found = content.pop("fingerprint")
        progress = Progress(**content)
    except Exception as error:  # torch and pickle raise of many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidInputError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if found != fingerprint:
        raise InvalidInputError(
            f"{path} is of another run: other options, data or pipeline. Resume with those, or name an empty folder"
        )
    return progress


def fingerprint_of(*parts: object) -> str:
    """Return a digest that tells runs apart: of options by their text, of tensors by shape, sum and first row."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            flat = part.detach().double().reshape(-1)
            digest.update(f"{tuple(part.shape)} {flat.nansum().item()!r} {flat[:64].tolist()!r}".encode())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()
