"""A stream as a directory: its kind in the manifest, its weights as safetensors. No code, nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model

from mlsys_batchmaker.models.store import FORMAT, MANIFEST, WEIGHTS
from mlsys_batchmaker.streams.model import StreamModel

STREAMS = ("silero-vad",)


def save_stream(name: str, directory: Path) -> Path:
    """Write the stream called ``name`` to ``directory``, which is made; return the manifest.

    Raises:
        InvalidInputError: there is no such stream.
        MissingDependencyError: its wheel is not installed; the message says how to get it.
    """
    from safetensors.torch import save

    from mlsys_batchmaker.models.silero import read_weights

    if name not in STREAMS:
        raise InvalidInputError(f"there is no stream {name!r}: {', '.join(STREAMS)}")
    weights = read_weights(resolve_model(name, settings().cache_dir))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS).write_bytes(save({key: tensor.contiguous() for key, tensor in weights.items()}))
    path = directory / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, "version": 1, "name": name, "stream": name}, indent=1) + "\n")
    return path


def holds_stream(directory: Path) -> bool:
    """Return whether the directory's manifest is that of a stream."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT and "stream" in manifest


def load_stream(directory: Path) -> StreamModel:
    """Load a stream that :func:`save_stream` wrote.

    Raises:
        InvalidInputError: the directory holds none, or a damaged one.
    """
    from mlsys_batchmaker.models.silero import silero_stream

    kind = json.loads((directory / MANIFEST).read_text()).get("stream") if holds_stream(directory) else None
    if kind not in STREAMS:
        raise InvalidInputError(f"{directory} holds no stream: write one with mlsys batchmaker save {STREAMS[0]} DIR")
    return silero_stream(directory / WEIGHTS)
