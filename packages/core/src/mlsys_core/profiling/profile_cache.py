"""Profile tables on disk, so that a machine measures a model once."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling.files import atomic_write
from mlsys_core.profiling.profile_table import ProfileTable


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that a table's times depend on; another device, version or content is another table."""

    device: str  # description of the device: model, cores, threads used
    versions: tuple[tuple[str, str], ...]  # (distribution, version), sorted by name
    content: str  # the measured object: model, its weights' digest, dtype, batch sizes

    @staticmethod
    def of(device: str, versions: Mapping[str, str], content: str) -> ProfileKey:
        """Return a key made from a mapping of versions.

        Example:
            >>> ProfileKey.of("cpu", {"torch": "2.11", "mlsys-core": "0.1"}, "lstm-1024-float32").versions[0]
            ('mlsys-core', '0.1')
        """
        return ProfileKey(device, tuple(sorted(versions.items())), content)

    def digest(self) -> str:
        """Return the name of the key's file, without folder and ending."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:32]

    def _text(self) -> str:
        return json.dumps({"device": self.device, "versions": dict(self.versions), "content": self.content})


class ProfileCache:
    """Profile tables in a folder, one file each, which also holds its key. Several processes may share it.

    Args:
        cache_dir: The folder; made when the first table is put into it.

    Example:
        >>> import tempfile
        >>> from mlsys_core.profiling import measure
        >>> cache = ProfileCache(Path(tempfile.mkdtemp()))
        >>> key = ProfileKey.of("cpu", {"torch": "2.11"}, "square")
        >>> run = lambda unit, batch_size: sum(range(99 * batch_size))
        >>> table = cache.get_or_measure(key, lambda: measure(["square"], [1, 2], run=run))
        >>> cache.get(key) == table
        True
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def path(self, key: ProfileKey) -> Path:
        """Return the path of the table of ``key``, whether it exists or not."""
        return self.cache_dir / f"{key.digest()}.json"

    def get(self, key: ProfileKey) -> ProfileTable | None:
        """Return the table of ``key``; None if there is none, or, with a ``RuntimeWarning``, if its file is damaged."""
        path = self.path(key)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["key"] != json.loads(key._text()):
                raise ValueError("it holds the table of another key")
            return ProfileTable.from_json(json.dumps(document["table"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # InvalidInputError is a ValueError
            warnings.warn(
                f"ignoring the profile {path}, it will be measured again: {error}", RuntimeWarning, stacklevel=2
            )
            return None

    def notes(self, key: ProfileKey) -> dict[str, float]:
        """Return the numbers that were stored beside the table of ``key``; empty if there are none."""
        try:
            document = json.loads(self.path(key).read_text(encoding="utf-8"))
            return {str(name): float(value) for name, value in document["notes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}

    def put(self, key: ProfileKey, table: ProfileTable, notes: Mapping[str, float] | None = None) -> None:
        """Store ``table`` under ``key``, replacing an older one.

        Args:
            key: of the table.
            table: to store.
            notes: finite numbers to store beside it, such as how quiet the machine was.

        Raises:
            InvalidInputError: the folder cannot be made or written to.
        """
        document = {"key": json.loads(key._text()), "table": json.loads(table.to_json()), "notes": dict(notes or {})}
        text = json.dumps(document, indent=1, allow_nan=False)
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path(key)) as file:
                file.write(text.encode())
        except OSError as error:
            raise InvalidInputError(
                f"cannot keep profiles in {self.cache_dir}: {error}; name another folder"
            ) from error

    def get_or_measure(
        self, key: ProfileKey, measure: Callable[[], ProfileTable], *, notes: Mapping[str, float] | None = None
    ) -> ProfileTable:
        """Return the table of ``key`` from the folder, or else measure and store it with ``notes``.

        ``notes`` are read after measuring, which may change them. A folder that cannot be written to causes a
        ``RuntimeWarning``; the table just measured is still returned.
        """
        table = self.get(key)
        if table is None:
            table = measure()
            try:
                self.put(key, table, notes)
            except InvalidInputError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return table
