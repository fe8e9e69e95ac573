"""Identity of a node: its code, its kernels, and a digest of its own copy of the model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlsys_orca import __version__
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.parallel.hosts.secrets import Identity
from mlsys_orca.parallel.parts import recipe_of

_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 64  # of each file


def identity_of(path: Path, config: ModelConfig, *, name: str = "") -> Identity:
    """Return the claims of this machine about a model.

    The digest is of the configuration, and of sizes, beginnings and samples of the files: two checkpoints of one shape
    differ in it, and a large one is not read whole.

    Args:
        path: A GGUF file, or a directory in Hugging Face layout.
        config: The model's.
        name: Of the side, or of the channel.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for file in files:
        if file.suffix in (".gguf", ".safetensors"):
            _add(digest, file)
    return Identity(version=__version__, recipe=recipe_of(), model=digest.hexdigest(), name=name)


def node_name(host: str, seat: int | None) -> str:
    """Return a node's name in its identity.

    Args:
        host: Of its machine.
        seat: That it would have; None: any.
    """
    return f"node {host}" if seat is None else f"node {host} seat {seat}"


def host_and_seat(name: str) -> tuple[str, int | None]:
    """Return what :func:`node_name` was made of; no seat, if the name is made otherwise.

    Example:
        >>> host_and_seat(node_name("red", 2)), host_and_seat("node green")
        (('red', 2), ('green', None))
    """
    host, _, seat = name.removeprefix("node ").partition(" seat ")
    return host, int(seat) if seat.isdecimal() and len(seat) < 9 else None


def _add(digest: hashlib.blake2b, file: Path) -> None:
    nbytes = file.stat().st_size
    digest.update(nbytes.to_bytes(8, "little"))
    with file.open("rb") as data:
        for index in range(_NUM_SAMPLES):
            data.seek(max(0, nbytes - _SAMPLE_NBYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(data.read(_SAMPLE_NBYTES))
